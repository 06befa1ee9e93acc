"""Ordering rows by their sets of experts, compared with the sort of (row, expert) pairs that other libraries need."""

import pytest
import torch
from torch import Tensor

from benchmarks.measure.shapes import DEVICE, Shape, Workload, route, workloads
from rbm_kernels import expert_order
from rbm_kernels.ops.expert_order import cost, reference

TILE = 128


def distinct() -> list[Workload]:
    """The first workload for each combination of rows, experts and choices; nothing else matters here."""
    key = {(w.shape.rows, w.shape.experts, w.shape.top_k, w.routing): w for w in reversed(workloads(("int32",)))}
    return list(reversed(key.values()))


@pytest.mark.parametrize("workload", distinct(), ids=str)
def test_expert_order(suite, workload: Workload):
    run = suite("expert_order", workload)
    shape: Shape = workload.shape
    problems = run.buffers(lambda: route(workload.routing, shape, DEVICE), lambda experts: experts.nbytes)
    ours = {"rbm": expert_order, "eager": reference.expert_order}
    if run.compiles:
        ours["eager compiled"] = torch.compile(reference.expert_order)

    def step(f, experts: Tensor) -> tuple[Tensor, ...]:
        return f(experts, shape.experts, TILE)[:3]

    def sorted_experts(f, experts: Tensor) -> tuple[Tensor, ...]:
        return experts.flatten()[f(experts, shape.experts)[0]], f(experts, shape.experts)[1]

    first = problems[0]
    by_expert = first.flatten().sort().values, torch.bincount(first.flatten(), minlength=shape.experts).cumsum(0)
    with torch.no_grad():
        right = run.check("forward", ours, step, first, reference.expert_order(first, shape.experts, TILE))
        pairs = run.check("forward", {"sort of pairs": sort_pairs}, sorted_experts, first, by_expert)
        sizes = (shape.rows, shape.experts, shape.top_k, TILE)
        run.time("forward", {**right, **pairs}, lambda f, e: f(e, shape.experts, TILE), problems, cost.forward(*sizes))


def sort_pairs(experts: Tensor, num_experts: int, _: int = TILE) -> tuple[Tensor, Tensor]:
    """Indices of the pairs sorted by expert, and the end of each expert's range."""
    flat = experts.flatten()
    return flat.argsort(stable=True), torch.bincount(flat, minlength=num_experts).cumsum(0)
