"""Definition of the grouped matmul in plain eager PyTorch: every expert sees every row, with gate zero if unused.

This takes ``E / k`` times the necessary work, but nothing of size ``B * k * N``, no host synchronisation, and the order
of summation is the same in every run.
"""

import torch
from torch import Tensor

from rbm_kernels.checks import accumulation_dtype


def dense_gates(gates: Tensor, experts: Tensor, num_experts: int) -> Tensor:
    """Gates as ``[B, E]``, zero where a row does not use an expert."""
    return gates.new_zeros(gates.shape[0], num_experts).scatter_add(1, experts.long(), gates)


def expert_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, gates: Tensor, experts: Tensor) -> Tensor:
    """``y_b = sum_j gates[b, j] (weight[experts[b, j]] x_b + bias[experts[b, j]])``: ``[B, N]``, dtype of ``x``.

    Nothing is written in place: ``torch.func.vmap`` may have batched any of the arguments.
    """
    num_experts, out_features, _ = weight.shape
    dtype = accumulation_dtype(x)
    gate = dense_gates(gates.to(dtype), experts, num_experts)
    rows = x.to(dtype)
    y = rows.new_zeros(rows.shape[0], out_features)
    for e in range(num_experts):
        y = torch.addcmul(y, gate[:, e, None], rows @ weight[e].to(dtype).T)
    if bias is not None:
        y = torch.addmm(y, gate, bias.to(dtype))
    return y.to(x.dtype)


def backward_input(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, gates: Tensor, experts: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients with respect to ``x`` and ``gates``: both need ``grad_b weight[e]``, which is formed once."""
    dtype = accumulation_dtype(x)
    gate = dense_gates(gates.to(dtype), experts, weight.shape[0])
    rows, grad = x.to(dtype), grad.to(dtype)
    grad_x, grad_gate = rows.new_zeros(rows.shape), torch.zeros_like(gate)  # contiguous, unlike zeros_like(rows)
    for e in range(weight.shape[0]):
        through_expert = grad @ weight[e].to(dtype)
        grad_x.addcmul_(gate[:, e, None], through_expert)
        grad_gate[:, e] = (through_expert * rows).sum(-1)
    if bias is not None:
        grad_gate.addmm_(grad, bias.to(dtype).T)
    return grad_x.to(x.dtype), grad_gate.gather(1, experts.long()).to(gates.dtype)


def backward_weight(grad: Tensor, x: Tensor, gates: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Gradients with respect to ``weight`` and ``bias``, in the dtype of ``x``."""
    dtype = accumulation_dtype(x)
    gate = dense_gates(gates.to(dtype), experts, num_experts)
    rows, grad = x.to(dtype), grad.to(dtype)
    grad_weight = torch.stack([(gate[:, e, None] * grad).T @ rows for e in range(num_experts)])
    return grad_weight.to(x.dtype), (gate.T @ grad).to(x.dtype)
