"""The tests of ``executed/``, with one process per architecture, in which Triton does not interpret."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FOLDER = Path(__file__).parent / "executed"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["80", "90"])
def test_compiled_kernels(architecture):
    """Kernels against their references, planted faults, every watcher, two orders of blocks and warps."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment.pop("TRITON_INTERPRET", None)
    environment["RBM_EXECUTE_PTX"] = architecture
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "--durations=10",
        str(FOLDER),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=FOLDER.parents[2], timeout=1500)
    print(done.stdout[-20_000:], done.stderr[-5_000:])
    assert done.returncode == 0
