"""Two processes train one layer: both on one GPU by gloo, which NCCL refuses, and by NCCL where there are two."""

import pytest
import torch
from gpu_ranks import batches, make, spawn, train
from on_gpu import full_only

# Starting processes and importing takes longer than training.
pytestmark = pytest.mark.slow


def check(states, gpu):
    """All ranks are bitwise equal, and equal to one process with the joint batches up to the order of sums."""
    layer = make(gpu.name)
    start = {name: value.cpu().clone() for name, value in layer.state_dict().items()}
    expected = train(layer, layer, batches(gpu.name), 1.0)
    for name, value in expected.items():
        assert all(torch.equal(state[name], states[0][name]) for state in states), name
        torch.testing.assert_close(states[0][name], value, rtol=1e-4, atol=1e-5, msg=name)
        assert not torch.equal(value, start[name]), f"{name} did not move"


@pytest.mark.parametrize("place", ["one device", *full_only("a device a rank")])
def test_two_ranks(place, bare_gpu, tmp_path):
    if place == "one device":
        check(spawn(2, "gloo", [bare_gpu.name] * 2, tmp_path), bare_gpu)
    else:
        check(spawn(2, "nccl", ["cuda:0", bare_gpu.second()], tmp_path), bare_gpu)
