"""A graph on which a training takes a tenth of a second, and a clock by which each takes a second."""

import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from rbm.config import Config
from rbm.distillation.auto import search

QUICK = {
    "teacher": {"max_epochs": 4, "hidden_channels": 8},
    "mlp": {"max_epochs": 6, "hidden_channels": 8},
    "rbm": {"max_epochs": 6, "pretrain_epochs": 1, "hidden_channels": 8, "num_experts": 4},
    "encoding": {"deepwalk": False, "embedding_dim": 4, "walk_length": 5, "walks_per_node": 1},
}


@pytest.fixture
def start() -> Config:
    """Where searches of these tests start."""
    return Config().updated(QUICK)


@pytest.fixture
def clock(monkeypatch) -> None:
    """Searches measure a second for each training, whatever the machine does, and cut none short."""
    monkeypatch.setattr(search, "_clock", itertools.count().__next__)
    monkeypatch.setattr(search, "time_limit", lambda *_, **__: nullcontext(SimpleNamespace(reused=0.0)))
