"""``torch.ops.rbm.expert_matmul``: schema, checks, fake implementation, derivative."""

from functools import cache, partial
from types import ModuleType

import torch
from torch import Tensor

from rbm_kernels import _onnx, checks
from rbm_kernels._library import (
    define,
    gradients_of,
    implement_autograd,
    implement_cuda,
    implement_everywhere,
    implement_fake,
    is_exporting,
    refuse_derivative,
)
from rbm_kernels._vmap import implement_vmap
from rbm_kernels.ops.expert_matmul import config, reference
from rbm_kernels.ops.expert_order import ExpertOrder, expert_order

# A number of rows for which an order pays.
_MANY = 1 << 17
# CUDA's limit to the second dimension of a grid: the weight's gradient has its experts there.
_MOST_GRID = 65_535
_ORDER = "Tensor? order=None, Tensor? tile_experts=None, Tensor? tile_counts=None, int block_m=0"
define(f"expert_matmul(Tensor x, Tensor weight, Tensor? bias, Tensor gates, Tensor experts, {_ORDER}) -> Tensor")
define(
    "expert_matmul_backward_input(Tensor grad, Tensor x, Tensor weight, Tensor? bias, Tensor gates, Tensor experts,"
    f" bool with_gates=True, {_ORDER}) -> (Tensor grad_x, Tensor grad_gates)"
)
# Rows are summed by expert, not by set of experts, so the weight's gradient does not need the order.
define(
    "expert_matmul_backward_weight(Tensor grad, Tensor x, Tensor gates, Tensor experts, int num_experts,"
    " bool with_bias=True) -> (Tensor grad_weight, Tensor grad_bias)"
)


def expert_matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: Tensor,
    experts: Tensor,
    order: ExpertOrder | None = None,
) -> Tensor:
    """Send each row through its own experts and sum their outputs, weighted by the gates.

    ``y_b = sum_j gates[b, j] (weight[experts[b, j]] x_b + bias[experts[b, j]])``, the sum of the paper's Eq. 5.

    Args:
        x: rows ``[B, D]``; float64, float32, bfloat16 or float16. ``B`` may be 0.
        weight: ``[E, N, D]``, dtype of ``x``.
        bias: ``[E, N]``, dtype of ``x``, or None.
        gates: ``[B, k]``; float32 (float64 for float64 rows).
        experts: int32 ``[B, k]``, each in ``[0, E)``, k different ones in a row. If a row names an expert twice, CUDA
            counts only the last of its gates in ``y`` and the gradient of ``x``; the CPU counts both.
        order: the rows' order from :func:`rbm_kernels.expert_order`, in one pass or several. It affects the speed but
            not the result, apart from the order in which a row's experts are summed. Pass it if several calls share
            ``experts``. By default the order is made here if kernels use it, in as many passes as
            :func:`rbm_kernels.ops.expert_matmul.config.passes` chooses.

    Returns:
        ``y [B, N]`` in the dtype of ``x``, accumulated in at least float32. ``x``, ``weight``, ``bias`` and ``gates``
        get gradients.

        A non-finite number in ``weight`` or ``bias`` only affects the rows that use its expert, except in the eager
        reference, where it affects all rows. One in ``x`` affects its own row and the gradients of that row's experts.

    Raises:
        TypeError: a dtype that is not listed above.
        ValueError: shapes that do not match, or tensors on different devices; on CUDA, an order of different rows, or
            so many rows that ``tile_experts`` of the order would have 2^31 elements.
        RuntimeError: on the CPU, an expert out of range.
    """
    if _onnx.is_exporting():
        _check(x, weight, bias, gates, experts)
        return _onnx.expert_matmul(x, weight, bias, gates, experts)
    try:
        if order is None:
            # Made outside the operator: the backward pass sees the operator's inputs, and can reuse it.
            order = order_for(x, weight, experts)
        return torch.ops.rbm.expert_matmul(x, weight, bias, gates, experts, *(order or ()))
    except (RuntimeError, IndexError, AttributeError, TypeError):
        # C++ implementations can only raise RuntimeError, so repeat their checks here to raise the right class.
        _check(x, weight, bias, gates, experts)
        if order is not None and not isinstance(order, tuple):
            raise TypeError(
                f"rbm::expert_matmul: order is a {type(order).__name__}, expected None or all that"
                " rbm_kernels.expert_order returns"
            ) from None
        raise


def order_for(x: Tensor, weight: Tensor, experts: Tensor) -> ExpertOrder | None:
    """The order that :func:`expert_matmul` makes by default for these arguments; None if no kernel needs one.

    An exported program has none: it has no backward pass, and its number of rows must not be compared with anything.
    """
    if not _kernels_serve(x) or experts.dtype != torch.int32 or is_exporting():
        return None
    # vmap passes the rows of all slices to the operator, which makes one order for them.
    if torch._C._functorch.is_batchedtensor(x) or torch._C._functorch.is_batchedtensor(experts):
        return None
    num_experts = weight.shape[0]
    rows, k, precision = x.shape[0], experts.shape[1], config.precision_of(x)
    if not config.holds(rows <= checks.MOST_SIZE):
        rows = _MANY  # their number depends on data and nothing can be chosen by it
    if k == 0 or config.is_small(rows, k, num_experts, weight.numel(), precision):
        return None
    return expert_order(experts, num_experts, *config.order_of(rows, num_experts, k, precision))


