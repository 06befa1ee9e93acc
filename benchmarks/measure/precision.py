"""The precisions that are measured: a dtype each, and how PyTorch multiplies float32."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

DTYPES = {
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
