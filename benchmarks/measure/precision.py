"""The precisions that are measured, PyTorch's switch for float32 products, and what a processor has in hardware."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

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
    """Set PyTorch's own switch of TensorFloat-32, and set it back.

    By the older of its two switches, which moves the newer one with it: the compiler of PyTorch 2.11 still reads the
    older one, and refuses where only the newer was set.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# A processor that multiplies a precision in hardware takes at most so many times as long as in float32. Converting to
# float32 and back costs less than that; PyTorch's loops for processors that know nothing of it take over 100 times.
IN_HARDWARE = 5.0


@cache
def slowness(precision: str) -> float:
    """How many times as long a square product takes on this CPU as in float32: measured once, in some 0.2 s.

    Not read from the processor's flags: libraries decide what they make of them.
    """
    return _product_seconds(DTYPES[precision]) / _product_seconds(torch.float32)


def in_hardware(precision: str) -> bool:
    """Whether the CPU multiplies a precision about as fast as float32."""
    return DTYPES[precision] == torch.float32 or slowness(precision) <= IN_HARDWARE


def _product_seconds(dtype: torch.dtype, size: int = 256) -> float:
    """By the processor's time of one thread, which other programs hardly change; the fastest of five."""
    a, b = (torch.ones(size, size, dtype=dtype) for _ in range(2))
    threads, seconds = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for _ in range(5):  # the first finds kernels unloaded
            start = time.thread_time()
            torch.mm(a, b)
            seconds.append(time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
    return max(min(seconds), 1e-9)
