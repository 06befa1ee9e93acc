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
    """Set PyTorch's own switch of TensorFloat-32, and set it back."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
