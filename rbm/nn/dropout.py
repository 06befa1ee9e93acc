"""Fast dropout on a CPU, where PyTorch takes as long to draw a mask as for a matrix product."""

import math
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rbm.utils.arguments import check_probability
from rbm.utils.transforms import is_eager_on_cpu

_LEVELS = 1 << 16
_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def dropout(x: Tensor, p: float, training: bool = True, *, rows: Tensor | None = None, count: int = 0) -> Tensor:
    """Like :func:`torch.nn.functional.dropout`; on a CPU, each entry uses 16 random bits, so that one draw serves four.

    Args:
        x: floating-point tensor of any shape.
        p: probability in [0, 1). On a CPU it is rounded to a multiple of 2^-16, and the scale uses the rounded value,
            so that the expectation stays ``x``.
        training: if False, ``x`` is returned.
        rows: on a CPU, int64 ``[B]``: ``x [B, H]`` are these rows out of ``count`` rows, and get the mask that they
            would have among all of them.
        count: see ``rows``.

    Returns:
        ``x / (1 - p)`` for entries that are kept, and 0 for the others.

    Raises:
        TypeError, ValueError: ``p`` is no probability in [0, 1).
    """
    if not training or p == 0:
        return x
    # Compiled code draws masks of its own. Under vmap only PyTorch's dropout can draw one mask per slice.
    if not is_eager_on_cpu(x):
        return F.dropout(x, p)
    p = check_probability("dropout", p)  # of a layer, whose attribute may have been set since it was made
    dropped = min(round(p * _LEVELS), _LEVELS - 1)
    shape = x.shape if rows is None else (count, x.shape[1])
    words = torch.empty((math.prod(shape) + 3) // 4, dtype=torch.int64, device="cpu").random_(-(1 << 63), None)
    bits = words.view(torch.int16)[: math.prod(shape)].view(shape)
    if rows is not None:
        bits = bits.index_select(0, rows)  # several times as fast as bits[rows]
    kept = bits >= dropped - _LEVELS // 2
    # One factor per entry: the backward is one product and does not need x.
    return x * _factors(kept, _LEVELS / (_LEVELS - dropped), x.dtype)


def _factors(kept: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """``scale`` in ``dtype`` where ``kept`` is true, and 0 elsewhere."""
    if dtype not in _INTEGERS:
        return kept.to(dtype).mul_(scale)
    # One or zero times the bits of the scale: PyTorch converts truth values to floating-point numbers far more slowly.
    return kept.to(_INTEGERS[dtype]).mul_(_bits(scale, dtype)).view(dtype)


@lru_cache
def _bits(scale: float, dtype: torch.dtype) -> int:
    return torch.tensor(scale, dtype=dtype, device="cpu").view(_INTEGERS[dtype]).item()


class Dropout(nn.Dropout):
    """:func:`dropout` as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.training)
