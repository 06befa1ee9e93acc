"""RbMFeedForward on a GPU: trained like its reference, counted, accumulated, without a wait of the host."""

import pytest
import torch
from on_gpu import check_no_wait, full_only

import rbm
from rbm import RbMFeedForward
from rbm.nn.reference import ReferenceRbMFeedForward


def make(gpu, activation):
    torch.manual_seed(0)
    features, hidden, experts = gpu.size((96, 160, 8), (4, 3, 3))
    return RbMFeedForward(features, hidden, experts, 2, activation=activation)


def rows_of(gpu, layer, seed=0):
    # Many rows are multiplied choice by choice, few by pairs.
    count = gpu.size((30_000, 500), (10, 4))[seed % 2]
    return torch.randn(count, layer.in_features, generator=torch.Generator().manual_seed(seed)).to(gpu.name)


@pytest.mark.core
@pytest.mark.parametrize("activation", ["swiglu", *full_only("relu", "gelu", "silu")])
def test_trains_like_the_reference(activation, gpu):
    layer = make(gpu, activation)
    twin = ReferenceRbMFeedForward(
        layer.in_features, layer.hidden_features, layer.num_experts, 2, activation=activation, dtype=torch.float64
    )
    twin.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    layer.to(gpu.name)
    rbm.track_usage(layer)
    counts = torch.zeros(layer.num_experts, dtype=torch.int64)
    for seed in range(2):
        rows = rows_of(gpu, layer, seed)
        y, routing = layer(rows, return_routing=True)
        expected = twin(rows.cpu().double())
        torch.testing.assert_close(y.cpu().double(), expected, rtol=1e-4, atol=1e-5)
        y.square().mean().backward()
        expected.square().mean().backward()
        counts += torch.bincount(routing.experts.flatten().cpu(), minlength=layer.num_experts)
    for parameter, exact in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.cpu().double(), exact.grad, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(layer.eval().memory.cpu().double(), twin.memory, rtol=1e-5, atol=1e-6)
    assert torch.equal(rbm.expert_usage(layer)[""].counts, counts)


def test_micro_batches_are_one_batch_to_the_memory(bare_gpu):
    gpu = bare_gpu
    layer, twin = (make(gpu, "gelu").to(gpu.name) for _ in range(2))
    rows = rows_of(gpu, layer)
    with layer.accumulate_memory():
        for some in rows.split(len(rows) // 3):
            layer(some)
    twin(rows)
    torch.testing.assert_close(layer.eval().memory, twin.eval().memory, rtol=0, atol=1e-6)


def test_the_host_never_waits(bare_gpu):
    gpu = bare_gpu
    layer = make(gpu, "swiglu").to(gpu.name)
    rbm.track_usage(layer)

    def step(rows):
        y = layer(rows)
        return y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))

    check_no_wait(gpu, step, lambda seed: (rows_of(gpu, layer, 2 * seed),))
