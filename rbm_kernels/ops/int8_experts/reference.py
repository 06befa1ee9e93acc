"""Definition of the quantised layer in plain eager PyTorch, and the format of its experts, the same on every device."""

import torch
from torch import Tensor
from torch.nn import functional as F

from rbm_kernels.ops.cosine_topk import reference as routing
from rbm_kernels.ops.expert_matmul.reference import dense_gates

MOST = 127  # largest quantised number; -128 is not used
LEAST_OF_ROW = 1e-30  # a row with no number as large as this counts as zeros: 127 / number must be finite
COLUMNS, GROUP = 16, 4  # columns of a panel, and features whose weights are adjacent
HEAD = 3  # lines of a panel before its weights: scales, biases, -128 times the sums of its weights
LINE = COLUMNS * GROUP


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Integers from -127 to 127 as float32 ``[..., D]``, and their scales ``[..., 1]``.

    ``round(row * (127 / max|row|))``, to the nearest, ties to even. A row with a non-finite number becomes zeros with
    scale NaN.
    """
    largest = rows.abs().amax(-1, keepdim=True) if rows.shape[-1] else rows.new_zeros(*rows.shape[:-1], 1)
    is_finite, is_zero = largest.isfinite(), largest < LEAST_OF_ROW
    factor = torch.where(is_finite & ~is_zero, MOST / largest, 0.0)
    numbers = torch.round(torch.where(is_finite, rows, 0.0) * factor)
    return numbers, torch.where(is_finite, torch.where(is_zero, 0.0, largest / MOST), torch.nan)


def pack(weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Int8 ``[E, P, 3 + G, 64]`` of ``weight`` int8 ``[E, N, D]`` and float32 ``scale`` and ``bias [E, N]``.

    There are ``P = ceil(N / 16)`` panels and ``G = ceil(D / 4)`` lines of weights. Columns past ``N`` and features past
    ``D`` are zero.
    """
    num_experts, outputs, features = weight.shape
    panels, groups = -(-outputs // COLUMNS), -(-features // GROUP)
    wider = panels * COLUMNS - outputs
    padded = F.pad(weight, (0, groups * GROUP - features, 0, wider))
    lines = padded.view(num_experts, panels, COLUMNS, groups, GROUP).transpose(2, 3)
    sums = -128 * padded.sum(-1, dtype=torch.int32)
    bias = torch.zeros_like(scale) if bias is None else bias
    head = [F.pad(scale, (0, wider)), F.pad(bias, (0, wider)), sums]
    head = [part.contiguous().view(torch.int8).view(num_experts, panels, 1, LINE) for part in head]
    return torch.cat([*head, lines.reshape(num_experts, panels, groups, LINE)], dim=2)


def unpack(experts: Tensor, out_features: int, in_features: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse of :func:`pack`: ``weight`` int8 ``[E, N, D]``, ``scale`` and ``bias`` float32 ``[E, N]``."""
    num_experts, panels, lines, _ = experts.shape
    weight = experts[:, :, HEAD:].reshape(num_experts, panels, lines - HEAD, COLUMNS, GROUP).transpose(2, 3)
    weight = weight.reshape(num_experts, panels * COLUMNS, (lines - HEAD) * GROUP)[:, :out_features, :in_features]
    head = experts[:, :, : HEAD - 1].contiguous().view(torch.float32)
    scale, bias = (head[:, :, i].reshape(num_experts, -1)[:, :out_features] for i in range(HEAD - 1))
    return weight, scale, bias


def routed_matmul_int8(
    x: Tensor, memory: Tensor | None, experts: Tensor, out_features: int, k: int, temperature: float = 1.0
) -> Tensor:
    """``y [B, N]``: the rows of ``x [B, D]`` through the ``k`` experts chosen by ``memory [E, D]``."""
    weight, scale, bias = unpack(experts, out_features, x.shape[1])
    if memory is None:
        gate = x.new_ones(x.shape[0], 1)
    else:
        gates, chosen, _ = routing.cosine_topk(x, memory, k, temperature)
        gate = dense_gates(gates, chosen, memory.shape[0])
    numbers, row_scale = quantize(x)
    # Sums of integers in float64 are exact, and few devices support integer matrix products.
    numbers = numbers.double()
    y = x.new_zeros(x.shape[0], out_features)
    for e in range(experts.shape[0]):
        sums = (numbers @ weight[e].double().T).float()
        y = torch.addcmul(y, gate[:, e, None], sums * (row_scale * scale[e]) + bias[e])
    return y
