"""The memory update compared with its eager reference, as it is and compiled."""

import pytest
import torch
from torch import Tensor

from benchmarks.measure.shapes import PRECISIONS, Problem, Workload, workloads
from rbm_kernels import memory_statistics, memory_update_
from rbm_kernels.ops.memory_update import cost, reference

# The precision of float32 products makes no difference here.
DTYPES = tuple(precision for precision in PRECISIONS if precision != "tf32")


@pytest.mark.parametrize("workload", workloads(DTYPES), ids=str)
def test_memory_statistics(suite, workload: Workload):
    run = suite("memory_statistics", workload)
    shape = workload.shape
    problems = run.buffers(lambda: Problem.of(workload), Problem.nbytes)
    implementations = {"rbm": memory_statistics, "eager": reference.memory_statistics}
    if run.compiles:
        implementations["eager compiled"] = torch.compile(reference.memory_statistics, dynamic=False)

    def step(f, p: Problem) -> tuple[Tensor, Tensor]:
        return f(p.x, p.gates, p.experts, shape.experts)

    first = problems[0]
    with torch.no_grad():
        exact = reference.memory_statistics(first.x.double(), first.gates.double(), first.experts, shape.experts)
        right = run.check("forward", implementations, step, first, exact)
        sizes = (shape.rows, shape.features, shape.experts, shape.top_k, run.dtype)
        run.time("forward", right, step, problems, cost.statistics(*sizes))


@pytest.mark.parametrize("workload", workloads(("float32",), ("uniform",))[:1], ids=str)
def test_memory_update(suite, workload: Workload):
    run = suite("memory_update_", workload)
    problems = run.buffers(lambda: Problem.of(workload), Problem.nbytes)
    total = torch.ones(workload.shape.experts, device=problems[0].x.device)
    implementations = {"rbm": memory_update_, "eager": reference.memory_update_}

    def step(f, p: Problem) -> None:
        f(p.memory, p.weight[:, 0], total, 0.9)

    def moved(f, p: Problem) -> tuple[Tensor]:
        memory = p.memory.clone()
        f(memory, p.weight[:, 0], total, 0.9)
        return (memory,)

    with torch.no_grad():
        first, shape = problems[0], workload.shape
        exact = first.memory.double()
        reference.memory_update_(exact, first.weight[:, 0].double(), total.double(), 0.9)
        right = run.check("forward", implementations, moved, first, (exact,))
        run.time("forward", right, step, problems, cost.update(shape.features, shape.experts, run.dtype))
