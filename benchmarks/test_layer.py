"""The layer on the CPU against the eager reference and against the strongest simple alternative, by batch size."""

import pytest
import torch

from benchmarks.harness import Results
from benchmarks.peers import SortedRbMLayer
from rbm import FusedRbMLayer
from rbm.reference import ReferenceRbMLayer

FEATURES, EXPERTS, TOP_K = 256, 8, 3
LAYERS = {"rbm": FusedRbMLayer, "eager": ReferenceRbMLayer, "sorted": SortedRbMLayer}


def make_layers() -> dict[str, torch.nn.Module]:
    """One set of parameters in every implementation."""
    torch.manual_seed(0)
    layers = {name: layer(FEATURES, FEATURES, EXPERTS, TOP_K) for name, layer in LAYERS.items()}
    for layer in layers.values():
        layer.load_state_dict(layers["rbm"].state_dict())
    return layers


def shape_of(rows: int) -> str:
    return f"B={rows} D={FEATURES} N={FEATURES} E={EXPERTS} k={TOP_K}"


@pytest.mark.parametrize("rows", [1, 8, 64, 4096, 65536])
def test_layer_forward(benchmark, compare, results: Results, rows: int):
    x = torch.randn(rows, FEATURES)
    layers = {name: layer.eval() for name, layer in make_layers().items()}
    with torch.inference_mode():
        expected = layers["eager"].double()(x.double()).float()
        layers["eager"].float()
        for layer in layers.values():
            torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
        timings = compare({name: lambda layer=layer: layer(x) for name, layer in layers.items()})
        weight = torch.randn(FEATURES, FEATURES)
        timings["torch.mm"] = compare({"mm": lambda: torch.mm(x, weight)})["mm"]
        benchmark(layers["rbm"], x)
    for name, timing in timings.items():
        results.add("layer forward", shape_of(rows), name, "seconds", timing)
    products = {"rbm": TOP_K, "torch.mm": 1}
    for name, count in products.items():
        flops = 2 * rows * count * FEATURES * FEATURES
        results.add("layer forward", shape_of(rows), name, "GFLOP/s", flops / timings[name].median / 1e9)


@pytest.mark.parametrize("rows", [4096, 65536])
def test_layer_forward_backward(benchmark, compare, results: Results, rows: int):
    layers = {name: layer.train() for name, layer in make_layers().items()}
    x = torch.randn(rows, FEATURES, requires_grad=True)
    grad = torch.randn(rows, FEATURES)

    def step(layer: torch.nn.Module) -> torch.Tensor:
        layer.zero_grad()
        x.grad = None
        layer(x).backward(grad)
        return x.grad

    expected = step(layers["eager"])
    for name, layer in layers.items():
        if name != "eager":
            torch.testing.assert_close(step(layer), expected, rtol=1e-3, atol=1e-3)
    timings = compare({name: lambda layer=layer: step(layer) for name, layer in layers.items()})
    benchmark(step, layers["rbm"])
    for name, timing in timings.items():
        results.add("layer forward + backward", shape_of(rows), name, "seconds", timing)
