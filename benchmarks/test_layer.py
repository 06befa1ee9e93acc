"""The layer compared with eager and compiled PyTorch, the released code and sorted experts, by batch size."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor

from benchmarks.measure.device import HERE
from benchmarks.measure.shapes import (
    COAUTHOR_CS,
    CORA,
    DEVICE,
    MANY_EXPERTS,
    PRECISIONS,
    REFERENCE,
    Problem,
    Shape,
    Workload,
)
from benchmarks.measure.suite import Suite
from benchmarks.peers import SortedRbMLayer, SplitRbMLayer, TunedRbMLayer
from rbm import FusedRbMLayer
from rbm.nn.reference import ReferenceRbMLayer
from rbm_kernels.ops.expert_matmul import cost

ROWS = (1, 8, 64, 4096, 65536) if not HERE.is_gpu else (REFERENCE.rows, 1, 64, CORA, COAUTHOR_CS)
LAYERS = {"rbm": FusedRbMLayer, "eager": ReferenceRbMLayer, "split": SplitRbMLayer, "sorted": SortedRbMLayer}
WORKLOADS = [Workload(Shape(rows), precision) for rows in ROWS for precision in PRECISIONS if precision != "float16"]
TRAINING = [workload for workload in WORKLOADS if workload.shape.rows >= CORA]
TRAINING += [Workload(shape, p) for shape in MANY_EXPERTS for p in PRECISIONS if p != "float16" and not HERE.is_gpu]

# With more rows a whole step takes seconds on a CPU, and adds nothing to the results of forward and backward.
LONG = 4096


def make_layers(run: Suite, memory: Tensor, *, training: bool) -> dict[str, torch.nn.Module]:
    """One set of parameters in every implementation."""
    shape, compiles = run.workload.shape, run.compiles
    sizes = (shape.features, shape.outputs, shape.experts, shape.top_k)
    layers = {name: layer(*sizes, device=DEVICE, dtype=run.dtype) for name, layer in LAYERS.items()}
    if compiles and not training:
        layers["tuned compiled"] = TunedRbMLayer(*sizes, device=DEVICE, dtype=run.dtype)
    layers["rbm"].memory.copy_(memory)
    for layer in layers.values():
        layer.load_state_dict(layers["rbm"].state_dict())
        layer.train(training)
    if compiles:
        layers["eager compiled"] = torch.compile(deepcopy(layers["eager"]), dynamic=False)
    return layers


def in_float64(layer: torch.nn.Module) -> torch.nn.Module:
    return deepcopy(layer).double()


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_layer_forward(suite, workload: Workload):
    run = suite("layer", workload)
    shape = workload.shape
    problems = run.buffers(lambda: Problem.of(workload), Problem.nbytes)
    memory = problems[0].memory
    layers = make_layers(run, memory, training=False)

    def step(layer: torch.nn.Module, p: Problem) -> Tensor:
        return layer(p.x)

    with torch.inference_mode():
        exact = in_float64(layers["eager"])(problems[0].x.double())
        right = run.check("forward", layers, lambda layer, p: (step(layer, p),), problems[0], (exact,))
        sizes = (shape.rows, shape.features, shape.outputs, shape.experts, shape.top_k, run.dtype)
        run.time("forward", right, step, problems, cost.forward(*sizes))


@pytest.mark.parametrize("workload", TRAINING, ids=str)
def test_layer_training(suite, workload: Workload):
    run = suite("layer", workload)
    problems = run.buffers(lambda: Problem.of(workload), Problem.nbytes)
    layers = make_layers(run, problems[0].memory, training=True)

    def forward_and_backward(layer: torch.nn.Module, p: Problem) -> tuple[Tensor, ...]:
        y = layer(p.x)
        return y, *torch.autograd.grad(y, [p.x, layer.weight, layer.bias, layer.attention], p.grad)

    first = problems[0]
    exact = forward_and_backward(in_float64(layers["eager"]), first.in_float64())
    # On copies, because a training forward moves the memory.
    right = run.check(
        "forward + backward", layers, lambda layer, p: forward_and_backward(copied(layer), p), first, exact
    )
    run.time("forward + backward", right, forward_and_backward, problems)
    run.saved_bytes(right, lambda layer, p: layer(p.x), first, [first.x, *layers["rbm"].parameters()])

    if not HERE.is_gpu and workload.shape.rows > LONG:
        return
    steps = {name: optimised(layer) for name, layer in right.items()}
    run.time("training step", steps, lambda step, p: step(p), problems)


def copied(layer: torch.nn.Module) -> torch.nn.Module:
    """A copy of the layer with the same state; a compiled layer is compiled again, from the cache."""
    if hasattr(layer, "_orig_mod"):
        return torch.compile(deepcopy(layer._orig_mod), dynamic=False)
    return deepcopy(layer)


def optimised(layer: torch.nn.Module) -> Callable[[Problem], None]:
    """A whole step: forward, backward, Adam, and the memory update, which is part of this or the next forward."""
    adam = torch.optim.Adam(layer.parameters(), lr=1e-5, capturable=DEVICE == "cuda", foreach=True)

    def step(p: Problem) -> None:
        layer(p.x).backward(p.grad)
        adam.step()
        # Keep the gradient tensors and set them to zero, so that a CUDA graph finds them where it captured them.
        adam.zero_grad(set_to_none=False)

    return step
