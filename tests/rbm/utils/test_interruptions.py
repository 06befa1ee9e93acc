"""Ctrl-C while the package is imported; ``tests/rbm/cli/test_interruptions.py`` is about what comes later."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("started_by", "is_told"),
    [(["-m", "rbm", "info"], True), (["rbm", "info"], True), (["own.py"], False)],
    ids=["python -m rbm", "rbm", "a program of one's own"],
)
@pytest.mark.parametrize("error", ["KeyboardInterrupt", "ImportError"])
def test_an_interruption_while_pytorch_is_imported(tmp_path, started_by, is_told, error):
    (tmp_path / "torch.py").write_text(f"raise {error}")
    for name in ("rbm", "own.py"):
        (tmp_path / name).write_text("from rbm.cli import main\nmain()\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    command = [sys.executable, *started_by]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    if error == "KeyboardInterrupt" and is_told:
        assert run.stderr == "Error: interrupted; no file was left half-written\n"
    else:
        assert "Traceback" in run.stderr
        assert error in run.stderr
    assert run.returncode in ((-signal.SIGINT, 130) if error == "KeyboardInterrupt" else (1,))
