"""The precisions to measure, PyTorch's switch for float32 products, and which precisions a CPU supports in hardware."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from benchmarks.measure.device import threads

DTYPES = {
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "tf32": torch.float32,
    "float32": torch.float32,
    "int32": torch.int32,
}


@contextmanager
def multiplying_as(precision: str) -> Iterator[None]:
    """Set PyTorch's switch for TensorFloat-32, and restore it afterwards.

    Uses the older of its two switches, which also sets the newer one: the compiler of PyTorch 2.11 still reads the
    older one, and raises if only the newer one was set.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# A processor with hardware support is at most this many times slower than in float32. Converting to float32 and back
# costs less than that; PyTorch's loops for processors without support cost far more.
IN_HARDWARE = 5.0


@cache
def slowness(precision: str) -> float:
    """How many times slower than float32 a square product is on this CPU. Measured once.

    The processor's flags are not enough, because libraries decide how to use them.
    """
    return _product_seconds(DTYPES[precision]) / _product_seconds(torch.float32)


def in_hardware(precision: str) -> bool:
    """Whether the CPU multiplies a precision about as fast as float32."""
    return DTYPES[precision] == torch.float32 or slowness(precision) <= IN_HARDWARE


def _product_seconds(dtype: torch.dtype, size: int = 256) -> float:
    """Thread CPU time, on which other programs have little effect; the fastest of five."""
    a, b = (torch.ones(size, size, dtype=dtype) for _ in range(2))
    seconds = []
    with threads(1):
        for _ in range(5):  # the first call loads the kernels
            start = time.thread_time()
            torch.mm(a, b)
            seconds.append(time.thread_time() - start)
    return max(min(seconds), 1e-9)
