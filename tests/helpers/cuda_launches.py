"""The CUDA kernels of the memory update, launched on ptx_executor as ``csrc/cuda/memory_update.cu`` launches them.

The library holds PTX for its newest architecture: the kernels' source has no branch by architecture. What the host code
computes (blocks, rows of a block, the parameters' struct) is written again here, in the same order.
"""

import re
import struct
from functools import cache

import torch
from torch import Tensor

from ptx_executor.parse import parse
from ptx_executor.program import Program, packed
from ptx_executor.watched_memory import WatchedMemory
from rbm_kernels import _machine_code, _native

LIBRARY = _native.LIBRARY_DIR / "librbm_cuda.so"
_MANGLED = {torch.float64: "d", torch.float32: "f", torch.bfloat16: "13__nv_bfloat16", torch.float16: "6__half"}
_WARP, _MAX_THREADS, _EXPERTS, _REDUCE = 32, 256, 8, (32, 16)


@cache
def _kernels():
    return parse(_machine_code.cuobjdump("--dump-ptx", str(LIBRARY)))


@cache
def _program(pattern: str) -> Program:
    (name,) = [name for name in _kernels() if re.search(pattern, name)]
    return Program(_kernels()[name])


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


class CudaLaunches:
    """The launches of one call, on a machine of so many multiprocessors."""

    def __init__(self, multiprocessors: int = 4, seed: int = 0):
        self._multiprocessors, self._seed = multiprocessors, seed

    def memory_statistics(self, h: Tensor, gates: Tensor, experts: Tensor, num_experts: int, normalize: bool = True):
        """As ``sum_rows`` and ``launch_statistics`` do: ``weighted_sum [E, D]``, ``total [E]``."""
        rows, features = h.shape
        per_vector = 16 // h.element_size()
        vector = h.data_ptr() % 16 == 0 and h.stride(0) % per_vector == 0 and features % per_vector == 0
        columns = per_vector if vector or h.element_size() > 4 else 4
        held = 4 if columns == 8 else 8
        warps = min(max(_ceil(features, _WARP * columns), 1), _MAX_THREADS // _WARP)
        block = (warps * _WARP, _MAX_THREADS // _WARP // warps, 1)
        column_tiles = max(_ceil(features, block[0] * columns), 1)
        tiles = column_tiles * _ceil(num_experts, _EXPERTS)
        step = block[1] * held
        rows_per_block = _ceil(_ceil(rows, max(2 * self._multiprocessors // tiles, 1)), step) * step
        blocks = _ceil(rows, rows_per_block)
        form = f"{_MANGLED[h.dtype]}Lb{int(vector)}E"
        accumulator = _MANGLED[gates.dtype]
        sums = num_experts * features
        watched = WatchedMemory()
        with watched:
            weighted_sum, total = gates.new_empty(num_experts, features), gates.new_empty(num_experts)
            partials = gates.new_empty(blocks, sums + num_experts)
            norms = gates.new_empty(rows if column_tiles > 1 else 0)
        if column_tiles > 1:
            self._launch(
                watched, f"squared_norm_kernelI{form}", (_ceil(rows, 8), 1, 1), (_MAX_THREADS, 1, 1),
                [("Q", h), ("q", h.stride(0)), ("q", rows), ("q", features), ("Q", norms)],
            )  # fmt: skip
        pointers = [h.data_ptr(), h.stride(0), gates.data_ptr(), experts.data_ptr()]
        sizes = [rows, features, experts.shape[1], num_experts, normalize, column_tiles, rows_per_block]
        statistics = struct.pack(
            "<QqQQqqqq?3xiqQQ", *pointers, *sizes, norms.data_ptr() if column_tiles > 1 else 0, partials.data_ptr()
        )
        self._launch(
            watched, f"memory_statistics_kernelI{form}", (tiles, blocks, 1), block, statistics,
            {"h": h, "gates": gates, "experts": experts, "norms": norms, "partials": partials},
        )  # fmt: skip
        size = sums + num_experts
        self._launch(
            watched, f"add_partials_kernelI{accumulator}E", (_ceil(size, _REDUCE[0]), 1, 1), (*_REDUCE, 1),
            [("Q", partials), ("q", blocks), ("q", sums), ("q", size), ("Q", weighted_sum), ("Q", total)],
        )  # fmt: skip
        return weighted_sum, total

    def memory_update_(self, memory: Tensor, weighted_sum: Tensor, total: Tensor, decay: float, normalize: bool = True):
        """As ``move_memory`` does, in place."""
        arguments = [("Q", memory), ("q", memory.stride(0)), ("q", memory.stride(1)), ("Q", weighted_sum), ("Q", total)]
        arguments += [("q", memory.shape[1]), ("d", decay), ("?", normalize)]
        kernel = f"memory_update_kernelI{_MANGLED[memory.dtype]}E"
        self._launch(WatchedMemory(), kernel, (len(memory), 1, 1), (_MAX_THREADS, 1, 1), arguments)

    def _launch(self, watched, pattern, grid, block, arguments, tensors=None) -> None:
        program = _program(pattern)
        if tensors is None:
            tensors = {f"argument {i}": value for i, (_, value) in enumerate(arguments) if isinstance(value, Tensor)}
            arguments = packed(
                program.kernel,
                [(form, value.data_ptr() if isinstance(value, Tensor) else value) for form, value in arguments],
            )
        watched.pass_to_kernel(tensors)
        program.launch(arguments, grid, block, watched.memory, seed=self._seed)
