"""Checks launches on any machine, and times them on a GPU."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from benchmarks.compiled.cases import Case, Tensors
from benchmarks.measure.device import HERE, Device
from benchmarks.measure.harness import buffer_sets, interleave, relative_error
from benchmarks.measure.precision import multiplying_as
from rbm_kernels.ops.cosine_topk import reference as cosine_topk
from rbm_kernels.ops.expert_matmul import reference as expert_matmul
from rbm_kernels.ops.memory_update import reference as memory_update
from rbm_kernels.ops.routed_matmul import reference as routed_matmul

Call = Callable[[], object]
# Takes the calls of each candidate, one per set of tensors; returns each candidate's microseconds per call.
Clock = Callable[[Sequence[Sequence[Call]]], list[float]]


def reference(case: Case, label: str, t: Tensors) -> tuple[Tensor, ...]:
    """Floating-point outputs of a launch of :mod:`benchmarks.compiled.cases`, computed in eager PyTorch."""
    layer = (t.x, t.weight, t.bias, t.gates, t.experts)
    match label:
        case "gates, experts, cosines":
            gates, _, cosines = cosine_topk.cosine_topk(t.x, t.memory, case.top_k)
            return gates, cosines
        case "grad_h":
            grad = torch.ones_like(t.gates)
            return (cosine_topk.backward(grad, grad, t.x, t.memory, t.gates, t.experts, t.cosines),)
        case "y" if case.operator == "routed_matmul":
            return (routed_matmul.routed_matmul(t.x, t.memory, t.weight, t.bias, case.top_k),)
        case "weighted_sum, total":
            return memory_update.memory_statistics(t.x, t.gates, t.experts, case.num_experts)
        case "y":
            return (expert_matmul.expert_matmul(*layer),)
        case "grad_x, grad_gates":
            return expert_matmul.backward_input(t.grad, *layer)
        case "grad_weight, grad_bias":
            return expert_matmul.backward_weight(t.grad, t.x, t.gates, t.experts, case.num_experts)
    raise ValueError(f"label is {label!r}, which has no reference here")


def disagreement(case: Case, label: str, tensors: Tensors, calls: Iterable[Call]) -> Iterable[float]:
    """For each call on ``tensors``, its error against float64, as a multiple of the allowed error.

    The error is the norm of the difference over the norm of the result. Twice the error of eager PyTorch in the case's
    own precision is allowed, plus one in a million. Elements that a call does not write are NaN, and so is its error.
    """
    exact = reference(case, label, _in_float64(tensors))
    with multiplying_as(case.precision):
        eager = relative_error(reference(case, label, tensors), exact)
    before = torch.are_deterministic_algorithms_enabled()
    # This setting makes PyTorch fill new tensors with NaN.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for call in calls:
            got = call()
            outputs = [x for x in (got if isinstance(got, tuple) else (got,)) if x.is_floating_point()]
            yield relative_error(outputs, exact) / (2 * eager + 1e-6)
    finally:
        torch.use_deterministic_algorithms(before)


def _in_float64(tensors: Tensors) -> Tensors:
    named = {field.name: getattr(tensors, field.name) for field in fields(tensors)}
    return Tensors(**{name: x.double() if x.is_floating_point() else x for name, x in named.items()})


def sets_beyond_the_cache(case: Case, device: Device = HERE) -> int:
    """Number of sets of tensors to use in turn, so that no launch finds its own rows in the L2 cache."""
    if not device.is_gpu:
        return 1
    return max(2, buffer_sets(Tensors.of(case, "meta").x.nbytes, device))


def cuda_clock(candidates: Sequence[Sequence[Call]]) -> list[float]:
    """Microseconds per call: medians over rounds in which the candidates alternate, each as a CUDA graph."""
    timings = interleave(dict(enumerate(candidates)), seconds=0, least=40, graphs=True)
    return [1e6 * timings[place].median for place in range(len(candidates))]
