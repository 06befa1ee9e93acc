"""Definition of the memory update in plain eager PyTorch (paper, Eq. 4)."""

import torch
from torch import Tensor

from rbm_kernels.checks import accumulation_dtype
from rbm_kernels.ops.cosine_topk.reference import unit


def memory_statistics(
    h: Tensor, gates: Tensor, experts: Tensor, num_experts: int, normalize: bool = True
) -> tuple[Tensor, Tensor]:
    """Numerator ``[E, D]`` and denominator ``[E]`` of the batch softmax, over the rows of ``h [B, D]``."""
    dtype = accumulation_dtype(h)
    h = h.to(dtype)
    # A single bad row must not corrupt the memory, so it is excluded from both sums.
    usable = h.square().sum(-1).isfinite() & gates.isfinite().all(-1)
    rows = torch.where(usable[:, None], unit(h) if normalize else h, 0.0)
    weights = torch.where(usable[:, None], gates.to(dtype).exp(), 0.0)

    # weight_of[b, i] is exp(gate) if row b uses expert i, else 0. Both results are then plain sums over the rows.
    chosen = experts[:, :, None] == torch.arange(num_experts, device=h.device)
    weight_of = (weights[:, :, None] * chosen).sum(1)
    return weight_of.T @ rows, weight_of.sum(0)


def memory_update_(memory: Tensor, weighted_sum: Tensor, total: Tensor, decay: float, normalize: bool = True) -> None:
    """``Q_i <- decay n(Q_i) + (1 - decay) weighted_sum_i / total_i``, in place, for experts that were chosen."""
    chosen = (total.isfinite() & (total > 0))[:, None]
    old = unit(memory) if normalize else memory
    moved = decay * old + (1 - decay) * weighted_sum / total[:, None]
    memory.copy_(torch.where(chosen, moved, memory))
