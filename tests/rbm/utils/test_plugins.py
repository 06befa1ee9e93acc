"""The plugin shown in CONTRIBUTING.md."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rbm_process import RbmProcess

from rbm.utils.plugins import load_plugin

ROOT = Path(__file__).resolve().parents[3]
FEW = [f"--set={section}.max_epochs=40" for section in ("teacher", "glnn")]


@pytest.fixture
def plugin(tmp_path) -> Path:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (code,) = re.findall(r"```python\n(# mine.py\n.*?)```", text, flags=re.DOTALL)
    file = tmp_path / "mine.py"
    file.write_text(code)
    return file


def run(*arguments, cwd: Path) -> subprocess.CompletedProcess:
    """Run in a separate process, so that a plugin's additions do not affect other tests."""
    command = [sys.executable, "-m", "rbm", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def test_one_file_adds_a_method_a_teacher_and_a_dataset(plugin, tmp_path):
    chosen = ["--dataset", "rings", "--teacher", "mean", "--method", "copycat", *FEW]
    done = RbmProcess("--plugin", plugin, "distill", *chosen, "--out", "run", cwd=tmp_path)
    out, err = done.finish()
    assert done.returncode == 0, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["teacher"]["name"] == "mean"
    assert summary["nodes"] == 300
    assert summary["copycat"]["test_accuracy"] > 0.5, "a third is chance"
    assert "Copycat" in out


def test_worker_processes_know_it_too(plugin, tmp_path):
    chosen = ["--dataset", "rings", "--teacher", "mean", "--method", "copycat", *FEW]
    done = run("--plugin", plugin, "distill", *chosen, "--seeds", "0-1", "--jobs", "2", "--out", "o.csv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "o.csv") as file:
        assert sorted(row["method"] for row in csv.DictReader(file)) == ["copycat"] * 2 + ["teacher"] * 2


def test_what_is_no_plugin(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"plugin .*nothing.py does not exist"):
        load_plugin(tmp_path / "nothing.py")
    with pytest.raises(ValueError, match=r"expected a Python file that ends in .py"):
        load_plugin(tmp_path / "mine.txt")
