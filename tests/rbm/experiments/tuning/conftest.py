"""A graph on which a trial takes a tenth of a second."""

from pathlib import Path

import pytest
import torch

from rbm.config import Config
from rbm.config.presets import preset_config

QUICK = {
    "teacher": {"max_epochs": 4, "hidden_channels": 8},
    "mlp": {"max_epochs": 6, "hidden_channels": 8},
    "rbm": {"max_epochs": 6, "pretrain_epochs": 1, "hidden_channels": 8, "num_experts": 4},
    "encoding": {"deepwalk": False},
}


@pytest.fixture
def graph_file(small_graph, tmp_path) -> Path:
    torch.save(small_graph, tmp_path / "small.pt")
    return tmp_path / "small.pt"


@pytest.fixture
def start(graph_file) -> Config:
    """The starting point of the searches in these tests."""
    return preset_config("clean", str(graph_file)).updated(QUICK)
