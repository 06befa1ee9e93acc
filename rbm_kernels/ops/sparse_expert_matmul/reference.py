"""Definition of the grouped matmul over CSR rows, using PyTorch's sparse matmul.

As in :mod:`rbm_kernels.ops.expert_matmul.reference`, every expert sees every row, with gate zero if unused. This takes
``E / k`` times the necessary work, but nothing dense of the rows' width and no host synchronisation, and the order of
summation is fixed.
"""

import warnings

import torch
from torch import Tensor

from rbm_kernels.ops.expert_matmul import reference as matmul
from rbm_kernels.ops.expert_matmul.reference import dense_gates


def csr(crow: Tensor, col: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """A CSR tensor from these parts, without checks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (CSR|invariant)")  # PyTorch's notices that CSR is in beta
        return torch.sparse_csr_tensor(crow, col, values, shape, device=values.device, check_invariants=False)


def transposed(crow: Tensor, col: Tensor, features: int) -> tuple[Tensor, Tensor, Tensor]:
    """CSR structure of the transpose, and for each of its entries the index of that entry among the rows' entries."""
    sorted_col, place = torch.sort(col, stable=True)
    row = torch.repeat_interleave(
        torch.arange(crow.shape[0] - 1, dtype=crow.dtype, device=crow.device), crow.diff(), output_size=col.shape[0]
    )
    starts = torch.searchsorted(sorted_col, torch.arange(features + 1, dtype=col.dtype, device=col.device))
    return starts.to(crow.dtype), row[place], place


def dense_rows(crow: Tensor, col: Tensor, values: Tensor, features: int) -> Tensor:
    """The rows as a dense tensor ``[B, D]``."""
    counts = crow.diff()
    row = torch.repeat_interleave(
        torch.arange(counts.shape[0], device=crow.device), counts, output_size=values.shape[0]
    )
    rows = values.new_zeros(counts.shape[0], features)
    return rows.index_put((row, col.long()), values, accumulate=True)


def by_dense_rows(
    crow: Tensor,
    col: Tensor,
    values: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    gates: Tensor,
    experts: Tensor,
) -> Tensor:
    """:func:`sparse_expert_matmul` over dense rows, because PyTorch's sparse matmul only has first derivatives."""
    rows = dense_rows(crow, col, values.detach(), weight.shape[2])
    return matmul.expert_matmul(rows, weight if scale is None else weight * scale[:, None, :], bias, gates, experts)


def _times_expert(
    crow: Tensor, col: Tensor, values: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, expert: int
) -> Tensor:
    """``weight[expert] (scale[expert] * x_b) + bias[expert]`` for every row, ``[B, N]``."""
    scaled = values if scale is None else values * scale[expert][col]
    product = csr(crow, col, scaled, (crow.shape[0] - 1, weight.shape[2])) @ weight[expert].T
    return product if bias is None else product + bias[expert]


def sparse_expert_matmul(
    crow: Tensor,
    col: Tensor,
    values: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    gates: Tensor,
    experts: Tensor,
) -> Tensor:
    """``y_b = sum_j gates[b, j] (weight[e] (scale[e] * x_b) + bias[e])`` with ``e = experts[b, j]``: ``[B, N]``."""
    gate = dense_gates(gates, experts, weight.shape[0])
    y = values.new_zeros(gates.shape[0], weight.shape[1])
    for e in range(weight.shape[0]):
        y.addcmul_(gate[:, e, None], _times_expert(crow, col, values, weight, bias, scale, e))
    return y


def backward_gates(
    grad: Tensor,
    crow: Tensor,
    col: Tensor,
    values: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    gates: Tensor,
    experts: Tensor,
) -> Tensor:
    """Gradient with respect to ``gates``."""
    grad_gate = gates.new_empty(gates.shape[0], weight.shape[0])
    for e in range(weight.shape[0]):
        grad_gate[:, e] = (_times_expert(crow, col, values, weight, bias, scale, e) * grad).sum(-1)
    return grad_gate.gather(1, experts.long())


def backward_weight(
    grad: Tensor,
    crow: Tensor,
    col: Tensor,
    values: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    gates: Tensor,
    experts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients with respect to ``weight`` and ``scale``; the second is empty without a scale."""
    num_experts, _, features = weight.shape
    gate = dense_gates(gates, experts, num_experts)
    crow_t, row_t, place = transposed(crow, col, features)
    shape = (features, gates.shape[0])
    # One expert after the other, starting with the gradient of weight * scale: [D, N] each.
    grad_scaled = torch.stack(
        [(csr(crow_t, row_t, values[place] * gate[:, e][row_t], shape) @ grad).T for e in range(num_experts)]
    )
    if scale is None:
        return grad_scaled, values.new_empty(0, features)
    return grad_scaled * scale[:, None, :], (grad_scaled * weight).sum(1)
