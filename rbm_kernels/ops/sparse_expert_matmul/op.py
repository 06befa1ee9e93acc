"""``torch.ops.rbm.sparse_expert_matmul``: schema, checks, fake implementation, derivative."""

from functools import partial

import torch
from torch import Tensor

from rbm_kernels import checks
from rbm_kernels._library import (
    define,
    gradients_of,
    implement_autograd,
    implement_everywhere,
    implement_fake,
    refuse_derivative,
)
from rbm_kernels._vmap import implement_vmap
from rbm_kernels.ops.expert_matmul.reference import dense_gates
from rbm_kernels.ops.sparse_expert_matmul import reference

_ROWS = "Tensor crow, Tensor col, Tensor values"
define(
    f"sparse_expert_matmul({_ROWS}, Tensor weight, Tensor? bias, Tensor? scale, Tensor gates, Tensor experts) -> Tensor"
)
define(
    f"sparse_expert_matmul_backward_gates(Tensor grad, {_ROWS}, Tensor weight, Tensor? bias, Tensor? scale,"
    " Tensor gates, Tensor experts) -> Tensor"
)
define(
    f"sparse_expert_matmul_backward_weight(Tensor grad, {_ROWS}, Tensor weight, Tensor? scale, Tensor gates,"
    " Tensor experts) -> (Tensor grad_weight, Tensor grad_scale)"
)


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
    """:func:`rbm_kernels.expert_matmul` over rows in compressed sparse form. Only stored entries are multiplied.

    ``y_b = sum_j gates[b, j] (weight[e] (scale[e] * x_b) + bias[e])`` with ``e = experts[b, j]`` (paper, Eq. 5).

    Args:
        crow: int32 ``[B + 1]``: row ``b`` has the entries ``crow[b]`` to ``crow[b + 1] - 1``.
        col: int32 ``[nnz]``, the feature of each entry, in any order. Entries with the same row and feature are summed.
        values: ``[nnz]``, float32 or float64. They get no gradient.
        weight: ``[E, N, D]``, dtype of ``values``.
        bias: ``[E, N]``, dtype of ``values``, or None.
        scale: ``[E, D]``, a factor per expert and feature, dtype of ``values``, or None. It has no extra cost, and no
            copy of ``weight * scale`` is made.
        gates: ``[B, k]``, dtype of ``values``.
        experts: int32 ``[B, k]``, each in ``[0, E)``.

    Returns:
        ``y [B, N]``. ``weight``, ``bias``, ``scale`` and ``gates`` get gradients; that of ``weight`` is dense.

    Raises:
        TypeError: a dtype that is not listed above.
        ValueError: shapes that do not match, or tensors on different devices.
        RuntimeError: on the CPU, an index out of range.
    """
    try:
        return torch.ops.rbm.sparse_expert_matmul(crow, col, values, weight, bias, scale, gates, experts)
    except RuntimeError:
        # C++ implementations can only raise RuntimeError, so repeat their checks here to raise the right class.
        _check(crow, col, values, weight, bias, scale, gates, experts)
        raise


