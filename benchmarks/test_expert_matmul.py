"""The experts compared with their alternatives, given the same gates."""

import pytest
import torch
from torch import Tensor

from benchmarks.measure.device import HERE
from benchmarks.measure.shapes import LARGE, PRECISIONS, Problem, Workload, workloads
from benchmarks.peers import by_topk, peers
from rbm_kernels import cosine_topk, expert_matmul
from rbm_kernels.ops.cosine_topk import cost as cosine_topk_cost
from rbm_kernels.ops.cosine_topk import reference as routing
from rbm_kernels.ops.expert_matmul import cost, reference

# Experts as large as a language model's on a CPU only, because a lease of a GPU is short.
WORKLOADS = workloads() + [Workload(shape, p) for shape in LARGE for p in PRECISIONS if not HERE.is_gpu]
COMPARED = 4096  # result rows that are compared with float64; the weights' gradient is computed from all rows


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_expert_matmul(suite, workload: Workload):
    run = suite("expert_matmul", workload)
    shape = workload.shape
    problems = run.buffers(lambda: Problem.of(workload), Problem.nbytes)
    implementations = {"rbm": expert_matmul, **peers(run.dtype, compiled=run.compiles)}
    routers = dict.fromkeys(implementations.values(), by_topk) | {expert_matmul: cosine_topk}
    routers |= {f: torch.compile(by_topk) for name, f in implementations.items() if "compiled" in name}

    def forward(f, p: Problem) -> Tensor:
        return f(p.x, p.weight, p.bias, p.gates, p.experts)

    def route_and_forward(f, p: Problem) -> Tensor:
        return f(p.x, p.weight, p.bias, *routers[f](p.x, p.memory, shape.top_k)[:2])

    def forward_and_backward(f, p: Problem) -> tuple[Tensor, ...]:
        y = forward(f, p)
        return y, *torch.autograd.grad(y, p.leaves, p.grad)

    sizes = (shape.rows, shape.features, shape.outputs, shape.experts, shape.top_k, run.dtype)
    experts_cost = cost.forward(*sizes)
    routing_cost = cosine_topk_cost.forward(shape.rows, shape.features, shape.experts, shape.top_k, run.dtype)
    some = torch.linspace(0, shape.rows - 1, min(shape.rows, COMPARED), device=problems[0].x.device).long()

    def compared(step, *per_row: int):
        """A step of which only this many result rows are compared."""

        def outcome(f, p: Problem) -> tuple[Tensor, ...]:
            got = step(f, p)
            got = got if isinstance(got, tuple) else (got,)
            return tuple(t[some] if place in per_row else t for place, t in enumerate(got))

        return outcome

    with torch.no_grad():
        exact = in_float64(problems[0], some)
        routed = routing.cosine_topk(problems[0].x[some].double(), problems[0].memory.double(), shape.top_k)
        exact_routed = reference.expert_matmul(*wide(problems[0], some)[:3], *routed[:2])
        right = run.check("forward", implementations, compared(forward, 0), problems[0], exact[:1])
        run.time("forward", right, forward, problems, experts_cost)
        right = run.check("route + forward", right, compared(route_and_forward, 0), problems[0], [exact_routed])
        run.time("route + forward", right, route_and_forward, problems, experts_cost + routing_cost)

    right = run.check("forward + backward", right, compared(forward_and_backward, 0, 1, 2), problems[0], exact)
    run.time("forward + backward", right, forward_and_backward, problems, experts_cost + cost.backward(*sizes))
    run.saved_bytes(right, forward, problems[0], (problems[0].experts, *problems[0].leaves))


def wide(p: Problem, rows: Tensor | slice) -> tuple[Tensor, ...]:
    """x, weight, bias, gates and experts of some rows in float64."""
    return p.x[rows].double(), p.weight.double(), p.bias.double(), p.gates[rows].double(), p.experts[rows]


def in_float64(p: Problem, some: Tensor) -> tuple[Tensor, ...]:
    """y, grad_x and grad_gates of some rows, and the weights' gradients from all rows, in several parts."""
    layer, grad = wide(p, some), p.grad[some].double()
    grads = None
    for start in range(0, p.x.shape[0], 65_536):
        rows = slice(start, start + 65_536)
        x, _, _, gates, experts = wide(p, rows)
        part = reference.backward_weight(p.grad[rows].double(), x, gates, experts, p.weight.shape[0])
        grads = part if grads is None else tuple(a + b for a, b in zip(grads, part, strict=True))
    return reference.expert_matmul(*layer), *reference.backward_input(grad, *layer), *grads
