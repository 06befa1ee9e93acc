"""The examples of docs/tune.md run."""

import re
from pathlib import Path

import pytest

from rbm.config import Config
from rbm.experiments.tuning.space import build_space, read_space

pytest.importorskip("optuna")

PAGE = Path(__file__).resolve().parents[4] / "docs" / "tune.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def test_python():
    (block,) = blocks("python")
    known: dict = {}
    exec(compile(block, str(PAGE), "exec"), known)
    assert len(known["found"].rows) == 3


def test_space(tmp_path):
    (block,) = blocks("yaml")
    (tmp_path / "space.yaml").write_text(block)
    assert len(build_space(read_space(tmp_path / "space.yaml"), Config(), "rbm")) == 4
