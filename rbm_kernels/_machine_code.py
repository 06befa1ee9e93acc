"""Registers, memory and instructions of compiled kernels, read from their machine code. No GPU is needed."""

import bisect
import importlib.util
import itertools
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass
class MachineCode:
    """The resources that a kernel needs on a multiprocessor, and its instructions.

    Attributes:
        registers: registers per thread.
        spilled_bytes: bytes of stack and local memory per thread.
        shared_bytes: bytes of static shared memory per block.
        instructions: how often each instruction occurs in the code.
        main_loop: the same for the innermost loop with the most multiply-adds; empty if no loop has a matrix
            instruction.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions: dict[str, int]
    main_loop: dict[str, int]


# The address of an instruction, a predicate if there is one, and its name with modifiers; and the target of a branch.
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)")
_TARGET = re.compile(r"\bBRA\S* (?:!?U?P\w+, )?0x([0-9a-f]+)")
# Matrix instructions of all architectures: HMMA, HGMMA, UTCHMMA, ...
MATRIX_INSTRUCTION = re.compile(r"[A-Z]*MMA\b")


class _Listing:
    """The instructions of one kernel, line by line."""

    def __init__(self) -> None:
        self._code: list[tuple[int, str]] = []
        self._backward: list[tuple[int, int]] = []  # backward branches: target, own address

    def add(self, line: str, match: re.Match[str]) -> None:
        address, name = int(match[1], 16), match[2]
        self._code.append((address, name))
        if (target := _TARGET.search(line)) and int(target[1], 16) <= address:
            self._backward.append((int(target[1], 16), address))

    def counts(self) -> dict[str, int]:
        return dict(Counter(name for _, name in self._code))

    def main_loop(self) -> dict[str, int]:
        loops = []
        for first, last in self._backward:
            names = Counter(name for address, name in self._code if first <= address <= last)
            if any(MATRIX_INSTRUCTION.match(name) for name in names):
                loops.append((first, last, names))
        innermost = [
            names
            for first, last, names in loops
            if not any((first, last) != other[:2] and first <= other[0] and other[1] <= last for other in loops)
        ]
        return dict(
            max(innermost, key=lambda names: sum(n * multiply_adds(name) for name, n in names.items()), default={})
        )


def multiply_adds(name: str) -> int:
    """Multiply-adds of one matrix instruction, which a warp executes, or four warps on Hopper; 1 if its name does not
    contain its sizes, and 0 for other instructions.
    """
    if match := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", name):
        return int(match[1]) * int(match[2]) * int(match[3])
    if match := re.match(r"HMMA\.168(16|8|4)\b", name):
        return 16 * 8 * int(match[1])
    return int(bool(MATRIX_INSTRUCTION.match(name)))


def find_cuobjdump() -> str | None:
    """Path of Triton's cuobjdump, which reads all code that Triton generates, or else CUDA's; None without either."""
    triton = importlib.util.find_spec("triton")
    folders = [os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    if triton is not None and triton.origin is not None:
        folders.insert(0, str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    return shutil.which("cuobjdump", path=os.pathsep.join(folders))


def cuobjdump(*arguments: str) -> str:
    """The output of cuobjdump.

    Raises:
        FileNotFoundError: it is not installed.
    """
    return _printed("cuobjdump", *arguments)


def _printed(name: str, *arguments: str) -> str:
    tool = find_cuobjdump()
    if tool is None:
        raise FileNotFoundError("cuobjdump was not found: install triton or the CUDA toolkit")
    # It runs nvdisasm, which is in the same folder.
    folder = Path(tool).parent
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    command = [str(folder / name), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def read(file: Path) -> dict[tuple[int, str], MachineCode]:
    """All kernels of a cubin or a library, by architecture (80, 90, ...) and mangled name."""
    usage: dict[str, list[dict[str, int]]] = defaultdict(list)
    listings: dict[tuple[int, str], _Listing] = {}
    architecture, kernel = 0, ""
    for line in cuobjdump("--dump-resource-usage", "--dump-sass", str(file)).splitlines():
        if match := _INSTRUCTION.match(line):
            listings[architecture, kernel].add(line, match)
        elif match := re.match(r"\s*code for sm_(\d+)", line):
            architecture = int(match[1])
        elif match := re.match(r"\s*Function : (\S+)", line):
            kernel = match[1]
            listings[architecture, kernel] = _Listing()
        elif match := re.match(r"\s*Function (\S+):$", line):
            kernel = match[1]
        elif "REG:" in line:
            usage[kernel].append(_usage(line))
    # The usages of a kernel are printed before its listings, with the architectures in the same order.
    return {key: _machine_code(usage[key[1]].pop(0), listing) for key, listing in listings.items()}


def read_together(cubins: Sequence[bytes], architecture: int) -> list[MachineCode]:
    """Like :func:`read`, for cubins of one kernel each and one architecture, in a fraction of the time.

    nvdisasm takes half a second to start. It also accepts bare instructions, so it gets those of all kernels in one
    file, and the addresses in its listing identify the kernels.
    """
    if not cubins:
        return []
    codes = [_instructions(cubin) for cubin in cubins]
    with tempfile.TemporaryDirectory() as folder:
        together = Path(folder) / "together"
        together.write_bytes(b"".join(codes))
        suffix = "a" if architecture >= 90 else ""  # with the instructions that only this architecture has
        listing = _printed("nvdisasm", "--binary", f"SM{architecture}{suffix}", str(together))
        usages = []
        for place, cubin in enumerate(cubins):
            file = Path(folder) / f"{place}.cubin"
            file.write_bytes(cubin)
            usages.append(_usage(cuobjdump("--dump-resource-usage", str(file))))
    found = [_Listing() for _ in cubins]
    ends = list(itertools.accumulate(map(len, codes)))
    for line in listing.splitlines():
        if match := _INSTRUCTION.match(line):
            found[bisect.bisect_right(ends, int(match[1], 16))].add(line, match)
    return [_machine_code(usage, listing) for usage, listing in zip(usages, found, strict=True)]


def _usage(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}


def _machine_code(usage: dict[str, int], listing: _Listing) -> MachineCode:
    spilled = usage["STACK"] + usage["LOCAL"]
    return MachineCode(usage["REG"], spilled, usage["SHARED"], listing.counts(), listing.main_loop())


def _instructions(cubin: bytes) -> bytes:
    """The one section of an ELF file whose name begins with ``.text.``."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, number, names = struct.unpack_from("<HHH", cubin, 0x3A)
    # For each section: offset of its name, offset and size of its content.
    sections = [struct.unpack_from("<I20xQQ", cubin, table + size * place) for place in range(number)]
    (found,) = (
        cubin[offset : offset + length]
        for name, offset, length in sections
        if cubin.startswith(b".text.", sections[names][1] + name)
    )
    return found