def sparse_expert_matmul_backward_weight(
    grad: Tensor,
    crow: Tensor,
    col: Tensor,
    values: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    gates: Tensor,
    experts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients with respect to ``weight [E, N, D]`` and ``scale [E, D]``, from ``grad [B, N]``.

    ``grad_weight[e] = scale[e] * sum gates[b, j] grad_b x_b^T`` over the rows and choices with ``experts[b, j] == e``.
    Without a scale, only the shape of ``weight`` is used, and ``grad_scale`` is empty.

    Args:
        grad: gradient of the result of :func:`sparse_expert_matmul`, ``[B, N]``; float32 or float64, like all others.
        crow: of the rows ``x [B, D]`` in compressed sparse form, int32 ``[B + 1]``.
        col: of these rows, int32 ``[nnz]``.
        values: of these rows, ``[nnz]``.
        weight: ``[E, N, D]``.
        scale: ``[E, D]``, or None.
        gates: ``[B, k]``.
        experts: int32 ``[B, k]``, each in ``[0, E)``.

    Returns:
        ``grad_weight [E, N, D]`` and ``grad_scale [E, D]``.

    Raises:
        TypeError: another dtype.
        ValueError: shapes that do not match, or tensors on different devices.
        RuntimeError: on the CPU, an index out of range.
    """
    try:
        return torch.ops.rbm.sparse_expert_matmul_backward_weight(
            grad, crow, col, values, weight, scale, gates, experts
        )
    except RuntimeError:
        _check_backward_weight(grad, crow, col, values, weight, scale, gates, experts)
        raise


def _check(crow, col, values, weight, bias, scale, gates, experts, *, op="sparse_expert_matmul") -> None:
    checks.check_dtype(op, "values", values, (torch.float32, torch.float64))
    for name, tensor in (("crow", crow), ("col", col), ("experts", experts)):
        checks.check_dtype(op, name, tensor, (torch.int32,))
    for name, tensor in (("weight", weight), ("gates", gates)):
        checks.check_dtype(op, name, tensor, (values.dtype,))
    checks.check_shape(op, "values", values, (None,), "one for each stored entry")
    checks.check_shape(op, "col", col, (values.shape[0],), "one for each stored entry")
    checks.check_shape(op, "weight", weight, (None, None, None), "experts by outputs by features")
    checks.check_bias(op, bias, weight)
    if scale is not None:
        checks.check_dtype(op, "scale", scale, (values.dtype,))
        checks.check_shape(op, "scale", scale, tuple(weight.shape[::2]), "experts by features, as in weight")
    checks.check_shape(op, "gates", gates, (None, None), "rows by choices")
    if gates.shape[1] > 1 and isinstance(gates.shape[0], int) and gates.shape[0] * gates.shape[1] > checks.MOST_SIZE:
        raise ValueError(
            f"rbm::{op}: gates has shape {list(gates.shape)}, expected fewer than 2^31 choices: split the batch"
        )
    checks.check_shape(op, "experts", experts, tuple(gates.shape), "the shape of gates")
    checks.check_shape(op, "crow", crow, (gates.shape[0] + 1,), "where each row begins, and the end")


def _check_indices(crow, col, values, weight, experts) -> None:
    """Check indices on the CPU: PyTorch's sparse matmul would read from whatever address a bad index points to."""
    op = "sparse_expert_matmul"
    if crow.device.type == "cpu" and (crow[0] != 0 or crow[-1] != values.shape[0] or (crow.diff() < 0).any()):
        raise RuntimeError(f"rbm::{op}: crow does not rise from 0 to the number of entries, {values.shape[0]}")
    checks.check_indices(op, "col", col, weight.shape[2])
    checks.check_indices(op, "experts", experts, weight.shape[0])


@implement_everywhere("sparse_expert_matmul")
def _eager(crow, col, values, weight, bias, scale, gates, experts) -> Tensor:
    _check(crow, col, values, weight, bias, scale, gates, experts)
    _check_indices(crow, col, values, weight, experts)
    return reference.sparse_expert_matmul(crow, col, values, weight, bias, scale, gates, experts)


def _fake(crow, col, values, weight, bias, scale, gates, experts) -> Tensor:
    _check(crow, col, values, weight, bias, scale, gates, experts)
    return values.new_empty((gates.shape[0], weight.shape[1]))


@implement_everywhere("sparse_expert_matmul_backward_gates")
def _eager_backward_gates(grad, crow, col, values, weight, bias, scale, gates, experts) -> Tensor:
    _check_indices(crow, col, values, weight, experts)
    return reference.backward_gates(grad, crow, col, values, weight, bias, scale, gates, experts)


def _fake_backward_gates(grad, crow, col, values, weight, bias, scale, gates, experts) -> Tensor:
    return gates.new_empty(gates.shape)


def _check_backward_weight(grad, crow, col, values, weight, scale, gates, experts) -> None:
    op = "sparse_expert_matmul_backward_weight"
    _check(crow, col, values, weight, None, scale, gates, experts, op=op)
    checks.check_dtype(op, "grad", grad, (values.dtype,))
    checks.check_shape(op, "grad", grad, (gates.shape[0], weight.shape[1]), "rows by outputs")


@implement_everywhere("sparse_expert_matmul_backward_weight")
def _eager_backward_weight(grad, crow, col, values, weight, scale, gates, experts) -> tuple[Tensor, Tensor]:
    _check_backward_weight(grad, crow, col, values, weight, scale, gates, experts)
    _check_indices(crow, col, values, weight, experts)
    return reference.backward_weight(grad, crow, col, values, weight, scale, gates, experts)


def _fake_backward_weight(grad, crow, col, values, weight, scale, gates, experts) -> tuple[Tensor, Tensor]:
    _check_backward_weight(grad, crow, col, values, weight, scale, gates, experts)
    num_experts, _, features = weight.shape
    return values.new_empty(weight.shape), values.new_empty((0 if scale is None else num_experts, features))


def _save(ctx, output, *arguments) -> None:
    ctx.save_for_backward(*arguments)


def _backward(ctx, saved, grad):
    crow, col, values, weight, bias, scale, gates, experts = saved
    needs_weight, needs_bias, needs_scale, needs_gates = needed = ctx.needs_input_grad[3:7]
    if torch.is_grad_enabled():
        formula = partial(reference.by_dense_rows, crow, col, values, experts=experts)
        return None, None, None, *gradients_of(formula, (weight, bias, scale, gates), needed, (grad,)), None
    grad_weight = grad_bias = grad_scale = grad_gates = None
    if needs_weight or needs_scale:
        grad_weight, grad_scale = torch.ops.rbm.sparse_expert_matmul_backward_weight(
            grad, crow, col, values, weight, scale, gates, experts
        )
    if needs_bias:
        with torch._C._DisableAutocast():  # the only product here that autocast would round
            grad_bias = dense_gates(gates, experts, weight.shape[0]).T @ grad
    if needs_gates:
        grad_gates = torch.ops.rbm.sparse_expert_matmul_backward_gates(
            grad, crow, col, values, weight, bias, scale, gates, experts
        )
    return None, None, None, grad_weight, grad_bias, grad_scale if needs_scale else None, grad_gates, None


def _formula(operate, *arguments) -> Tensor:
    return reference.by_dense_rows(*arguments)


implement_fake("sparse_expert_matmul", _fake)
implement_fake("sparse_expert_matmul_backward_gates", _fake_backward_gates)
implement_fake("sparse_expert_matmul_backward_weight", _fake_backward_weight)
implement_autograd("sparse_expert_matmul", _backward, _save, _formula)
refuse_derivative("sparse_expert_matmul_backward_gates", "sparse_expert_matmul")
refuse_derivative("sparse_expert_matmul_backward_weight", "sparse_expert_matmul")
implement_vmap("sparse_expert_matmul")
implement_vmap("sparse_expert_matmul_backward_gates")
implement_vmap("sparse_expert_matmul_backward_weight")
