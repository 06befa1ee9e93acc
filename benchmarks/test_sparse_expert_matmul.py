"""The experts over rows in compressed sparse form, compared with PyTorch's sparse matmul and with dense rows."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from benchmarks.measure.device import HERE
from benchmarks.measure.shapes import COAUTHOR_CS, CORA, DEVICE, PHYSICS, Problem, Shape, Workload, width
from rbm_kernels import expert_matmul, sparse_expert_matmul
from rbm_kernels.ops.sparse_expert_matmul import reference

# Cora, Coauthor-CS and Coauthor Physics, and the number of non-zero features per row.
ENTRIES = {Shape(CORA, width(1_433)): 18, Shape(COAUTHOR_CS, width(6_805)): 60, Shape(PHYSICS, width(8_415)): 33}
# Dense rows with more numbers than this would only show how slow they are.
DENSE = 20_000_000 if not HERE.is_gpu else 10**9


@dataclass(frozen=True)
class SparseProblem:
    """Rows in compressed form, the same rows in dense form if they are few, and the experts' other arguments."""

    rows: tuple[Tensor, Tensor, Tensor]
    dense: Tensor | None
    rest: Problem

    @classmethod
    def of(cls, shape: Shape) -> "SparseProblem":
        """Random entries, the same number in every row."""
        entries = ENTRIES[shape]
        crow = torch.arange(0, shape.rows * entries + 1, entries, dtype=torch.int32)
        # One entry from each of ``entries`` stripes: no feature twice, in ascending order, as in files.
        stripe = shape.features // entries
        col = torch.arange(entries) * stripe + torch.randint(stripe, (shape.rows, entries))
        values = torch.rand(shape.rows, entries)
        dense = None
        if shape.rows * shape.features <= DENSE:
            dense = torch.zeros(shape.rows, shape.features).scatter_(1, col, values).to(DEVICE)
        rows = tuple(part.flatten().to(DEVICE) for part in (crow, col.int(), values))
        narrow = Problem.of(Workload(Shape(shape.rows, 1, shape.outputs, shape.experts, shape.top_k), "float32"))
        weight = torch.randn(shape.experts, shape.outputs, shape.features, device=DEVICE, requires_grad=True)
        return cls(rows, dense, Problem(**{**vars(narrow), "weight": weight}))


@pytest.mark.parametrize("shape", ENTRIES, ids=str)
def test_sparse_expert_matmul(suite, shape: Shape):
    run = suite("sparse_expert_matmul", Workload(shape, "float32"))
    problem = SparseProblem.of(shape)
    implementations = {"rbm": sparse_expert_matmul, "eager": reference.sparse_expert_matmul}
    if problem.dense is not None:
        implementations["rbm dense"] = expert_matmul

    def forward(f, p: SparseProblem) -> Tensor:
        r = p.rest
        if f is expert_matmul:
            return f(p.dense, r.weight, r.bias, r.gates, r.experts)
        return f(*p.rows, r.weight, r.bias, None, r.gates, r.experts)

    def forward_and_backward(f, p: SparseProblem) -> tuple[Tensor, ...]:
        y = forward(f, p)
        return y, *torch.autograd.grad(y, [p.rest.gates, p.rest.weight, p.rest.bias], p.rest.grad)

    r = problem.rest
    crow, col, values = problem.rows
    leaves = [t.detach().double().requires_grad_() for t in (r.gates, r.weight, r.bias)]
    gates, weight, bias = leaves
    exact = reference.sparse_expert_matmul(crow, col, values.double(), weight, bias, None, gates, r.experts)
    grads = torch.autograd.grad(exact, leaves, r.grad.double())
    with torch.no_grad():
        right = run.check("forward", implementations, lambda f, p: (forward(f, p),), problem, (exact,))
        run.time("forward", right, forward, [problem])
    right = run.check("forward + backward", right, forward_and_backward, problem, (exact, *grads))
    run.time("forward + backward", right, forward_and_backward, [problem])
    given = [*problem.rows, r.gates, r.weight, r.bias, r.experts]
    run.saved_bytes(right, forward, problem, given if problem.dense is None else [*given, problem.dense])
