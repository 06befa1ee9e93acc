"""The tool that times the grouped matmul with and without an order: each of its calls computes the same."""

from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.measure.shapes import Problem, Shape, Workload
from benchmarks.tuning import ordering
from rbm_kernels.ops.expert_matmul import config, launch, reference

SHAPE = Shape(40, 16, 16)


@pytest.fixture
def problem() -> Problem:
    return Problem.of(Workload(SHAPE, "float32"), "cpu")


@pytest.mark.parametrize("which", ordering.PASSES)
def test_every_variant_computes_the_same(which, problem, device):
    if device != "cpu":
        pytest.skip("Triton compiles in this process: these are CPU tensors")
    p = problem
    with torch.no_grad():
        exact = {
            "forward": reference.expert_matmul(p.x, p.weight, p.bias, p.gates, p.experts),
            "backward input": reference.backward_input(p.grad, p.x, p.weight, p.bias, p.gates, p.experts)[0],
            "backward weight": reference.backward_weight(p.grad, p.x, p.gates, p.experts, SHAPE.experts)[0],
        }[which]
    found = ordering.variants(p, SHAPE, which)
    assert len(found) == (2 if which == "backward weight" else 2 * len(ordering.HEIGHTS))
    for height, ordered, call in found.values():
        few_launches = mock.patch.object(launch, "_prepare_small_weight", wraps=launch._prepare_small_weight)
        with ordering.chosen(height, ordered=ordered), few_launches as prepared:
            got = call()
        assert prepared.called == (which == "backward weight" and not ordered)
        got = got if which == "forward" else got[0]
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-4)


def test_the_choice_ends_with_the_block():
    before = config.tile_rows(2_704, "half"), config.is_small(2_704, 3, 8, 8 * 256 * 256, "half")
    with ordering.chosen(32, ordered=True):
        assert config.tile_rows(2_704, "half") == 32
        assert not config.is_small(2_704, 3, 8, 8 * 256 * 256, "half")
    assert (config.tile_rows(2_704, "half"), config.is_small(2_704, 3, 8, 8 * 256 * 256, "half")) == before
