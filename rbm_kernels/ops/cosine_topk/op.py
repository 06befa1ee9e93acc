"""``torch.ops.rbm.cosine_topk``: schema, checks, fake implementation, derivative."""

from functools import partial

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
    refuse_derivative,
)
from rbm_kernels._vmap import implement_vmap
from rbm_kernels.ops.cosine_topk import reference

define(
    "cosine_topk(Tensor h, Tensor memory, int k, *, float temperature=1.0)"
    " -> (Tensor gates, Tensor experts, Tensor cosines)"
)
define(
    "cosine_topk_backward(Tensor? grad_gates, Tensor? grad_cosines, Tensor h, Tensor memory,"
    " Tensor gates, Tensor experts, Tensor cosines, *, float temperature=1.0) -> Tensor"
)


def cosine_topk(h: Tensor, memory: Tensor, k: int, *, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Route each row to the ``k`` memory vectors with the largest cosine similarity.

    The gate of the paper (Eq. 3): ``gates = softmax(top_k(cos(h, memory)) / temperature)``, where the softmax runs over
    the selected experts only.

    Args:
        h: rows to route, ``[B, D]``; float64, float32, bfloat16 or float16. ``B`` may be 0.
        memory: memory vectors, ``[E, D]``; float32 or float64. Their lengths do not matter. They get no gradient.
        k: experts per row, ``1 <= k <= E``.
        temperature: divides the cosines before the softmax; positive, and a normal number in the dtype of the gates
            (at least 1.2e-38 in float32).

    Returns:
        ``gates`` (each row sums to one), ``experts`` (int32, best first) and ``cosines``, each ``[B, k]``. Gates and
        cosines are float32 (float64 for float64 arguments). Ties go to the lower expert; cosines with memory vectors
        of one direction but different lengths may differ by rounding. A zero row has cosine 0 with every expert. ``h``
        gets a gradient through gates and cosines; the gradient of a zero row is zero.

    Raises:
        TypeError: a dtype that is not listed above.
        ValueError: shapes that do not match, tensors on different devices, or ``k`` or the temperature out of range.
    """
    if _onnx.is_exporting():
        _check(h, memory, k, temperature=temperature)
        return _onnx.cosine_topk(h, memory, k, temperature=temperature)
    try:
        return torch.ops.rbm.cosine_topk(h, memory, k, temperature=temperature)
    except RuntimeError:
        # C++ implementations can only raise RuntimeError, so repeat their checks here to raise the right class.
        _check(h, memory, k, temperature=temperature)
        raise


def check_routing(op: str, rows: str, h: Tensor, memory: Tensor, k: int, temperature: float) -> None:
    """Raise TypeError or ValueError unless ``h`` can be routed. Messages of operator ``op`` call it ``rows``."""
    checks.check_dtype(op, rows, h, checks.FLOATING)
    checks.check_dtype(op, "memory", memory, (torch.float32, torch.float64))
    checks.check_shape(op, rows, h, (None, None), "rows by features")
    checks.check_shape(op, "memory", memory, (None, h.shape[1]), f"experts by the features of {rows}")
    checks.check_top_k(op, k, memory.shape[0])
    checks.check_temperature(op, "temperature", temperature, checks.accumulation_dtype(h, memory))


def _check(h: Tensor, memory: Tensor, k: int, *, temperature: float = 1.0) -> None:
    check_routing("cosine_topk", "h", h, memory, k, temperature)


@implement_everywhere("cosine_topk")
def _eager(h: Tensor, memory: Tensor, k: int, *, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    _check(h, memory, k, temperature=temperature)
    return reference.cosine_topk(h, memory, k, temperature)


def _fake(h: Tensor, memory: Tensor, k: int, *, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    _check(h, memory, k, temperature=temperature)
    dtype = checks.accumulation_dtype(h, memory)
    shape = (h.shape[0], k)
    return h.new_empty(shape, dtype=dtype), h.new_empty(shape, dtype=torch.int32), h.new_empty(shape, dtype=dtype)


def kernels_serve(h: Tensor, memory: Tensor) -> bool:
    """Whether the Triton kernels compute this: no float64, and no more experts than fit in a tile."""
    return checks.accumulation_dtype(h, memory) == torch.float32 and memory.shape[0] <= 128


@implement_cuda("cosine_topk", _check)
def _cuda(h: Tensor, memory: Tensor, k: int, *, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    if not kernels_serve(h, memory):
        return _eager(h, memory, k, temperature=temperature)
    from rbm_kernels.ops.cosine_topk import launch

    return launch.cosine_topk(h, memory, k, temperature)


def _check_backward(grad_gates, grad_cosines, h, memory, gates, experts, cosines, *, temperature=1.0) -> None:
    op, why = "cosine_topk_backward", "one for each choice of each row"
    checks.check_shape(op, "gates", gates, (h.shape[0], None), why)
    check_routing(op, "h", h, memory, gates.shape[1], temperature)
    checks.check_dtype(op, "experts", experts, (torch.int32,))
    pairs = {"grad_gates": grad_gates, "grad_cosines": grad_cosines, "gates": gates, "cosines": cosines}
    for name, tensor in ({"experts": experts} | pairs).items():
        if tensor is not None:
            checks.check_shape(op, name, tensor, tuple(gates.shape), why)
    for name, tensor in pairs.items():
        if tensor is not None:
            checks.check_dtype(op, name, tensor, (torch.float32, torch.float64))


@implement_everywhere("cosine_topk_backward")
def _eager_backward(grad_gates, grad_cosines, h, memory, gates, experts, cosines, *, temperature=1.0) -> Tensor:
    return reference.backward(grad_gates, grad_cosines, h, memory, gates, experts, cosines, temperature).contiguous()


def _fake_backward(grad_gates, grad_cosines, h, memory, gates, experts, cosines, *, temperature=1.0) -> Tensor:
    return torch.empty_like(h, memory_format=torch.contiguous_format)


@implement_cuda("cosine_topk_backward", _check_backward)
def _cuda_backward(grad_gates, grad_cosines, h, memory, gates, experts, cosines, *, temperature=1.0) -> Tensor:
    if not kernels_serve(h, memory):
        return _eager_backward(grad_gates, grad_cosines, h, memory, gates, experts, cosines, temperature=temperature)
    from rbm_kernels.ops.cosine_topk import launch

    return launch.backward(grad_gates, grad_cosines, h, memory, gates, experts, cosines, temperature)


def _save(ctx, output, h, memory, k, *, temperature=1.0) -> None:
    gates, experts, cosines = output
    # Save a copy of the memory: its owner may move it in place before the backward pass.
    ctx.save_for_backward(h, memory.clone(), gates, experts, cosines)
    ctx.temperature = temperature
    ctx.mark_non_differentiable(experts)
    ctx.set_materialize_grads(False)


def _backward(ctx, saved, grad_gates, _grad_experts, grad_cosines):
    if grad_gates is None and grad_cosines is None:
        return None, None, None
    if torch.is_grad_enabled():
        h, memory, _, experts, _ = saved
        formula = partial(reference.gates_and_cosines, memory=memory, experts=experts, temperature=ctx.temperature)
        return *gradients_of(formula, (h,), (True,), (grad_gates, grad_cosines)), None, None
    grad_h = torch.ops.rbm.cosine_topk_backward(grad_gates, grad_cosines, *saved, temperature=ctx.temperature)
    return grad_h, None, None


def _formula(operate, h, memory, k, *, temperature=1.0) -> tuple[Tensor, Tensor, Tensor]:
    _, experts, _ = operate()
    gates, cosines = reference.gates_and_cosines(h, memory, experts, temperature)
    return gates, experts, cosines


implement_fake("cosine_topk", _fake)
implement_fake("cosine_topk_backward", _fake_backward)
implement_autograd("cosine_topk", _backward, _save, _formula)
refuse_derivative("cosine_topk_backward", "cosine_topk")
implement_vmap("cosine_topk", rows=("h",))
implement_vmap("cosine_topk_backward", rows=("grad_gates", "grad_cosines", "h", "gates", "experts", "cosines"))
