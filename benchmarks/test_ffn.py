"""Experts with two products and SwiGLU: ours, those of some libraries, and two dense linear layers.

``N`` of the shape is the hidden width. There are no biases, because not every library supports them.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from benchmarks.measure.device import HERE
from benchmarks.measure.shapes import CORA, DEVICE, MOST, PRECISIONS, Problem, Shape, Workload, for_this_machine
from benchmarks.peers import ffn_peers
from benchmarks.peers.ffn import cost_backward, cost_forward, dense_ffn, eager_ffn

# Three times the operations of an expert matmul, so a CPU only gets few rows, in float32.
SHAPES = (for_this_machine(MOST)[0], Shape(CORA)) if HERE.is_gpu else (Shape(CORA),)
WORKLOADS = [
    Workload(shape, precision)
    for shape in dict.fromkeys(SHAPES)
    for precision in (PRECISIONS if HERE.is_gpu else PRECISIONS[:1])
]
COMPARED = 4096  # result rows that are compared with float64; the weights' gradient is computed from all rows
# The same number of operations without routing: timed for comparison, but its results are not compared.
DENSE = {"torch.nn.Linear, k I": dense_ffn}
PART = 16_384  # rows that are multiplied in float64 at a time


@dataclass(frozen=True)
class FfnProblem:
    """The arguments of an FFN, and the gradient of its result."""

    x: Tensor
    up: Tensor
    down: Tensor
    gates: Tensor
    experts: Tensor
    grad: Tensor

    @classmethod
    def of(cls, workload: Workload) -> "FfnProblem":
        """New random tensors. All except the experts and the incoming gradient require a gradient."""
        shape, p = workload.shape, Problem.of(workload)

        def normal(*size: int) -> Tensor:
            scaled = torch.randn(size, device=DEVICE, dtype=p.x.dtype) * size[-1] ** -0.5
            return scaled.requires_grad_()

        up = normal(shape.experts, 2 * shape.outputs, shape.features)
        down = normal(shape.experts, shape.features, shape.outputs)
        return cls(p.x, up, down, p.gates, p.experts, torch.randn_like(p.x))

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors that get a gradient."""
        return self.x, self.gates, self.up, self.down

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in vars(self).values())


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_ffn(suite, workload: Workload):
    run = suite("ffn", workload)
    shape = workload.shape
    problems = run.buffers(lambda: FfnProblem.of(workload), FfnProblem.nbytes)
    implementations = ffn_peers(compiled=run.compiles)
    first = problems[0]
    some = torch.linspace(0, shape.rows - 1, min(shape.rows, COMPARED), device=first.x.device).long()

    def forward(f, p: FfnProblem) -> Tensor:
        return f(p.x, p.up, p.down, p.gates, p.experts)

    def forward_and_backward(f, p: FfnProblem) -> tuple[Tensor, ...]:
        y = forward(f, p)
        return y, *torch.autograd.grad(y, p.leaves, p.grad, allow_unused=True)

    def compared(f, p: FfnProblem) -> tuple[Tensor, ...]:
        y, grad_x, grad_gates, *weights = forward_and_backward(f, p)
        return y[some], grad_x[some], grad_gates[some], *weights

    exact = in_float64(first, some)
    sizes = (shape.rows, shape.features, shape.outputs, shape.experts, shape.top_k, run.dtype)
    with torch.no_grad():
        right = run.check("forward", implementations, lambda f, p: (forward(f, p)[some],), first, exact[:1])
        run.time("forward", right | DENSE, forward, problems, cost_forward(*sizes))
    right = run.check("forward + backward", right, compared, first, exact)
    both = cost_forward(*sizes) + cost_backward(*sizes)
    run.time("forward + backward", right | DENSE, forward_and_backward, problems, both)
    run.saved_bytes(right, forward, first, (first.experts, *first.leaves))


def in_float64(p: FfnProblem, some: Tensor) -> tuple[Tensor, ...]:
    """y, grad_x and grad_gates of some rows, and the weights' gradients from all rows, in several parts."""
    up, down = (t.detach().double().requires_grad_() for t in (p.up, p.down))
    parts, weights = [], None
    for start in range(0, p.x.shape[0], PART):
        rows = slice(start, start + PART)
        x, gates = (t[rows].detach().double().requires_grad_() for t in (p.x, p.gates))
        y = eager_ffn(x, up, down, gates, p.experts[rows])
        grad_x, grad_gates, *grads = torch.autograd.grad(y, (x, gates, up, down), p.grad[rows].double())
        parts.append((y.detach(), grad_x, grad_gates))
        weights = grads if weights is None else [a + b for a, b in zip(weights, grads, strict=True)]
    return *(torch.cat(part)[some] for part in zip(*parts, strict=True)), *weights
