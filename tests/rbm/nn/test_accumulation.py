"""Micro-batches that count as one batch for the memory, and parameters exempt from weight decay."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

import rbm
from rbm import FusedRbMLayer, RbMFeedForward
from rbm.nn.reference import ReferenceRbMLayer


def model(dtype=torch.float32):
    return nn.Sequential(
        nn.Linear(5, 6, dtype=dtype),
        RbMFeedForward(6, 7, 4, 2, activation="swiglu", dtype=dtype),
        nn.LayerNorm(6, dtype=dtype),
        FusedRbMLayer(6, 3, 5, 2, dtype=dtype),
    )


@pytest.mark.parametrize("sizes", [(20, 20), (33, 1, 0, 6), (10,) * 4], ids=str)
def test_micro_batches_equal_one_batch_memory_included(sizes):
    """Judged point 4 of issue 28: to 1e-6, over several optimiser steps."""
    whole = model()
    parts = copy.deepcopy(whole)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (whole, parts)]
    apart = copy.deepcopy(parts)  # for half batches without accumulation
    for _ in range(4):
        x, labels = torch.randn(40, 5), torch.randint(3, (40,))
        F.cross_entropy(whole(x), labels).backward()
        with rbm.accumulate_memory(parts):
            for some, their in zip(x.split(list(sizes)), labels.split(list(sizes)), strict=True):
                (F.cross_entropy(parts(some), their, reduction="sum") / 40).backward()
        for some in x.split(list(sizes)):
            apart(some)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    states = [net.eval().state_dict() for net in (whole, parts)]
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, atol=1e-6, rtol=0, msg=name)
    for layer in (1, 3):
        assert (apart.eval()[layer].memory - whole[layer].memory).abs().max() > 1e-3


def test_equals_the_equation_over_all_rows():
    layer = FusedRbMLayer(6, 3, 5, 2, dtype=torch.float64)
    reference = ReferenceRbMLayer(6, 3, 5, 2, dtype=torch.float64)
    reference.load_state_dict(layer.state_dict())
    x = torch.randn(30, 6, dtype=torch.float64)
    with layer.accumulate_memory():
        for some in x.split(7):
            layer(some)
    reference(x)
    torch.testing.assert_close(layer.eval().memory, reference.memory)
    with pytest.raises(NotImplementedError, match="give it the whole batch"):
        reference.accumulate_memory()


def test_memory_waits_inside_and_what_was_recorded_before_is_applied_first():
    layer, twin = FusedRbMLayer(6, 3, 5, 2), None
    x = torch.randn(3, 8, 6)
    twin = copy.deepcopy(layer)
    layer(x[0])
    twin(x[0])
    twin.update_memory()
    with layer.accumulate_memory():
        assert torch.equal(layer.memory, twin.memory)
        layer(x[1])
        with layer.accumulate_memory():  # a nested block belongs to the same batch
            layer(x[2])
        assert copy.deepcopy(layer)._accumulates is False
        assert torch.equal(layer.memory, twin.memory)
        layer.update_memory()  # ends the batch
        layer(x[0])
    twin(x[1:].flatten(0, 1))
    twin.update_memory()
    torch.testing.assert_close(layer.memory, twin.memory)
    twin(x[0])
    torch.testing.assert_close(layer.eval().memory, twin.eval().memory)


def test_loading_inside_forgets_the_batch_so_far():
    layer, x = FusedRbMLayer(6, 3, 5, 2), torch.randn(2, 8, 6)
    twin = copy.deepcopy(layer)
    with layer.accumulate_memory():
        layer(x[0])
        layer.load_state_dict(twin.state_dict())
        layer(x[1])
    twin(x[1])
    torch.testing.assert_close(layer.eval().memory, twin.eval().memory)


def test_an_error_inside_ends_the_accumulation():
    layer = FusedRbMLayer(6, 3, 5, 2)
    with pytest.raises(ValueError, match="input has shape"), layer.accumulate_memory():
        layer(torch.randn(2, 5))
    assert layer._accumulates is False


def test_decay_spares_scales_attention_and_biases():
    net = model()
    decayed, spared = rbm.parameter_groups(net, weight_decay=0.5)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == {"0.weight", "1.weight_in", "1.weight_out", "3.weight"}
    assert len(decayed["params"]) + len(spared["params"]) == len(names)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.5, 0.0)
    optimizer = torch.optim.AdamW(rbm.parameter_groups(net, weight_decay=0.5), lr=0.1)
    before = copy.deepcopy(net)
    net(torch.randn(4, 5)).sum().mul(0).backward()  # without a gradient, only weight decay changes parameters
    optimizer.step()
    for name, parameter in net.named_parameters():
        stayed = torch.equal(parameter, before.get_parameter(name))
        assert stayed == (id(parameter) not in {id(p) for p in decayed["params"]}), name
    with pytest.raises(ValueError, match="weight_decay is -1"):
        rbm.parameter_groups(net, weight_decay=-1)
    moe = rbm.parameter_groups(rbm.nn.moe.MoELayer(6, 3, 4, 2, router_features=5), weight_decay=0.1)
    assert sum(p.dim() == 2 for p in moe[1]["params"]) == 1, "the experts' biases"


def test_decay_spares_what_they_are_computed_from():
    layer = FusedRbMLayer(6, 3, 5, 2)
    parametrize.register_parametrization(layer, "attention", nn.Tanh())
    prune.l1_unstructured(layer, "bias", 0.5)
    decayed, spared = rbm.parameter_groups(layer, weight_decay=0.5)
    assert [tuple(p.shape) for p in decayed["params"]] == [tuple(layer.weight.shape)]
    assert len(spared["params"]) == 3
