"""A parsed kernel prepared for execution: names become register slots, labels indices, and parameters bytes."""

import re
import struct
from dataclasses import dataclass
from functools import cached_property

import numpy

from ptx_executor.build import core
from ptx_executor.control_flow import reconvergence
from ptx_executor.parse import Kernel, Operand, Statement

# More than any of our launches needs. An endless loop is reported after about a minute.
MOST_INSTRUCTIONS = 2_000_000_000
COUNTS = ("executed", "lanes", "bytes", "sectors", "wavefronts", "multiply_adds")


class WatcherError(Exception):
    """A watcher rejected an action of the kernel, or PTX forbids it.

    Attributes:
        kind: one of :data:`ptx_executor.KINDS`.
        kernel, line, text: the instruction, with its line in the PTX.
        source: file and line that it was compiled from, or None.
        block, warp, lane: where it happened; lane is -1 if it concerns all lanes.
        address: in global or shared memory; 0 if there is none.
    """

    def __init__(self, kernel: str, statement: Statement, failure: dict):
        self.kind, self.block, self.warp = failure["kind"], failure["block"], failure["warp"]
        self.lane, self.address = failure["lane"], failure["address"]
        self.kernel, self.line, self.text, self.source = kernel, statement.line, statement.text, statement.source
        where = f" (from {self.source[0]}:{self.source[1]})" if self.source else ""
        lane = f", lane {self.lane}" if self.lane >= 0 else ""
        address = f", address {self.address:#x}" if self.address else ""
        super().__init__(
            f"{self.kind}: {failure['what']}\n  {kernel}, block {self.block}, warp {self.warp}{lane}{address}\n"
            f"  PTX line {self.line}{where}: {self.text[:200]}"
        )


@dataclass(frozen=True)
class Result:
    """Result of a launch: ``counts [instructions, 6]`` int64 with columns :data:`COUNTS`, one row per statement."""

    program: "Program"
    counts: numpy.ndarray
    blocks: int

    def column(self, name: str) -> numpy.ndarray:
        """One of :data:`COUNTS`, for every statement."""
        return self.counts[:, COUNTS.index(name)]


class Program:
    """A kernel that can be launched.

    Raises:
        ValueError: an instruction, a form of it or an operand is unknown; the message contains it and its line.
    """

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self._slots: dict[str, int] = {}
        self._constants: dict[int, int] = {}
        self._specials: dict[int, str] = {}
        self._symbols, self.static_shared = self._place_symbols()
        meets = reconvergence(kernel)
        rows = [self._row(place, statement, meets) for place, statement in enumerate(kernel.statements)]
        self._program = core().Program(kernel.name, len(self._slots), self._constants, self._specials)
        added = None
        try:
            for added, row in zip(kernel.statements, rows, strict=True):
                self._program.add(added.name, *row)
        except ValueError as error:
            raise ValueError(f"{kernel.name}, PTX line {added.line}: {error}: {added.text[:200]}") from None

    @cached_property
    def classes(self) -> list[str]:
        """The part of a multiprocessor that each statement keeps busy."""
        return self._program.classes()

    def launch(
        self,
        arguments: bytes,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        memory,
        *,
        dynamic_shared: int = 0,
        blocks: list[int] | None = None,
        seed: int = 0,
        strict_wgmma: bool = True,
    ) -> Result:
        """Run the kernel.

        Args:
            arguments: the parameters as laid out in memory; see :func:`packed`.
            grid: numbers of blocks, x first.
            block: numbers of threads, x first.
            memory: a ``GlobalMemory`` that knows the tensors that were passed.
            dynamic_shared: bytes of shared memory beyond the kernel's own.
            blocks: the blocks to run, as ``x + grid_x * (y + grid_y * z)``; None: all.
            strict_wgmma: apply the rules of the PTX ISA: wgmma may read what ``cp.async`` wrote only after a
                ``fence.proxy.async``, and a register that a wgmma reads may be written only after its wait.
            seed: for the order in which blocks run and warps alternate.

        Raises:
            WatcherError: a watcher rejected an action. Memory is then in the state before the failing instruction.
        """
        chosen = list(range(grid[0] * grid[1] * grid[2])) if blocks is None else blocks
        counts, failure = core().run(
            self._program,
            memory,
            grid,
            block,
            arguments,
            self.static_shared + dynamic_shared,
            chosen,
            seed,
            MOST_INSTRUCTIONS,
            strict_wgmma,
        )
        if failure is not None:
            raise WatcherError(self.kernel.name, self.kernel.statements[failure["instruction"]], failure)
        return Result(self, counts, len(chosen))

    def _place_symbols(self) -> tuple[dict[str, int], int]:
        symbols = {name: offset for name, (offset, _) in self.kernel.parameters.items()}
        used = 0
        for name, (size, alignment) in self.kernel.shared.items():
            used = -(-used // alignment) * alignment
            symbols[name] = core().SHARED_BASE + used
            used += size
        if self.kernel.dynamic_shared:
            used = -(-used // 16) * 16
            symbols[self.kernel.dynamic_shared] = core().SHARED_BASE + used
        return symbols, used

    def _row(self, place: int, statement: Statement, meets: dict[int, int]):
        operands, target = statement.operands, -1
        if statement.name.split(".")[0] == "bra":
            target, operands = self.kernel.labels[operands[0].names[0]], ()
        slots = [([self._slot(name, statement) for name in operand.names], operand.offset) for operand in operands]
        guard = (self._slot(statement.guard[0], statement), statement.guard[1]) if statement.guard else None
        return slots, guard, target, meets.get(place, -1)

    def _slot(self, name: str, statement: Statement) -> int:
        if name in self._slots:
            return self._slots[name]
        slot = self._slots[name] = len(self._slots)
        if name in self._symbols:
            self._constants[slot] = self._symbols[name]
        elif name.startswith("%"):
            # Registers are %p1, %rd2, %f3, ...; special registers have other names.
            if not re.fullmatch(r"%(p|rs|r|rd|f|fd|h|hh|rh|temp)\d*", name):
                self._specials[slot] = name
        elif name != "_":
            try:
                self._constants[slot] = _constant(name)
            except ValueError:
                raise ValueError(
                    f"{self.kernel.name}, PTX line {statement.line}: {name} is not known: {statement.text}"
                ) from None
        return slot


def _constant(text: str) -> int:
    if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", text):
        return int(match[1] or match[2], 16)
    return int(text.removesuffix("U"), 0) & (1 << 64) - 1


def packed(kernel: Kernel, values: list[tuple[str, int | float]]) -> bytes:
    """Arguments laid out as a kernel's parameters.

    Args:
        kernel: the kernel whose parameters they are. Missing ones are 0.
        values: in order, with their ``struct`` formats: "Q", "i", "f" and so on.

    Raises:
        ValueError: there are too many values, or the size of one differs from its parameter.
    """
    size = max((offset + size for offset, size in kernel.parameters.values()), default=0)
    data = bytearray(size)
    if len(values) > len(kernel.parameters):
        raise ValueError(
            f"{kernel.name} has {len(kernel.parameters)} parameters, and {len(values)} arguments were given"
        )
    for (form, value), (offset, room) in zip(values, kernel.parameters.values(), strict=False):
        if struct.calcsize("<" + form) != room:
            raise ValueError(
                f"{kernel.name}: an argument of {struct.calcsize('<' + form)} bytes for a parameter of {room}"
            )
        struct.pack_into("<" + form, data, offset, value)
    return bytes(data)


__all__ = ["COUNTS", "MOST_INSTRUCTIONS", "Operand", "Program", "Result", "WatcherError", "packed"]
