"""Dropout that costs little on a CPU, where drawing PyTorch's mask takes as long as a product of matrices."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_LEVELS = 1 << 16


def dropout(x: Tensor, p: float, training: bool = True, *, rows: Tensor | None = None, count: int = 0) -> Tensor:
    """As :func:`torch.nn.functional.dropout`; on a CPU an entry takes 16 random bits, four of them one draw.

    Args:
        x: floating, of any shape.
        p: probability in [0, 1); on a CPU its nearest multiple of 2^-16 is drawn, and the scale is that one's, so that
            the expectation stays ``x``.
        training: without it ``x`` comes back.
        rows: on a CPU, int64 ``[B]``: ``x [B, H]`` are these of ``count`` rows, and get the mask that they would have
            among all of them.
        count: see ``rows``.

    Returns:
        ``x`` over ``1 - p`` where it is kept, and 0 elsewhere.
    """
    if not training or p == 0:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():  # compiled code draws masks of its own
        return F.dropout(x, p)
    dropped = min(round(p * _LEVELS), _LEVELS - 1)
    shape = x.shape if rows is None else (count, x.shape[1])
    words = torch.empty((math.prod(shape) + 3) // 4, dtype=torch.int64).random_(-(1 << 63), None)
    bits = words.view(torch.int16)[: math.prod(shape)].view(shape)
    if rows is not None:
        bits = bits[rows]
    kept = bits >= dropped - _LEVELS // 2
    # One factor an entry: its backward is one product, and x is not kept for it.
    return x * kept.to(x.dtype).mul_(_LEVELS / (_LEVELS - dropped))


class Dropout(nn.Dropout):
    """:func:`dropout` as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.training)
