"""Bytes and operations of :func:`rbm_kernels.expert_matmul` and its two backward operators.

``x [B, D]``, ``weight [E, N, D]``, k experts per row, ``s`` bytes per element, ``E' = min(E, B k)`` experts in use.
Only products with the weights are counted as operations: they run on matrix units, and gates and biases add less than
a fraction 2 / D or 2 / N.

``mean_experts`` is the number of experts that a row is multiplied with. Mathematically it is k. For kernels that work
on tiles it is the mean size of a tile's union (3.04 for k = 3, see README.md); the operations are then those that the
kernels perform.
"""

import torch

from rbm_kernels.cost import Cost


def forward(
    rows: int,
    in_features: int,
    out_features: int,
    num_experts: int,
    k: int,
    dtype: torch.dtype,
    *,
    mean_experts: float | None = None,
) -> Cost:
    """Bytes ``s (B D + B N + E' N (D + 1)) + 8 B k``; operations ``2 B k D N``.

    x, weight, bias, gates and experts are read, y is written.
    """
    used = min(num_experts, rows * k)
    moved = rows * (in_features + out_features) + used * out_features * (in_features + 1)
    return Cost(
        bytes=dtype.itemsize * moved + 8 * rows * k,
        flops=round(2 * rows * (mean_experts or k) * in_features * out_features),
    )


def backward_input(
    rows: int,
    in_features: int,
    out_features: int,
    num_experts: int,
    k: int,
    dtype: torch.dtype,
    *,
    with_gates: bool = True,
    mean_experts: float | None = None,
) -> Cost:
    """Bytes ``s (2 B D + B N + E' N (D + 1)) + 12 B k``; operations ``2 B k D N``.

    The gradient, x, weight, bias, gates and experts are read; ``grad_x`` and ``grad_gates`` are written. Without the
    gradient of the gates, x and the biases are not needed: ``s (B D + B N + E' N D) + 8 B k``.
    """
    cost = forward(rows, in_features, out_features, num_experts, k, dtype, mean_experts=mean_experts)
    if with_gates:
        return cost + Cost(bytes=dtype.itemsize * rows * in_features + 4 * rows * k, flops=0)
    return cost + Cost(bytes=-dtype.itemsize * min(num_experts, rows * k) * out_features, flops=0)


def backward_weight(
    rows: int, in_features: int, out_features: int, num_experts: int, k: int, dtype: torch.dtype
) -> Cost:
    """Bytes ``s (B D + B N + E N (D + 1)) + 8 B k``; operations ``2 B k D N``.

    The gradient, x, gates and experts are read; ``grad_weight`` and ``grad_bias`` are written, for all experts.
    """
    moved = rows * (in_features + out_features) + num_experts * out_features * (in_features + 1)
    return Cost(bytes=dtype.itemsize * moved + 8 * rows * k, flops=2 * rows * k * in_features * out_features)


def backward(rows: int, in_features: int, out_features: int, num_experts: int, k: int, dtype: torch.dtype) -> Cost:
    """Both backward operators, with the gradients of gates and biases."""
    shape = (rows, in_features, out_features, num_experts, k, dtype)
    return backward_input(*shape) + backward_weight(*shape)


def _counted(x, weight, _bias, gates, *_, **__) -> int:
    """``2 B k D N``, of the experts that a row uses."""
    return 2 * gates.numel() * x.shape[1] * weight.shape[1]


def _counted_backward_input(_grad, *arguments, **__) -> int:
    return _counted(*arguments)


def _counted_backward_weight(grad, x, gates, *_, **__) -> int:
    return 2 * gates.numel() * x.shape[1] * grad.shape[1]


FLOP_FORMULAS = {
    "expert_matmul": _counted,
    "expert_matmul_backward_input": _counted_backward_input,
    "expert_matmul_backward_weight": _counted_backward_weight,
}
