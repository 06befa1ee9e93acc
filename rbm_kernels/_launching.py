"""What launches of Triton kernels share: machines, launches prepared once for each shape, the options of all kernels.

What depends on shapes alone (grid, tiles, constants) is computed at the first call with these shapes and kept: a
training step launches the same dozen kernels again and again, and the host must stay ahead of the GPU.
"""

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import NamedTuple, TypeVar

import torch

Prepare = TypeVar("Prepare", bound=Callable)

# Of every kernel. Fused multiply-add is on: Triton's default, set here so that no environment variable changes it.
OPTIONS = {"enable_fp_fusion": True}
# Shapes that a function remembers: a server's batch sizes, a few layers.
_REMEMBERED = 1024
# Registers of a multiprocessor, of sm_80 to sm_120, and the most that a thread can have; they are dealt out in eights.
_REGISTERS, _MOST = 65_536, 255
_prepared: list[Callable] = []


class Machine(NamedTuple):
    """Architecture, such as 90, and number of multiprocessors."""

    architecture: int
    multiprocessors: int


# What CPU tensors are launched for: Triton's interpreter takes an H200; ptx_executor sets the GPU whose code it runs.
CPU_STANDS_FOR = Machine(90, 132)


@cache
def machine_of(device: torch.device) -> Machine:
    """The machine that ``device`` is, for the CPU the one that it stands for; what has no size is an H200's."""
    if device.type == "cpu":
        return CPU_STANDS_FOR
    major, minor = torch.cuda.get_device_capability(device)
    known = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    return Machine(10 * major + minor, known)


def prepared(function: Prepare) -> Prepare:
    """Keep what ``function``, of numbers and dtypes alone, returned for its latest arguments."""
    remembering = lru_cache(maxsize=_REMEMBERED)(function)
    _prepared.append(remembering)
    return remembering


def forget_prepared() -> None:
    """Prepare everything anew: for those who change a configuration, as the tuner and the tests do."""
    for remembering in _prepared:
        remembering.cache_clear()


def launcher(kernel, grid: tuple[int, ...], *, programs: int | None = None, **constants) -> Callable[..., None]:
    """The one way in which kernels are launched: ``kernel`` at ``grid`` with its constants, warps and stages.

    Where ptxas by itself fits one program more into a multiprocessor by spilling (up to 24 bytes with Triton 3.6 and
    3.9), ``programs`` says how many share it, and each may have its share of the registers. Not on AMD's GPUs, where
    Triton has no such option.

    What is returned takes the remaining arguments, tensors and numbers, in their order.
    """
    if programs is not None and torch.version.hip is None:
        constants["maxnreg"] = min(_MOST, _REGISTERS // (32 * constants["num_warps"] * programs) // 8 * 8)
    return partial(kernel[grid], **constants, **OPTIONS)
