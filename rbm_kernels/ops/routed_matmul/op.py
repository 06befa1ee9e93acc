"""``torch.ops.rbm.routed_matmul``: schema, checks, fake implementation, derivative."""

import torch
from torch import Tensor

from rbm_kernels import _onnx, checks
from rbm_kernels._library import (
    define,
    has_tangent,
    implement_autograd_by_others,
    implement_cuda,
    implement_everywhere,
    implement_fake,
    inference_call,
)
from rbm_kernels._vmap import implement_vmap
from rbm_kernels.ops.cosine_topk import cosine_topk
from rbm_kernels.ops.cosine_topk.op import check_routing, kernels_serve
from rbm_kernels.ops.expert_matmul import expert_matmul
from rbm_kernels.ops.expert_matmul.config import numbers_fit
from rbm_kernels.ops.expert_matmul.op import check_weights
from rbm_kernels.ops.routed_matmul import config, reference

define("routed_matmul(Tensor x, Tensor memory, Tensor weight, Tensor? bias, int k, float temperature=1.0) -> Tensor")


def routed_matmul(
    x: Tensor, memory: Tensor, weight: Tensor, bias: Tensor | None, k: int, *, temperature: float = 1.0
) -> Tensor:
    """Route each row and send it through its experts: the whole forward of a layer (paper, Eqs. 3 and 5) in one call.

    Equals ``expert_matmul(x, weight, bias, gates, experts)`` with the gates and experts of
    ``cosine_topk(x, memory, k, temperature=temperature)``. It is made for inference with few rows (up to 64 on CUDA),
    for which the result is the only tensor made. Those two operators run for more rows, and if a gradient is needed
    (gradients are enabled, and ``x``, ``weight`` or ``bias`` requires one), because they save what the backward pass
    needs.

    Args:
        x: rows ``[B, D]``; float64, float32, bfloat16 or float16. ``B`` may be 0.
        memory: memory vectors ``[E, D]``; float32 or float64. They get no gradient.
        weight: ``[E, N, D]``, dtype of ``x``.
        bias: ``[E, N]``, dtype of ``x``, or None.
        k: experts per row, ``1 <= k <= E``.
        temperature: divides the cosines before the softmax; positive.

    Returns:
        ``y [B, N]`` in the dtype of ``x``, routed and accumulated in at least float32. A non-finite number in
        ``weight`` or ``bias`` affects the same rows as in :func:`rbm_kernels.expert_matmul`.

    Raises:
        TypeError: a dtype that is not listed above.
        ValueError: shapes that do not match, tensors on different devices, or ``k`` or the temperature out of range.
    """
    tensors = (x, weight, bias)
    wants_gradient = torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors)
    if wants_gradient or has_tangent(*tensors) or _onnx.is_exporting():
        _check(x, memory, weight, bias, k, temperature)
        gates, experts, _ = cosine_topk(x, memory, k, temperature=temperature)
        return expert_matmul(x, weight, bias, gates.to(checks.accumulation_dtype(x)), experts)
    if torch.compiler.is_compiling():
        return torch.ops.rbm.routed_matmul(x, memory, weight, bias, k, temperature)
    return _call(x, memory, weight, bias, k, temperature)


def _check(x: Tensor, memory: Tensor, weight: Tensor, bias: Tensor | None, k: int, temperature: float = 1.0) -> None:
    op = "routed_matmul"
    check_weights(op, x, weight, bias)
    check_routing(op, "x", x, memory, k, temperature)
    checks.check_shape(op, "memory", memory, (weight.shape[0], x.shape[1]), "experts of weight by the features of x")


@implement_everywhere("routed_matmul")
def _eager(x, memory, weight, bias, k, temperature=1.0) -> Tensor:
    _check(x, memory, weight, bias, k, temperature)
    return reference.routed_matmul(x, memory, weight, bias, k, temperature)


def _fake(x, memory, weight, bias, k, temperature=1.0) -> Tensor:
    _check(x, memory, weight, bias, k, temperature)
    return x.new_empty((x.shape[0], weight.shape[1]))


def _kernels_serve(x: Tensor, memory: Tensor, weight: Tensor) -> bool:
    """Whether the Triton kernel computes this: few rows that it can route, and no experts larger than it can number."""
    return x.shape[0] <= config.SMALL_BATCH and kernels_serve(x, memory) and numbers_fit(*weight.shape)


@implement_cuda("routed_matmul", _check)
def _cuda(x, memory, weight, bias, k, temperature=1.0) -> Tensor:
    if not _kernels_serve(x, memory, weight):
        return _two_operators(x, memory, weight, bias, k, temperature)
    from rbm_kernels.ops.routed_matmul import launch

    return launch.routed_matmul(x, memory, weight, bias, k, temperature)


def _two_operators(x, memory, weight, bias, k, temperature=1.0) -> Tensor:
    gates, experts, _ = torch.ops.rbm.cosine_topk(x, memory, k, temperature=temperature)
    return torch.ops.rbm.expert_matmul(x, weight, bias, gates.to(checks.accumulation_dtype(x)), experts)


implement_fake("routed_matmul", _fake)
implement_autograd_by_others("routed_matmul", _two_operators)
_call = inference_call("routed_matmul", _check)
implement_vmap("routed_matmul", rows=("x",))
