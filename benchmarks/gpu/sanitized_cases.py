"""Every operator in a few cases: ``python -m benchmarks.gpu.sanitized_cases [NAME...]``.

The small cases are for compute-sanitizer; together with those of many rows they are the smoke test of ``gpu.sh``. NAME
is the beginning of a case: ``memory_update`` runs both cases of that operator; without names all small cases run. Each
case is compared with the operator on the CPU; the status is 1 if one is wrong.
"""

import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.gpu.devices import two_devices
from benchmarks.measure.device import HERE, REHEARSES
from benchmarks.measure.harness import relative_error
from benchmarks.measure.precision import multiplying_as
from benchmarks.measure.shapes import Problem, Shape, Workload, batch, width
from rbm import FusedRbMLayer
from rbm_kernels import (
    cosine_topk,
    expert_matmul,
    expert_order,
    fold_experts,
    memory_statistics,
    memory_update_,
    routed_matmul,
)

# The norm of the difference over the norm of the result: two roundings of bfloat16, or of TensorFloat-32. Float32 that
# is multiplied as TensorFloat-32 errs by 3e-4.
ALLOWED = {"bfloat16": 2e-2, "tf32": 2e-3, "float32": 1e-4}
# Odd widths, tiles that are not full, more experts than a tile lists at once.
EVEN, ODD, MANY = Shape(200, 64, 48, 8, 3), Shape(77, 33, 47, 5, 2), Shape(130, 32, 32, 64, 8)


def route(p: Problem, shape: Shape) -> tuple[Tensor, ...]:
    """Routing and its gradient."""
    gates, _, cosines = cosine_topk(p.x, p.memory, shape.top_k)
    return gates, cosines, *torch.autograd.grad([gates, cosines], p.x, [p.gates.detach(), torch.ones_like(cosines)])


def order(p: Problem, shape: Shape) -> tuple[Tensor, ...]:
    """Rows in the order of their experts."""
    return expert_order(p.experts, shape.experts, 128)[:3]


def multiply(p: Problem, shape: Shape) -> tuple[Tensor, ...]:
    """The experts and all their gradients."""
    y = expert_matmul(p.x, p.weight, p.bias, p.gates, p.experts)
    return y, *torch.autograd.grad(y, p.leaves, p.grad)


def serve(p: Problem, shape: Shape) -> tuple[Tensor, ...]:
    """Routing and experts in one."""
    with torch.inference_mode():
        return (routed_matmul(p.x, p.memory, p.weight, p.bias, shape.top_k),)


def update(p: Problem, shape: Shape) -> tuple[Tensor, ...]:
    """Sums over each expert's rows, and the updated memory."""
    with torch.no_grad():
        sums, total = memory_statistics(p.x, p.gates, p.experts, shape.experts)
        memory = p.memory.clone()
        memory_update_(memory, sums, total, 0.9)
    return sums, total, memory


def fold(p: Problem, shape: Shape) -> tuple[Tensor, ...]:
    """Attention and scale in the weights, and the gradients of all four; the attention is the problem's memory."""
    attention = p.memory.to(p.weight.dtype).requires_grad_()
    leaves = (p.weight, p.bias, attention, attention.detach()[:1, 0].clone().requires_grad_())
    folded = fold_experts(*leaves)
    return *folded, *torch.autograd.grad(folded, leaves, (p.weight.detach(), p.bias.detach()))


def train(p: Problem, shape: Shape) -> tuple[Tensor, ...]:
    """A layer's training forward, which moves the memory, and its backward; the parameters are the problem's."""
    sizes = (shape.features, shape.outputs, shape.experts, shape.top_k)
    layer = FusedRbMLayer(*sizes, device=p.x.device, dtype=p.x.dtype)
    with torch.no_grad():
        for name, value in (("weight", p.weight), ("bias", p.bias), ("memory", p.memory)):
            getattr(layer, name).copy_(value)
    y = layer(p.x)
    grads = torch.autograd.grad(y, [p.x, layer.weight, layer.bias, layer.attention], p.grad)
    return y.detach(), *grads, layer.memory


Case = tuple[Callable[[Problem, Shape], tuple[Tensor, ...]], Shape, str]
CASES: dict[str, Case] = {
    "cosine_topk, bfloat16": (route, EVEN, "bfloat16"),
    "cosine_topk, odd, float32": (route, ODD, "float32"),
    "expert_order": (order, MANY, "float32"),
    "expert_matmul, bfloat16": (multiply, EVEN, "bfloat16"),
    "expert_matmul, odd, float32": (multiply, ODD, "float32"),
    "expert_matmul, 64 experts, bfloat16": (multiply, MANY, "bfloat16"),
    "routed_matmul, odd, float32": (serve, Shape(3, 33, 47, 5, 2), "float32"),
    "memory_update, bfloat16": (update, EVEN, "bfloat16"),
    "memory_update, odd, float32": (update, ODD, "float32"),
    "fold_experts, bfloat16": (fold, EVEN, "bfloat16"),
    "fold_experts, odd, float32": (fold, ODD, "float32"),
    "layer, bfloat16": (train, EVEN, "bfloat16"),
}

# Code paths that need many rows: an order by digits, tiles of 128 rows, several tiles per program, several passes. Too
# slow for compute-sanitizer.
ROWS = batch(20_000)
ROOM = Shape(ROWS, width(128), width(128))
MANY_ROWS: dict[str, Case] = {
    "many rows: cosine_topk, bfloat16": (route, replace(ROOM, features=width(256)), "bfloat16"),
    "many rows: expert_order": (order, ROOM, "float32"),
    "many rows: expert_matmul, bfloat16": (multiply, replace(ROOM, features=width(256)), "bfloat16"),
    "many rows: expert_matmul, tf32": (multiply, ROOM, "tf32"),
    "many rows: expert_matmul, float32": (multiply, ROOM, "float32"),
    "many rows: expert_matmul, odd, bfloat16": (multiply, replace(ROOM, features=width(133)), "bfloat16"),
    "many rows: expert_matmul, 64 experts, bfloat16": (multiply, replace(ROOM, experts=64), "bfloat16"),
    "many rows: memory_update, bfloat16": (update, replace(ROOM, features=width(256)), "bfloat16"),
    "many rows: layer, bfloat16": (train, ROOM, "bfloat16"),
}


def main(wanted: Iterable[str]) -> int:
    """Run the cases whose names have these beginnings, or all small ones; return 1 if any was wrong, else 0."""
    all_cases = CASES | MANY_ROWS
    chosen = [name for name in all_cases if name.startswith(tuple(wanted))] if wanted else list(CASES)
    if not chosen:
        print(f"no case begins with {' or '.join(wanted)}; there are {'; '.join(all_cases)}", file=sys.stderr)
        return 2
    wrong = 0
    with two_devices() if REHEARSES else nullcontext():
        for name in chosen:
            torch.manual_seed(0)
            error, allowed = _error(*all_cases[name])
            wrong += not error <= allowed
            print(f"{name}: error {error:.1e}, allowed {allowed:.0e}", flush=True)
    return min(wrong, 1)


def _error(run: Callable, shape: Shape, precision: str) -> tuple[float, float]:
    there = Problem.of(Workload(shape, precision))
    here = Problem(**{name: _to_host(tensor) for name, tensor in vars(there).items()})
    with multiplying_as(precision):
        got = [tensor.cpu() for tensor in run(there, shape)]
    HERE.synchronize()
    is_exact = not got[0].is_floating_point()
    return relative_error(got, run(here, shape)), 0.0 if is_exact else ALLOWED[precision]


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().requires_grad_(tensor.requires_grad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
