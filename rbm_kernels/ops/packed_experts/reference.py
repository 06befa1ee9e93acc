"""Definition of the operators in plain eager PyTorch. Its packed format differs from that of ``librbm_cpu``."""

import torch
from torch import Tensor

from rbm_kernels.checks import accumulation_dtype
from rbm_kernels.ops.expert_matmul import reference as grouped
from rbm_kernels.ops.routed_matmul import reference


def pack_experts(weight: Tensor, bias: Tensor | None) -> Tensor:
    """``[E, D + 1, N]`` from ``weight [E, N, D]`` and ``bias [E, N]`` or None: biases, then one row per feature."""
    first = weight.new_zeros(weight.shape[:2]) if bias is None else bias
    return torch.cat([first[:, None, :], weight.transpose(1, 2)], dim=1)


def routed_matmul_packed(
    x: Tensor, memory: Tensor, packed: Tensor, out_features: int, k: int, temperature: float = 1.0
) -> Tensor:
    """``y [B, N]``: the rows of ``x [B, D]`` through the ``k`` experts chosen by ``memory [E, D]``."""
    weight, bias = _unpacked(packed, out_features)
    return reference.routed_matmul(x, memory, weight, bias, k, temperature)


def expert_matmul_packed(x: Tensor, gates: Tensor | None, experts: Tensor, packed: Tensor, out_features: int) -> Tensor:
    """``y [B, N]``, the sum over a row's choices; without gates ``[B, k, N]``. ``x`` is ``[B, D]`` or ``[B, k, D]``."""
    weight, bias = _unpacked(packed.to(accumulation_dtype(x)), out_features)
    rows = (x if x.dim() == 3 else x[:, None].expand(*experts.shape, -1)).flatten(0, 1).to(weight.dtype)
    ones = rows.new_ones(len(rows), 1)
    parts = grouped.expert_matmul(rows, weight, bias, ones, experts.reshape(-1, 1))
    parts = parts.unflatten(0, experts.shape)
    return (parts if gates is None else (gates[..., None] * parts).sum(1)).to(x.dtype)


def _unpacked(packed: Tensor, out_features: int) -> tuple[Tensor, Tensor]:
    return packed[:, 1:, :out_features].transpose(1, 2), packed[:, 0, :out_features]
