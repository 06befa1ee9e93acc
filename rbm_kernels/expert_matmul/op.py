"""``torch.ops.rbm.expert_matmul``: schema, checks, fake implementation, derivative."""

import torch
from torch import Tensor

from rbm_kernels import checks
from rbm_kernels._library import define, implement_autograd, implement_everywhere, implement_fake
from rbm_kernels.expert_matmul import reference
from rbm_kernels.expert_order import ExpertOrder

_ORDER = "Tensor? order=None, Tensor? tile_experts=None, Tensor? tile_counts=None, int block_m=0"
define(f"expert_matmul(Tensor x, Tensor weight, Tensor? bias, Tensor gates, Tensor experts, {_ORDER}) -> Tensor")
define(
    "expert_matmul_backward_input(Tensor grad, Tensor x, Tensor weight, Tensor? bias, Tensor gates, Tensor experts,"
    f" {_ORDER}) -> (Tensor grad_x, Tensor grad_gates)"
)
define(
    "expert_matmul_backward_weight(Tensor grad, Tensor x, Tensor gates, Tensor experts, int num_experts,"
    f" {_ORDER}) -> (Tensor grad_weight, Tensor grad_bias)"
)


def expert_matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: Tensor,
    experts: Tensor,
    order: ExpertOrder | None = None,
) -> Tensor:
    """Send each row through its own experts and add up what they return, weighted by the gates.

    ``y_b = sum_j gates[b, j] (weight[experts[b, j]] x_b + bias[experts[b, j]])``, the sum of the paper's Eq. 5.

    Args:
        x: rows ``[B, D]``; float64, float32, bfloat16 or float16. ``B`` may be 0.
        weight: ``[E, N, D]``, dtype of ``x``.
        bias: ``[E, N]``, dtype of ``x``, or None.
        gates: ``[B, k]``; float32, float64 for float64 rows.
        experts: int32 ``[B, k]``, each in ``[0, E)``.
        order: the rows' order from :func:`rbm_kernels.expert_order`. It changes the speed and never the result.

    Returns:
        ``y [B, N]`` in the dtype of ``x``, accumulated in float32 at least. ``x``, ``weight``, ``bias`` and ``gates``
        get gradients.

    Raises:
        TypeError: a dtype that is not listed above.
        ValueError: shapes that do not fit.
    """
    return torch.ops.rbm.expert_matmul(x, weight, bias, gates, experts, *(order or ()))


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, gates: Tensor, experts: Tensor) -> None:
    op = "expert_matmul"
    checks.check_dtype(op, "x", x, checks.FLOATING)
    checks.check_dtype(op, "weight", weight, (x.dtype,))
    checks.check_dtype(op, "gates", gates, (checks.accumulation_dtype(x),))
    checks.check_dtype(op, "experts", experts, (torch.int32,))
    checks.check_shape(op, "x", x, (None, None), "rows by features")
    checks.check_shape(op, "weight", weight, (None, None, x.shape[1]), "experts by outputs by the features of x")
    if bias is not None:
        checks.check_dtype(op, "bias", bias, (x.dtype,))
        checks.check_shape(op, "bias", bias, tuple(weight.shape[:2]), "experts by outputs, as in weight")
    checks.check_shape(op, "gates", gates, (x.shape[0], None), "one row for each row of x")
    checks.check_shape(op, "experts", experts, tuple(gates.shape), "the shape of gates")


def _eager(x, weight, bias, gates, experts, order=None, tile_experts=None, tile_counts=None, block_m=0) -> Tensor:
    _check(x, weight, bias, gates, experts)
    return reference.expert_matmul(x, weight, bias, gates, experts)


def _fake(x, weight, bias, gates, experts, order=None, tile_experts=None, tile_counts=None, block_m=0) -> Tensor:
    _check(x, weight, bias, gates, experts)
    return x.new_empty((x.shape[0], weight.shape[1]))


def _eager_backward_input(
    grad, x, weight, bias, gates, experts, order=None, tile_experts=None, tile_counts=None, block_m=0
) -> tuple[Tensor, Tensor]:
    return reference.backward_input(grad, x, weight, bias, gates, experts)


def _fake_backward_input(
    grad, x, weight, bias, gates, experts, order=None, tile_experts=None, tile_counts=None, block_m=0
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), gates.new_empty(gates.shape)


def _eager_backward_weight(
    grad, x, gates, experts, num_experts, order=None, tile_experts=None, tile_counts=None, block_m=0
) -> tuple[Tensor, Tensor]:
    return reference.backward_weight(grad, x, gates, experts, num_experts)


def _fake_backward_weight(
    grad, x, gates, experts, num_experts, order=None, tile_experts=None, tile_counts=None, block_m=0
) -> tuple[Tensor, Tensor]:
    return x.new_empty((num_experts, grad.shape[1], x.shape[1])), x.new_empty((num_experts, grad.shape[1]))


def _setup_context(ctx, inputs, output) -> None:
    x, weight, bias, gates, experts, order, tile_experts, tile_counts, block_m = inputs
    ctx.save_for_backward(x, weight, bias, gates, experts, order, tile_experts, tile_counts)
    ctx.block_m = block_m


def _backward(ctx, grad):
    x, weight, bias, gates, experts, *order = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, needs_gates = ctx.needs_input_grad[:4]
    grad_x = grad_gates = grad_weight = grad_bias = None
    if needs_x or needs_gates:
        grad_x, grad_gates = torch.ops.rbm.expert_matmul_backward_input(
            grad, x, weight, bias, gates, experts, *order, ctx.block_m
        )
    if needs_weight or needs_bias:
        grad_weight, grad_bias = torch.ops.rbm.expert_matmul_backward_weight(
            grad, x, gates, experts, weight.shape[0], *order, ctx.block_m
        )
    if bias is None:
        grad_bias = None
    return grad_x, grad_weight, grad_bias, grad_gates, None, None, None, None, None


implement_everywhere("expert_matmul", _eager)
implement_everywhere("expert_matmul_backward_input", _eager_backward_input)
implement_everywhere("expert_matmul_backward_weight", _eager_backward_weight)
implement_fake("expert_matmul", _fake)
implement_fake("expert_matmul_backward_input", _fake_backward_input)
implement_fake("expert_matmul_backward_weight", _fake_backward_weight)
implement_autograd("expert_matmul", _backward, _setup_context)