def check_weights(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise TypeError or ValueError unless rows and experts match."""
    checks.check_dtype(op, "x", x, checks.FLOATING)
    checks.check_dtype(op, "weight", weight, (x.dtype,))
    checks.check_shape(op, "x", x, (None, None), "rows by features")
    checks.check_shape(op, "weight", weight, (None, None, x.shape[1]), "experts by outputs by the features of x")
    checks.check_bias(op, bias, weight)


def _check(
    x, weight, bias, gates, experts, order=None, tile_experts=None, tile_counts=None, block_m=0, *, op="expert_matmul"
) -> None:
    check_weights(op, x, weight, bias)
    _check_pairs(op, x, gates, experts)
    if order is not None:
        _check_order(op, order, tile_experts, tile_counts, block_m, experts, weight.shape[0])


def _check_pairs(op: str, x: Tensor, gates: Tensor, experts: Tensor) -> None:
    checks.check_dtype(op, "gates", gates, (checks.accumulation_dtype(x),))
    checks.check_dtype(op, "experts", experts, (torch.int32,))
    checks.check_shape(op, "gates", gates, (x.shape[0], None), "one row for each row of x")
    checks.check_shape(op, "experts", experts, tuple(gates.shape), "the shape of gates")


def _check_grad(op: str, grad: Tensor, x: Tensor, out_features: int | None) -> None:
    checks.check_dtype(op, "grad", grad, (x.dtype,))
    checks.check_shape(op, "grad", grad, (x.shape[0], out_features), "rows of x by outputs")


def _check_order(op: str, order, tile_experts, tile_counts, block_m: int, experts: Tensor, num_experts: int) -> None:
    """Raise TypeError or ValueError unless these are outputs of expert_order, and short enough for the kernels."""
    if tile_experts is None or tile_counts is None or block_m < 1:
        raise ValueError(
            f"rbm::{op}: order is a tensor and block_m {block_m}, with tile_experts and tile_counts"
            f" {'None' if tile_experts is None or tile_counts is None else 'tensors'}: expected all that"
            " rbm_kernels.expert_order returns"
        )
    rows, k = experts.shape
    passes = () if order.dim() == 1 else order.shape[:1]
    if passes and not 1 <= passes[0] <= k:
        raise ValueError(f"rbm::{op}: order has {passes[0]} passes, expected between 1 and {k}, the experts of a row")
    tiles = -(-rows // block_m)
    for name, tensor, shape in (
        ("order", order, (rows,)),
        ("tile_experts", tile_experts, (tiles, num_experts)),
        ("tile_counts", tile_counts, (tiles,)),
    ):
        checks.check_dtype(op, name, tensor, (torch.int32,))
        checks.check_shape(op, name, tensor, (*passes, *shape), "what rbm_kernels.expert_order returned")
    checks.check_tiles(op, rows, block_m, num_experts)


@implement_everywhere("expert_matmul")
def _eager(x, weight, bias, gates, experts, *_order) -> Tensor:
    _check(x, weight, bias, gates, experts)
    checks.check_indices("expert_matmul", "experts", experts, weight.shape[0])
    return reference.expert_matmul(x, weight, bias, gates, experts)


def _fake(x, weight, bias, gates, experts, *_order) -> Tensor:
    _check(x, weight, bias, gates, experts)
    return x.new_empty((x.shape[0], weight.shape[1]))


def _kernels_serve(x: Tensor) -> bool:
    """Whether the Triton kernels compute this: on CUDA, except float64, which they do not support."""
    return x.is_cuda and x.dtype != torch.float64


def _kernels_take(k: int, *sizes: int) -> bool:
    """Whether kernels take k experts a row and weights ``[E, N, D]``: none of none, and numbers must fit."""
    return 0 not in (k, *sizes) and config.numbers_fit(*sizes)


@cache
def _launch() -> ModuleType:
    """The kernels' launch functions. Imported on the first call: Triton takes a second to import, and is optional."""
    from rbm_kernels.ops.expert_matmul import launch

    return launch


@implement_cuda("expert_matmul", _check)
def _cuda(x, weight, bias, gates, experts, *order) -> Tensor:
    if not (_kernels_serve(x) and _kernels_take(experts.shape[1], *weight.shape)):
        return _eager(x, weight, bias, gates, experts)
    return _launch().expert_matmul(x, weight, bias, gates, experts, *order)


def _check_backward_input(grad, x, weight, bias, gates, experts, with_gates=True, *order) -> None:
    op = "expert_matmul_backward_input"
    _check(x, weight, bias, gates, experts, *order, op=op)
    _check_grad(op, grad, x, weight.shape[1])


@implement_everywhere("expert_matmul_backward_input")
def _eager_backward_input(grad, x, weight, bias, gates, experts, with_gates=True, *_order) -> tuple[Tensor, Tensor]:
    grad_x, grad_gates = reference.backward_input(grad, x, weight, bias, gates, experts)
    return grad_x, grad_gates if with_gates else gates.new_empty(0)


def _fake_backward_input(grad, x, weight, bias, gates, experts, with_gates=True, *_order) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), gates.new_empty(gates.shape if with_gates else 0)


