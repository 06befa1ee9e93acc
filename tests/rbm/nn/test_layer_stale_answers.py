"""Cached experts are never stale: other threads, other processes, transformations of torch.func."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from layer_answers import answer, expected, make
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from rbm import FusedRbMLayer, RbMFeedForward, RbMStudent
from rbm.nn import folded_weights as folding

THREADS = 8
NAMES = ("weight", "bias", "attention", "log_scale")


def test_a_step_while_experts_are_folded_is_seen(monkeypatch):
    """Another thread's optimiser steps while parameters are read, so the cached experts are outdated."""
    layer, x = make(), torch.randn(5, 6)
    fold = folding.fold

    def interrupted(*arguments):
        folded = fold(*arguments)
        with torch.no_grad():
            layer.weight.mul_(2.0)
        return folded

    monkeypatch.setattr(folding, "fold", interrupted)
    answer(layer, x)
    monkeypatch.setattr(folding, "fold", fold)
    torch.testing.assert_close(answer(layer, x), expected(layer, x))


def test_threads_that_infer_beside_training_end_with_its_weights():
    layer, x = make(), torch.randn(64, 6)
    twin = FusedRbMLayer(6, 4, 5, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(20):
        with ThreadPoolExecutor(9) as pool:
            infers = [pool.submit(lambda: [answer(layer, x) for _ in range(20)]) for _ in range(8)]

            def train():
                for parameter in layer.parameters():
                    parameter.grad = torch.randn_like(parameter)
                for _ in range(3):
                    optimizer.step()

            pool.submit(train).result()
            for each in infers:
                each.result()
        twin.load_state_dict(layer.state_dict())
        torch.testing.assert_close(answer(layer, x), answer(twin.eval(), x), rtol=0, atol=0)


def test_memory_that_another_process_may_write_to_is_folded_anew(folds):
    layer, x = make(), torch.randn(5, 6)
    layer.share_memory()
    # Like a change by another process: the memory changes without a new version in this process.
    alias = torch.from_numpy(layer.weight.detach().numpy())
    answer(layer, x)
    alias.mul_(2.0)
    torch.testing.assert_close(answer(layer, x), expected(layer, x))
    assert len(folds) == 2


@pytest.mark.parametrize("name", NAMES)
def test_what_another_process_writes_is_answered(name):
    """One process trains, another serves the same shared parameters."""
    layer, x = make(), torch.randn(5, 6)
    layer.share_memory()
    before = answer(layer, x)
    trains = torch.multiprocessing.get_context("fork").Process(target=_step, args=(layer, name))
    trains.start()
    trains.join(60)
    assert trains.exitcode == 0
    now = answer(layer, x)
    torch.testing.assert_close(now, expected(layer, x))
    assert not torch.allclose(now, before)


def _step(layer, name):
    with torch.no_grad():
        getattr(layer, name).add_(0.5)


@pytest.mark.parametrize("kind", [FusedRbMLayer, RbMFeedForward, RbMStudent])
@torch.no_grad()
def test_a_vector_of_parameters_that_changes_in_place_is_seen(kind):
    """Assigned a second time, the parameters keep their addresses, and the vector's version is not theirs."""
    module, x = kind(6, 8, 5).eval(), torch.randn(9, 6)
    vector = parameters_to_vector(module.parameters())
    for _ in range(3):
        vector.add_(torch.randn_like(vector))
        vector_to_parameters(vector, module.parameters())
        torch.testing.assert_close(module(x), expected(module, x))


def test_dual_parameters_and_their_values_are_told_apart():
    """Forward mode under no_grad: the cached experts have no tangent, those of dual numbers do."""
    layer, x = make(), torch.randn(5, 6)
    answer(layer, x)
    weight = layer.weight.detach()

    def call(weight):
        with torch.no_grad():
            return torch.func.functional_call(layer, {"weight": weight}, (x,))

    def slope():
        with torch.enable_grad():
            return torch.func.jvp(
                lambda w: torch.func.functional_call(layer, {"weight": w}, (x,)), (weight,), (weight,)
            )[1]

    for _ in range(2):
        torch.testing.assert_close(torch.func.jvp(call, (weight,), (weight,))[1], slope())
        torch.testing.assert_close(answer(layer, x), expected(layer, x))


def test_parameters_of_a_batched_functional_call():
    layer, x = make(), torch.randn(5, 6)
    layers = [make() for _ in range(3)]
    stacked = {name: torch.stack([dict(each.named_parameters())[name] for each in layers]).detach() for name in NAMES}
    buffers = dict(layer.named_buffers())

    def call(parameters):
        return torch.func.functional_call(layer, (parameters, buffers), (x,))

    with torch.no_grad():
        one_by_one = torch.stack([call({name: values[i] for name, values in stacked.items()}) for i in range(3)])
        torch.testing.assert_close(torch.func.vmap(call)(stacked), one_by_one)
        answer(layer, x)
    torch.testing.assert_close(answer(layer, x), expected(layer, x))


def test_first_calls_of_eight_threads_at_once():
    """The experts are folded at the first call, by the first thread or by all, and never partially."""
    student, x = RbMStudent(64, 128, 10).eval(), torch.randn(9, 64)
    with torch.inference_mode():
        expected = student(x)
    for _ in range(25):
        fresh, barrier = copy.deepcopy(student), threading.Barrier(THREADS)

        def first_call(_, fresh=fresh, barrier=barrier):
            with torch.inference_mode():
                barrier.wait()
                return [fresh(x) for _ in range(3)]

        with ThreadPoolExecutor(THREADS) as pool:
            for answers in pool.map(first_call, range(THREADS)):
                assert all(torch.equal(answer, expected) for answer in answers)
