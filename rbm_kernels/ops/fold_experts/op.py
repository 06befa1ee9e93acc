"""``torch.ops.rbm.fold_experts``: schema, checks, fake implementation, derivative."""

from functools import partial

import torch
from torch import Tensor

from rbm_kernels import checks
from rbm_kernels._library import (
    define,
    gradients_of,
    implement_autograd,
    implement_cuda,
    implement_everywhere,
    implement_fake,
    refuse_derivative,
)
from rbm_kernels._vmap import implement_vmap
from rbm_kernels.ops.fold_experts import reference

define(
    "fold_experts(Tensor weight, Tensor? bias, Tensor? attention, Tensor log_scale, *, ScalarType? dtype=None)"
    " -> (Tensor weight, Tensor bias)"
)
define(
    "fold_experts_backward(Tensor? grad_weight, Tensor? grad_bias, Tensor weight, Tensor? bias, Tensor? attention,"
    " Tensor log_scale) -> (Tensor grad_weight, Tensor grad_bias, Tensor grad_attention, Tensor grad_log_scale)"
)


def fold_experts(
    weight: Tensor,
    bias: Tensor | None,
    attention: Tensor | None,
    log_scale: Tensor,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``exp(s) W_i diag(exp(a_i))`` and ``exp(s) b_i`` of every expert: E * N * D multiplications instead of B * k * D.

    The layer scales the input of expert ``i`` by ``exp(a_i)`` and its output by ``exp(s)``. Both are linear, so they
    can be multiplied into the weights once for all rows. Logarithms are clamped at log 100, as in the released code; a
    clamped one gets no gradient.

    Args:
        weight: ``[E, N, D]``; float64, float32, bfloat16 or float16.
        bias: ``[E, N]``, dtype of ``weight``, or None.
        attention: ``a [E, D]``, dtype of ``weight``, or None for no scale of the features.
        log_scale: ``s``, ``[1]`` or a scalar, dtype of ``weight``.
        dtype: to return both in, rounded once they are folded; None leaves that of ``weight``.

    Returns:
        ``weight [E, N, D]``, and ``bias [E, N]`` or None. All four arguments get gradients.

    Raises:
        TypeError: a dtype that is not listed above.
        ValueError: shapes that do not match, or tensors on different devices.
    """
    try:
        folded, folded_bias = torch.ops.rbm.fold_experts(weight, bias, attention, log_scale, dtype=dtype)
    except (RuntimeError, IndexError):
        _check(weight, bias, attention, log_scale, dtype=dtype)
        raise
    return folded, None if bias is None else folded_bias


def _check(
    weight: Tensor,
    bias: Tensor | None,
    attention: Tensor | None,
    log_scale: Tensor,
    *,
    dtype: torch.dtype | None = None,
    op: str = "fold_experts",
) -> None:
    checks.check_dtype(op, "weight", weight, checks.FLOATING)
    checks.check_shape(op, "weight", weight, (None, None, None), "experts by outputs by features")
    checks.check_bias(op, bias, weight)
    if attention is not None:
        checks.check_dtype(op, "attention", attention, (weight.dtype,))
        shape = (weight.shape[0], weight.shape[2])
        checks.check_shape(op, "attention", attention, shape, "experts by features, as in weight")
    checks.check_dtype(op, "log_scale", log_scale, (weight.dtype,))
    if log_scale.dim() > 1 or log_scale.numel() != 1:
        raise ValueError(f"rbm::{op}: log_scale has shape {list(log_scale.shape)}, expected [1] or [] (one number)")
    if dtype is not None and dtype not in checks.FLOATING:
        names = ", ".join(str(known).removeprefix("torch.") for known in checks.FLOATING)
        raise TypeError(f"rbm::{op}: dtype is {str(dtype).removeprefix('torch.')}, expected None or one of {names}")


@implement_everywhere("fold_experts")
def _eager(weight, bias, attention, log_scale, *, dtype=None) -> tuple[Tensor, Tensor]:
    _check(weight, bias, attention, log_scale, dtype=dtype)
    folded, folded_bias = reference.fold_experts(weight, bias, attention, log_scale, dtype)
    return folded.contiguous(), folded.new_empty(0) if bias is None else folded_bias.contiguous()


def _fake(weight, bias, attention, log_scale, *, dtype=None) -> tuple[Tensor, Tensor]:
    _check(weight, bias, attention, log_scale, dtype=dtype)
    folded = weight.new_empty(weight.shape, dtype=dtype or weight.dtype)
    return folded, folded.new_empty(0 if bias is None else bias.shape)


def _kernels_serve(weight: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether the Triton kernels compute this: no float64, and something to compute."""
    return torch.float64 not in (weight.dtype, dtype) and weight.numel() > 0


@implement_cuda("fold_experts", _check)
def _cuda(weight, bias, attention, log_scale, *, dtype=None) -> tuple[Tensor, Tensor]:
    if not _kernels_serve(weight, dtype):
        return _eager(weight, bias, attention, log_scale, dtype=dtype)
    from rbm_kernels.ops.fold_experts import launch

    folded, folded_bias = launch.fold_experts(weight, bias, attention, log_scale, dtype)
    return folded, folded.new_empty(0) if folded_bias is None else folded_bias


def _check_backward(grad_weight, grad_bias, weight, bias, attention, log_scale) -> None:
    op = "fold_experts_backward"
    _check(weight, bias, attention, log_scale, op=op)
    for name, grad, of in (("grad_weight", grad_weight, weight), ("grad_bias", grad_bias, bias)):
        if grad is not None and of is not None:
            checks.check_dtype(op, name, grad, checks.FLOATING)
            checks.check_shape(op, name, grad, tuple(of.shape), "the shape of what was folded")


@implement_everywhere("fold_experts_backward")
def _eager_backward(grad_weight, grad_bias, weight, bias, attention, log_scale) -> tuple[Tensor, ...]:
    _check_backward(grad_weight, grad_bias, weight, bias, attention, log_scale)
    return _without_none(weight, reference.backward(grad_weight, grad_bias, weight, bias, attention, log_scale))


def _fake_backward(grad_weight, grad_bias, weight, bias, attention, log_scale) -> tuple[Tensor, ...]:
    empty = (None if of is None else weight.new_empty(of.shape) for of in (weight, bias, attention, log_scale))
    return _without_none(weight, tuple(empty))


def _without_none(weight: Tensor, grads: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    return tuple([weight.new_empty(0) if grad is None else grad.contiguous() for grad in grads])


@implement_cuda("fold_experts_backward", _check_backward)
def _cuda_backward(grad_weight, grad_bias, weight, bias, attention, log_scale) -> tuple[Tensor, ...]:
    has_all = grad_weight is not None and (grad_bias is None) == (bias is None)
    if not (has_all and _kernels_serve(weight, grad_weight.dtype)):
        return _eager_backward(grad_weight, grad_bias, weight, bias, attention, log_scale)
    from rbm_kernels.ops.fold_experts import launch

    return _without_none(weight, launch.backward(grad_weight, grad_bias, weight, bias, attention, log_scale))


def _save(ctx, output, weight, bias, attention, log_scale, *, dtype=None) -> None:
    ctx.save_for_backward(weight, bias, attention, log_scale)
    ctx.dtype = dtype
    ctx.set_materialize_grads(False)
    if bias is None:
        ctx.mark_non_differentiable(output[1])


def _backward(ctx, saved, grad_weight, grad_bias):
    needed = ctx.needs_input_grad[:4]
    if grad_weight is None and grad_bias is None:
        return (None,) * 4
    if torch.is_grad_enabled():
        formula = partial(reference.fold_experts, dtype=ctx.dtype)
        return tuple(gradients_of(formula, saved, needed, (grad_weight, grad_bias)))
    grads = torch.ops.rbm.fold_experts_backward(grad_weight, None if saved[1] is None else grad_bias, *saved)
    return tuple([grad if need else None for grad, need in zip(grads, needed, strict=True)])


def _formula(operate, weight, bias, attention, log_scale, *, dtype=None) -> tuple[Tensor, Tensor]:
    folded, folded_bias = reference.fold_experts(weight, bias, attention, log_scale, dtype)
    return folded, folded.new_empty(0) if bias is None else folded_bias


implement_fake("fold_experts", _fake)
implement_fake("fold_experts_backward", _fake_backward)
implement_autograd("fold_experts", _backward, _save, _formula)
refuse_derivative("fold_experts_backward", "fold_experts")
implement_vmap("fold_experts")
implement_vmap("fold_experts_backward")
