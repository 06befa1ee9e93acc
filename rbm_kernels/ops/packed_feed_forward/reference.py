"""Definition in plain eager PyTorch, for the packed form of ``packed_experts/reference.py``."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from rbm_kernels.checks import accumulation_dtype
from rbm_kernels.ops.cosine_topk import reference as routing
from rbm_kernels.ops.expert_matmul import reference as grouped


def swiglu(x: Tensor) -> Tensor:
    """SiLU of the first half times the second half: ``[..., 2 I]`` to ``[..., I]``."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


# By name: the function, and how many outputs of the first product make one hidden feature.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "relu": (F.relu, 1),
    "gelu": (F.gelu, 1),
    "silu": (F.silu, 1),
    "swiglu": (swiglu, 2),
}


def packed_feed_forward(
    x: Tensor,
    memory: Tensor,
    packed_in: Tensor,
    packed_out: Tensor,
    hidden_features: int,
    out_features: int,
    k: int,
    activation: str,
    temperature: float = 1.0,
) -> Tensor:
    """``y [B, N]``: the rows of ``x [B, D]`` through both layers of the ``k`` experts chosen by ``memory [E, D]``."""
    activate, numbers = ACTIVATIONS[activation]
    gates, experts, _ = routing.cosine_topk(x, memory, k, temperature)
    dtype, chosen = accumulation_dtype(x), experts.reshape(-1, 1)
    first, second = (
        (packed[:, 1:, :width].transpose(1, 2).to(dtype), packed[:, 0, :width].to(dtype))
        for packed, width in ((packed_in, numbers * hidden_features), (packed_out, out_features))
    )
    rows = x.to(dtype).repeat_interleave(k, 0)
    hidden = activate(grouped.expert_matmul(rows, *first, torch.ones_like(chosen, dtype=dtype), chosen))
    parts = grouped.expert_matmul(hidden, *second, gates.to(dtype).reshape(-1, 1), chosen)
    return parts.unflatten(0, experts.shape).sum(1).to(x.dtype)
