"""Routing and experts in one call compared with two operators, given the same folded weights: few rows."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.measure.shapes import PRECISIONS, Problem, Shape, Workload
from benchmarks.peers import MOST_GATHERED, by_topk, gathered, sorted_addmm
from rbm_kernels import cosine_topk, expert_matmul, routed_matmul
from rbm_kernels.ops.cosine_topk import reference as routing
from rbm_kernels.ops.expert_matmul import reference as matmul
from rbm_kernels.ops.routed_matmul import cost

ROWS = (1, 8, 64, 256)


@pytest.mark.parametrize("workload", [Workload(Shape(n), p) for n in ROWS for p in PRECISIONS], ids=str)
def test_routed_matmul(suite, workload: Workload):
    run = suite("routed_matmul", workload)
    shape = workload.shape
    problems = run.buffers(lambda: without_gradients(Problem.of(workload)), Problem.nbytes)

    def of(route, multiply):
        return lambda x, memory, *experts_of: multiply(x, *experts_of, *route(x, memory, shape.top_k)[:2])

    implementations = {
        "rbm": lambda x, memory, *experts_of: routed_matmul(x, memory, *experts_of, shape.top_k),
        "rbm two operators": of(cosine_topk, expert_matmul),
        "eager": of(by_topk, matmul.expert_matmul),
        "sorted": of(by_topk, sorted_addmm),
    }
    if run.seconds >= 0.5 and workload.precision == PRECISIONS[0] and run.may_compile:
        implementations["eager compiled"] = torch.compile(implementations["eager"], dynamic=False)
        if shape.rows <= MOST_GATHERED:
            implementations["gathered compiled"] = torch.compile(of(by_topk, gathered), dynamic=False)

    def step(f, p: Problem) -> Tensor:
        return f(p.x, p.memory, p.weight, p.bias)

    first = problems[0]
    wide = replace(first, **{n: getattr(first, n).double() for n in WIDENED})
    exact = step(of(routing.cosine_topk, matmul.expert_matmul), wide)
    with torch.inference_mode():
        right = run.check("forward", implementations, lambda f, p: (step(f, p),), first, (exact,))
        sizes = (shape.rows, shape.features, shape.outputs, shape.experts, shape.top_k, run.dtype)
        run.time("forward", right, step, problems, cost.forward(*sizes))


WIDENED = ("x", "memory", "weight", "bias")


def without_gradients(p: Problem) -> Problem:
    return replace(p, **{name: getattr(p, name).detach() for name in WIDENED})
