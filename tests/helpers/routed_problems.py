"""Problems for the operators that route rows and multiply them in one call: two test files share them."""

from collections.abc import Iterator

import torch
from torch import Tensor

# Each shape exists for a reason: (B, D, N, E, k)
SHAPES = {
    "a last layer": (90, 12, 10, 8, 3),
    "one output": (25, 7, 1, 4, 2),
    "one row": (1, 50, 70, 8, 3),
    "more rows than are routed at once": (900, 6, 5, 2, 2),
    "one expert": (13, 4, 3, 1, 1),
    "no rows": (0, 5, 4, 3, 2),
    "no features": (5, 0, 4, 3, 2),
    "no outputs": (5, 4, 0, 3, 2),
}


def problem(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """x, memory, weight, bias, k."""
    b, d, n, e, k = shape
    memory = torch.randn(e, d, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    weight = torch.randn(e, n, d, dtype=torch.float64) / max(1, d) ** 0.5
    return torch.randn(b, d).to(dtype), memory, weight.to(dtype), torch.randn(e, n).to(dtype), k


def of_other_strides(x: Tensor) -> Iterator[Tensor]:
    """The rows ``x [B, D]`` with a longer stride of rows, with one of features too, and with columns first."""
    rows, features = x.shape
    wide = x.new_empty(2 * rows, 2 * features)
    for view in (wide[::2, :features], wide[::2, ::2], wide.T[:features, :rows].T):
        yield view.copy_(x)
