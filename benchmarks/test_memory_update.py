"""The memory update against its eager reference; ``--benchmark-group-by=param:shape`` sets the two side by side."""

import pytest
import torch

from rbm_kernels import memory_statistics, memory_update_
from rbm_kernels.memory_update import reference

# (B, D, E, k): Cora's first layer, Coauthor-CS's hidden layer, one large batch.
SHAPES = {"cora": (2708, 1433, 8, 3), "cs-hidden": (18333, 256, 8, 3), "batch-64k": (65536, 256, 8, 3)}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def make(shape, dtype, device):
    b, d, e, k = shape
    h = torch.randn(b, d, device=device).to(dtype)
    gates = torch.rand(b, k, device=device).softmax(-1)
    experts = torch.rand(b, e, device=device).argsort(-1)[:, :k].int()
    return h, gates, experts, e


def run(benchmark, device, function, *arguments):
    def once():
        function(*arguments)
        if device == "cuda":
            torch.cuda.synchronize()

    once()
    benchmark(once)


@pytest.mark.parametrize("implementation", ["operator", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_memory_statistics(benchmark, shape, device, dtype, implementation):
    function = memory_statistics if implementation == "operator" else reference.memory_statistics
    h, *others = make(shape, dtype, device)
    benchmark.extra_info["bytes_read"] = h.numel() * h.element_size()
    run(benchmark, device, function, h, *others)


@pytest.mark.parametrize("implementation", ["operator", "reference"])
@pytest.mark.parametrize("device", DEVICES)
def test_memory_update(benchmark, device, implementation):
    function = memory_update_ if implementation == "operator" else reference.memory_update_
    memory = torch.randn(8, 256, device=device)
    run(benchmark, device, function, memory, torch.randn(8, 256, device=device), torch.ones(8, device=device), 0.9)
