"""Routing in plain PyTorch, as in the released code."""

from torch import Tensor
from torch.nn.functional import normalize


def by_topk(h: Tensor, memory: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gates, experts and cosines, each ``[B, k]``; ties may go to any expert.

    Peers route by this. The operator's reference takes several times as long: it sorts, computes the cosines twice,
    and guards against overflow.
    """
    cosines, experts = nearest(h, normalize(memory, dim=-1), k)
    return cosines.softmax(-1), experts.int(), cosines


def nearest(h: Tensor, unit_memory: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The largest cosines with memories of length one, and their experts (int64), each ``[B, k]``."""
    return (normalize(h.to(unit_memory.dtype), dim=-1) @ unit_memory.T).topk(k)