@implement_cuda("expert_matmul_backward_input", _check_backward_input)
def _cuda_backward_input(grad, x, weight, bias, gates, experts, with_gates=True, *order) -> tuple[Tensor, Tensor]:
    if not (_kernels_serve(x) and _kernels_take(experts.shape[1], *weight.shape)):
        return _eager_backward_input(grad, x, weight, bias, gates, experts, with_gates)
    return _launch().backward_input(grad, x, weight, bias, gates, experts, with_gates, *order)


def _check_backward_weight(grad, x, gates, experts, num_experts, with_bias=True) -> None:
    op = "expert_matmul_backward_weight"
    checks.check_dtype(op, "x", x, checks.FLOATING)
    checks.check_shape(op, "x", x, (None, None), "rows by features")
    _check_grad(op, grad, x, None)
    _check_pairs(op, x, gates, experts)
    checks.check_num_experts(op, num_experts)


@implement_everywhere("expert_matmul_backward_weight")
def _eager_backward_weight(grad, x, gates, experts, num_experts, with_bias=True) -> tuple[Tensor, Tensor]:
    grad_weight, grad_bias = reference.backward_weight(grad, x, gates, experts, num_experts)
    return grad_weight, grad_bias if with_bias else x.new_empty(0)


def _fake_backward_weight(grad, x, gates, experts, num_experts, with_bias=True) -> tuple[Tensor, Tensor]:
    return (
        x.new_empty((num_experts, grad.shape[1], x.shape[1])),
        x.new_empty((num_experts, grad.shape[1]) if with_bias else 0),
    )


@implement_cuda("expert_matmul_backward_weight", _check_backward_weight)
def _cuda_backward_weight(grad, x, gates, experts, num_experts, with_bias=True) -> tuple[Tensor, Tensor]:
    sizes = num_experts, grad.shape[1], x.shape[1]
    if not (_kernels_serve(x) and _kernels_take(experts.shape[1], *sizes) and num_experts <= _MOST_GRID):
        return _eager_backward_weight(grad, x, gates, experts, num_experts, with_bias)
    return _launch().backward_weight(grad, x, gates, experts, num_experts, with_bias)


def _save(
    ctx, output, x, weight, bias, gates, experts, order=None, tile_experts=None, tile_counts=None, block_m=0
) -> None:
    ctx.save_for_backward(x, weight, bias, gates, experts, order, tile_experts, tile_counts)
    ctx.block_m = block_m


def _backward(ctx, saved, grad):
    x, weight, bias, gates, experts, *order = saved
    needs_x, needs_weight, needs_bias, needs_gates = needed = ctx.needs_input_grad[:4]
    if torch.is_grad_enabled():
        formula = partial(reference.expert_matmul, experts=experts)
        return *gradients_of(formula, (x, weight, bias, gates), needed, (grad,)), *(None,) * 5
    grad_x = grad_gates = grad_weight = grad_bias = None
    if needs_x or needs_gates:
        grad_x, grad_gates = torch.ops.rbm.expert_matmul_backward_input(
            grad, x, weight, bias, gates, experts, needs_gates, *order, ctx.block_m
        )
    if needs_weight or needs_bias:
        grad_weight, grad_bias = torch.ops.rbm.expert_matmul_backward_weight(
            grad, x, gates, experts, weight.shape[0], needs_bias
        )
    return (
        grad_x,
        grad_weight,
        grad_bias if needs_bias else None,
        grad_gates if needs_gates else None,
        *(None,) * 5,
    )


def _formula(operate, x, weight, bias, gates, experts, *_order) -> Tensor:
    return reference.expert_matmul(x, weight, bias, gates, experts)


implement_fake("expert_matmul", _fake)
implement_fake("expert_matmul_backward_input", _fake_backward_input)
implement_fake("expert_matmul_backward_weight", _fake_backward_weight)
implement_autograd("expert_matmul", _backward, _save, _formula)
refuse_derivative("expert_matmul_backward_input", "expert_matmul")
refuse_derivative("expert_matmul_backward_weight", "expert_matmul")
_OF_ALL_ROWS = ("order", "tile_experts", "tile_counts")
implement_vmap("expert_matmul", rows=("x", "gates", "experts"), of_all_rows=_OF_ALL_ROWS)
implement_vmap("expert_matmul_backward_input", rows=("grad", "x", "gates", "experts"), of_all_rows=_OF_ALL_ROWS)
implement_vmap("expert_matmul_backward_weight")
