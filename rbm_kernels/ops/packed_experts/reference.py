"""Definition of both operators in plain eager PyTorch. Its packed format differs from that of ``librbm_cpu``."""

import torch
from torch import Tensor

from rbm_kernels.ops.routed_matmul import reference


def pack_experts(weight: Tensor, bias: Tensor | None) -> Tensor:
    """``[E, D + 1, N]`` from ``weight [E, N, D]`` and ``bias [E, N]`` or None: biases, then one row per feature."""
    first = weight.new_zeros(weight.shape[:2]) if bias is None else bias
    return torch.cat([first[:, None, :], weight.transpose(1, 2)], dim=1)


def routed_matmul_packed(
    x: Tensor, memory: Tensor, packed: Tensor, out_features: int, k: int, temperature: float = 1.0
) -> Tensor:
    """``y [B, N]``: the rows of ``x [B, D]`` through the ``k`` experts chosen by ``memory [E, D]``."""
    weight, bias = packed[:, 1:, :out_features].transpose(1, 2), packed[:, 0, :out_features]
    return reference.routed_matmul(x, memory, weight, bias, k, temperature)
