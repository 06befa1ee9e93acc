"""Fixtures of several modules: a kept student, its rows, and files that are read in several pieces."""

from pathlib import Path

import numpy as np
import pytest
import saved_features
from saved_runs import save_run

from rbm.serving import feature_files


@pytest.fixture
def small_pieces(monkeypatch) -> None:
    monkeypatch.setattr(feature_files, "_PIECE_ROWS", 5)


@pytest.fixture
def run(tmp_path) -> Path:
    return save_run(tmp_path / "run", saved_features.F)


@pytest.fixture
def x() -> np.ndarray:
    return saved_features.numbers()
