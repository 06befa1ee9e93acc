"""Launches of Triton kernels: machines, launches prepared once per shape, options shared by all kernels.

Everything that depends only on shapes (grid, tiles, constants) is computed on the first call with these shapes and
cached: a training step launches the same dozen kernels again and again, and the host must stay ahead of the GPU.
"""

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Prepare = TypeVar("Prepare", bound=Callable)

# Options of every kernel. Fused multiply-add is Triton's default; set here so that no environment variable changes it.
OPTIONS = {"enable_fp_fusion": True}
# Shapes that a function caches: enough for the batch sizes of a server and a few layers.
_REMEMBERED = 1024
# Registers of a multiprocessor (sm_80 to sm_120) and the maximum per thread; they are allocated in units of eight.
_REGISTERS, _MOST = 65_536, 255
_prepared: list[Callable] = []


class Machine(NamedTuple):
    """Architecture (such as 90) and number of multiprocessors."""

    architecture: int
    multiprocessors: int


# The machine assumed for CPU tensors: an H200 in Triton's interpreter. ptx_executor sets the GPU whose code it runs.
CPU_STANDS_FOR = Machine(90, 132)


@cache
def machine_of(device: torch.device) -> Machine:
    """Architecture and size of ``device``. The CPU counts as ``CPU_STANDS_FOR``; other devices get an H200's size."""
    if device.type == "cpu":
        return CPU_STANDS_FOR
    major, minor = torch.cuda.get_device_capability(device)
    known = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    return Machine(10 * major + minor, known)


def prepared(function: Prepare) -> Prepare:
    """Cache the results of ``function``, whose arguments are numbers and dtypes only."""
    remembering = lru_cache(maxsize=_REMEMBERED)(function)
    _prepared.append(remembering)
    return remembering


def forget_prepared() -> None:
    """Clear all caches, after a change of a configuration (used by the tuner and the tests)."""
    for remembering in _prepared:
        remembering.cache_clear()


def next_power_of_2(size: int) -> int:
    """The next power of two; 1 for size 0. Triton has the same function, but not every module may import Triton."""
    return 1 << (max(1, size) - 1).bit_length()


def addressable(x: Tensor) -> Tensor:
    """``x [B, D]`` itself if features are adjacent and the rows of a tile span less than 2^31 elements; else a copy.

    A tile has at most 64 rows of a batch, or all memory vectors: at most 128.
    """
    return x if x.stride(1) == 1 and x.stride(0) < 2**31 // 128 else x.contiguous()


def launcher(kernel, grid: tuple[int, ...], *, programs: int | None = None, **constants) -> Callable[..., None]:
    """Bind ``kernel`` to its grid, constants, warps and stages; all kernels are launched through this function.

    ``programs`` is the number of programs that share a multiprocessor and its registers. It is given where ptxas by
    default would fit one more program by spilling (up to 24 bytes with Triton 3.6 and 3.9). Triton has no such option
    for AMD GPUs.

    Returns:
        A function of the remaining arguments (tensors and numbers), in their order.
    """
    if programs is not None and torch.version.hip is None:
        constants["maxnreg"] = min(_MOST, _REGISTERS // (32 * constants["num_warps"] * programs) // 8 * 8)
    return partial(kernel[grid], **constants, **OPTIONS)
