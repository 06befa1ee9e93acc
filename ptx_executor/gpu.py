"""A substitute for a GPU: Triton compiles for it, and its launches are executed on the CPU.

Triton's own launch path is used, starting at ``kernel[grid](...)``; its driver is replaced for the whole process.
Kernels that were imported under ``TRITON_INTERPRET`` are not compiled at all. So use this in a separate process.
"""

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import ClassVar
from unittest import mock

import torch
from torch import Tensor

from ptx_executor.parse import parse
from ptx_executor.program import Program, Result, packed
from ptx_executor.watched_memory import WatchedMemory, extent
from rbm_kernels import _launching
from rbm_kernels._ahead_of_time import AbsentGpu
from rbm_kernels._launching import Machine

_FORMATS = {
    "i1": "?", "u1": "?", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
_MULTIPROCESSORS = {80: 108, 90: 132, 120: 188}
# Maximum shared memory per block, in bytes.
_MOST_SHARED = {80: 163 * 1024, 90: 227 * 1024, 120: 99 * 1024}


@dataclass(frozen=True)
class Launch:
    """An executed launch: the kernel's name, grid and warps, and its result."""

    kernel: str
    grid: tuple[int, int, int]
    num_warps: int
    result: Result


class Gpu:
    """``with Gpu(90) as gpu: launch(...)``: launches on CPU tensors run their compiled code.

    Args:
        architecture: 80, 90 or 120.
        seeds: seeds for the order of blocks and warps. Each launch runs once per seed, and must give the same bits.
        blocks: function of a kernel's name and grid that returns the blocks to run; None: all. For counting at large
            shapes; results are then incomplete.
        edit: function of a kernel's name and PTX that returns the PTX to run instead. For planting faults.

    Attributes:
        launches: the launches that ran, in order.
    """

    active: ClassVar["Gpu | None"] = None

    def __init__(
        self,
        architecture: int,
        seeds: Sequence[int] = (0, 1),
        *,
        blocks: Callable[[str, tuple[int, int, int]], list[int] | None] | None = None,
        edit: Callable[[str, str], str] | None = None,
    ):
        if architecture not in _MOST_SHARED:
            raise ValueError(
                f"architecture is {architecture}, expected one of {sorted(_MOST_SHARED)}: of others the instructions"
                " are not known"
            )
        self.architecture, self.seeds, self._blocks, self._edit = architecture, tuple(seeds), blocks, edit
        self._programs: dict[int, Program] = {}
        self.launches: list[Launch] = []
        self._watched: WatchedMemory | None = None
        self._active = ExitStack()

    def __enter__(self) -> "Gpu":
        import triton
        from triton.backends.nvidia.compiler import CUDABackend

        compile_or_launch = triton.runtime.JITFunction.run

        def run(function, *values, grid, warmup, **options):
            kernel = compile_or_launch(function, *values, grid=grid, warmup=True, **options)
            if not warmup:
                given = {**dict(zip(function.arg_names, values, strict=False)), **options}
                self._run(kernel, function.arg_names, given, grid)
            return kernel

        triton.runtime.driver.set_active(AbsentGpu(self.architecture))
        _forget()
        self._active.callback(_forget)
        machine = Machine(self.architecture, _MULTIPROCESSORS[self.architecture])
        for patch in (
            # Machine code is not needed, and ptxas takes a sixth of compilation. Such kernels have their own cache.
            mock.patch.object(CUDABackend, "make_cubin", return_value=b""),
            mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": _own_cache(triton.knobs.cache.dir)}),
            mock.patch.object(triton.runtime.JITFunction, "run", run),
            mock.patch.object(torch.cuda, "get_device_capability", return_value=divmod(self.architecture, 10)),
            mock.patch.object(Gpu, "active", self),
            mock.patch.object(_launching, "CPU_STANDS_FOR", machine),
        ):
            self._active.enter_context(patch)
        return self

    def __exit__(self, *raised) -> None:
        self._active.close()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around related launches: check that results of ``torch.empty`` are written before they are read."""
        before, self._watched = self._watched, WatchedMemory()
        try:
            with self._watched:
                yield
        finally:
            self._watched = before

    def _run(self, kernel, names: Sequence[str], given: dict, grid: tuple[int, ...]) -> None:
        program, metadata = self._program(kernel), kernel.metadata
        if metadata.shared > _MOST_SHARED[self.architecture]:
            raise ValueError(
                f"{metadata.name} wants {metadata.shared} bytes of shared memory, and sm_{self.architecture} has"
                f" {_MOST_SHARED[self.architecture]}"
            )
        arguments, tensors = [], {}
        for name in names:
            kind, value = kernel.src.signature[name], given.get(name)
            if kind == "constexpr":
                continue
            if not kind.startswith("*"):
                arguments.append((_FORMATS[kind], value))
                continue
            arguments.append(("Q", value.data_ptr()))
            tensors[name] = value
        sizes = (*grid, 1, 1)[:3]
        watched = self._watched or WatchedMemory()

        def once(seed: int) -> Result:
            watched.pass_to_kernel(tensors)
            return program.launch(
                packed(program.kernel, arguments),
                sizes,
                (32 * metadata.num_warps, 1, 1),
                watched.memory,
                dynamic_shared=metadata.shared,
                blocks=None if self._blocks is None else self._blocks(metadata.name, sizes),
                seed=seed,
                strict_wgmma=_is_strict(),
            )

        several = len(self.seeds) > 1
        before = _contents(tensors) if several else {}
        result = once(self.seeds[0])
        after = _contents(tensors) if several else {}
        for seed in self.seeds[1:]:
            _restore(tensors, before)
            once(seed)
            for name, bits in _contents(tensors).items():
                if bits != after[name]:
                    raise AssertionError(
                        f"{metadata.name} leaves other bits in {name} with seed {seed} than with {self.seeds[0]}:"
                        " the order of blocks and warps shows"
                    )
        self.launches.append(Launch(metadata.name, sizes, metadata.num_warps, result))

    def _program(self, kernel) -> Program:
        if id(kernel) not in self._programs:
            text = kernel.asm["ptx"]
            if self._edit is not None:
                text = self._edit(kernel.metadata.name, text)
            self._programs[id(kernel)] = Program(parse(text)[kernel.metadata.name])
        return self._programs[id(kernel)]


def _contents(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: ctypes.string_at(begin, end - begin) for name, (begin, end) in _extents(tensors)}


def _restore(tensors: dict[str, Tensor], contents: dict[str, bytes]) -> None:
    for name, (begin, end) in _extents(tensors):
        ctypes.memmove(begin, contents[name], end - begin)


def _extents(tensors: dict[str, Tensor]) -> Iterator[tuple[str, tuple[int, int]]]:
    return ((name, extent(tensor)) for name, tensor in tensors.items())


def _is_strict() -> bool:
    """Whether this Triton follows all rules of the PTX ISA for wgmma.

    Triton before 3.9 (tested: 3.6.0 and 3.7.1) does not. It does not fence writes of ``cp.async``, which Hopper keeps
    in order. It also loads the operands of the next wgmma into registers of a wgmma that is still pending; ptxas
    detects this and inserts a wait.
    """
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 9)


def _own_cache(folder: str) -> str:
    """Cache folder for kernels without machine code; the same for nested GPUs."""
    return folder if os.path.basename(folder) == "ptx_executor" else os.path.join(folder, "ptx_executor")


def _forget() -> None:
    """Clear the caches of launches that were prepared for another machine."""
    _launching.forget_prepared()
    _launching.machine_of.cache_clear()
