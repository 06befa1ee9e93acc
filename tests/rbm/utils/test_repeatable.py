"""A run does not depend on the modes of the program that calls it."""

from contextlib import ExitStack, contextmanager

import pytest
import torch
from block_graphs import block_graph

from rbm import distill
from rbm.config import Config
from rbm.utils.repeatable import plain_modes

QUICK = Config().updated(
    {"teacher": {"max_epochs": 2, "min_epochs": 0}, "mlp": {"max_epochs": 2, "min_epochs": 0}}
    | {"encoding": {"deepwalk": False}}
)


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype": lambda: default_dtype(torch.float64),
    "default device": lambda: torch.device("meta"),
}


def test_same_numbers_under_every_mode():
    data = block_graph(0.8, nodes=120, train_per_class=10, val_per_class=10)

    def logits():
        found = distill(data, config=QUICK, methods=["mlp"], labels_alone=False, measure_latency=False)
        return found.teacher_logits

    plain = logits()
    for name, mode in MODES.items():
        with mode():
            assert torch.equal(logits(), plain), name


def test_modes_return():
    with pytest.raises(KeyError), ExitStack() as modes:
        for mode in MODES.values():
            modes.enter_context(mode())
        with plain_modes():
            assert torch.zeros(1, requires_grad=True).mul(2).requires_grad
            assert torch.zeros(1).dtype == torch.float32 and torch.zeros(1).device.type == "cpu"
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
        assert torch.zeros(1).dtype == torch.float64 and torch.zeros(1).device.type == "meta"
        assert torch.is_autocast_enabled("cpu")
        raise KeyError
