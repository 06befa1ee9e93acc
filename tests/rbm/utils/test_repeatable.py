"""A run does not depend on the modes of the program that calls it."""

import warnings
from contextlib import ExitStack, contextmanager

import pytest
import torch
from block_graphs import block_graph

from rbm import distill
from rbm.config import Config
from rbm.utils.distributed import forked
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


def modes():
    """The modes that a caller may have set, as reported by tensors and PyTorch."""
    made = torch.zeros(1)
    entered = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"))
    return made.dtype, made.device.type, *entered


def test_modes_return():
    before = modes()
    with ExitStack() as entered:
        for mode in MODES.values():
            entered.enter_context(mode())
        outside = modes()
        with plain_modes():
            assert modes() == (torch.float32, "cpu", True, False, False)
        assert modes() == outside == (torch.float64, "meta", False, True, True)
        with pytest.raises(KeyError), plain_modes():
            raise KeyError
        assert modes() == outside
    assert modes() == before


def test_several_gpus_are_no_reason_for_a_warning(monkeypatch):
    """``fork_rng`` warns of them, once in a process, if it is to find them itself."""
    states, restored = {0: torch.tensor([0]), 1: torch.tensor([1])}, {}
    monkeypatch.setattr(torch.random, "_fork_rng_warned_already", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(states))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_rng_state", states.get)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: restored.update({device: state}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with forked():
            pass
    assert restored == states
