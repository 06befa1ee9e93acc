"""Attention and scale multiplied into the experts' weights, compared with eager and compiled PyTorch.

The number of rows makes no difference, so it is one.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from benchmarks.measure.device import HERE
from benchmarks.measure.shapes import DEVICE, PRECISIONS, Shape, Workload, width
from rbm_kernels import fold_experts
from rbm_kernels.ops.fold_experts import cost, reference

SHAPES = (Shape(1), Shape(1, width(1_433)), Shape(1, width(1_024), width(1_024)), Shape(1, experts=64))
# The precision of float32 products makes no difference here.
DTYPES = [precision for precision in PRECISIONS if precision in ("bfloat16", "float32")]
WORKLOADS = [Workload(shape, p) for shape in SHAPES for p in (DTYPES if HERE.is_gpu else DTYPES[:1])]


@dataclass(frozen=True)
class Parameters:
    """A layer's parameters, and gradients of their folded weight and bias."""

    weight: Tensor
    bias: Tensor
    attention: Tensor
    log_scale: Tensor
    grad_weight: Tensor
    grad_bias: Tensor

    @classmethod
    def of(cls, shape: Shape, dtype: torch.dtype) -> "Parameters":
        def normal(*size: int) -> Tensor:
            return torch.randn(size, device=DEVICE, dtype=dtype)

        weights, biases = (shape.experts, shape.outputs, shape.features), (shape.experts, shape.outputs)
        leaves = (normal(*weights), normal(*biases), normal(shape.experts, shape.features), normal(1))
        return cls(*(leaf.requires_grad_() for leaf in leaves), normal(*weights), normal(*biases))

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.weight, self.bias, self.attention, self.log_scale

    @property
    def grads(self) -> tuple[Tensor, Tensor]:
        return self.grad_weight, self.grad_bias

    def in_float64(self) -> "Parameters":
        leaves = (leaf.detach().double().requires_grad_() for leaf in self.leaves)
        return Parameters(*leaves, *(grad.double() for grad in self.grads))

    def nbytes(self) -> int:
        return 2 * sum(leaf.nbytes for leaf in self.leaves)


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_fold_experts(suite, workload: Workload):
    run = suite("fold_experts", workload)
    shape = workload.shape
    problems = run.buffers(lambda: Parameters.of(shape, run.dtype), Parameters.nbytes)
    implementations = {"rbm": fold_experts, "eager": reference.fold_experts}
    if run.compiles:
        implementations["eager compiled"] = torch.compile(reference.fold_experts, dynamic=False)

    def forward(f, p: Parameters) -> tuple[Tensor, ...]:
        return f(*p.leaves)

    def forward_and_backward(f, p: Parameters) -> tuple[Tensor, ...]:
        folded = forward(f, p)
        return *folded, *torch.autograd.grad(folded, p.leaves, p.grads)

    first, sizes = problems[0], (shape.features, shape.outputs, shape.experts, run.dtype)
    exact = first.in_float64()
    with torch.no_grad():
        right = run.check("forward", implementations, forward, first, forward(reference.fold_experts, exact))
        run.time("forward", right, forward, problems, cost.forward(*sizes))
    truth = forward_and_backward(reference.fold_experts, exact)
    right = run.check("forward + backward", right, forward_and_backward, first, truth)
    run.time("forward + backward", right, forward_and_backward, problems, cost.forward(*sizes) + cost.backward(*sizes))
    run.saved_bytes(right, forward, first, first.leaves)
