"""Routing compared with eager and compiled PyTorch."""

import pytest
import torch
from torch import Tensor

from benchmarks.measure.shapes import ROUTERS, Problem, Workload, workloads
from benchmarks.peers import by_topk
from rbm_kernels import cosine_topk
from rbm_kernels.ops.cosine_topk import cost, reference

WORKLOADS = [*workloads(routings=("uniform",)), *map(Workload, ROUTERS)]


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_cosine_topk(suite, workload: Workload):
    run = suite("cosine_topk", workload)
    shape = workload.shape
    problems = run.buffers(lambda: Problem.of(workload), Problem.nbytes)
    implementations = {"rbm": cosine_topk, "eager": reference.cosine_topk, "topk": by_topk}
    if run.compiles:
        implementations |= {
            "eager compiled": torch.compile(reference.cosine_topk),
            "topk compiled": torch.compile(by_topk),
        }

    def forward(f, p: Problem) -> tuple[Tensor, ...]:
        return f(p.x, p.memory, shape.top_k)

    def forward_and_backward(f, p: Problem) -> tuple[Tensor, ...]:
        gates, _, cosines = forward(f, p)
        # The gates have a gradient of their own, as from losses on routing and layers with attached gates.
        return gates, *torch.autograd.grad([gates, cosines], p.x, [p.gates.detach(), torch.ones_like(cosines)])

    def values(f, p: Problem) -> tuple[Tensor, ...]:
        gates, experts, cosines = forward(f, p)
        return gates, cosines, all_cosines.gather(1, experts.long())

    first = problems[0]
    wide, memory = first.x.detach().double(), first.memory.double()
    all_cosines = torch.nn.functional.normalize(wide, dim=-1) @ torch.nn.functional.normalize(memory, dim=-1).T
    gates, experts, cosines = reference.cosine_topk(wide, memory, shape.top_k)
    ones = torch.ones_like(cosines)
    grad = reference.backward(first.gates.detach().double(), ones, wide, memory, gates, experts, cosines)
    sizes = (shape.rows, shape.features, shape.experts, shape.top_k, run.dtype)

    with torch.no_grad():
        right = run.check("forward", implementations, values, first, (gates, cosines, cosines))
        run.time("forward", right, forward, problems, cost.forward(*sizes))
    both = cost.forward(*sizes) + cost.backward(*sizes)
    right = run.check("forward + backward", right, forward_and_backward, first, (gates, grad))
    run.time("forward + backward", right, forward_and_backward, problems, both)
    run.saved_bytes(right, forward, first, (first.x, first.memory))
