"""A disk that is full, or fails, at any write of a run: the error names the file, and the run can be resumed.

``RBM_FUZZ_CASES=2000`` tries every write in every way; CI tries some of them.
"""

import json
import os
import shutil
import subprocess
import sys
from errno import EIO, ENOSPC
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
WAYS = ((ENOSPC, 0), (ENOSPC, 1), (EIO, 0))  # full at once, full after half of a write, damaged
SOME = int(os.environ.get("RBM_FUZZ_CASES", "200")) < 2000


@pytest.fixture(scope="module")
def failing_run(tmp_path_factory):
    """Runs cases ``(at, errno, short)`` of a small run; the first of the results is that without a failure."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler, and Linux")
    folder = tmp_path_factory.mktemp("disk")
    library = folder / "failing_writes.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(HERE / "failing_writes.c"), "-ldl"], check=True
    )

    def run(cases):
        numbers = [str(number) for case in cases for number in case]
        script = [sys.executable, str(HERE / "failing_run.py"), str(folder / "runs"), *numbers]
        environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=3600)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


@pytest.mark.slow
def test_a_run_survives_a_disk_that_fails(failing_run):
    whole = failing_run([])[0]
    assert whole["ended"] == "whole"
    writes = whole["writes"]
    assert writes > 20, "the library counts what a run writes"
    every = [(at, *way) for at in range(1, writes + 1) for way in WAYS]
    # Some are spread over the run, and over the ways: their distance is no multiple of three.
    cases = every[:: max(1, len(every) // 10) | 1] if SOME else every
    found = failing_run(cases)[1:]
    assert len(found) == len(cases)
    for case in found:
        assert case["ended"] in ("OSError", "whole"), case  # whole: half of the last write before a retry, no failure
        if case["ended"] == "OSError":
            assert "could not be written: " in case["said"], case
            assert "bytes are free in" in case["said"], case
        assert case["left"] == [], case
        assert case["files"] == whole["files"], f"resumed, it comes to the same files: {case}"
