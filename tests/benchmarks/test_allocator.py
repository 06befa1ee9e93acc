"""``--keep-memory`` of the benchmarks."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULTS = """
import resource, sys, torch
from benchmarks.measure.allocator import keep_freed_memory
if "keep" in sys.argv:
    keep_freed_memory()
def fill():
    torch.empty(2**24).fill_(1.0)  # 64 MiB, more than glibc ever keeps by itself
for _ in range(20):  # until the heap has grown enough
    fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    fill()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_freed_memory_is_reused():
    def faults(*words: str) -> int:
        command = [sys.executable, "-c", FAULTS, *words]
        return int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)

    assert faults() >= 100  # 32 per call with huge pages, 16,384 without
    assert faults("keep") <= 10


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_rows_tell_that_memory_was_kept(tmp_path):
    file = tmp_path / "rows.csv"
    command = [sys.executable, "-m", "pytest", "benchmarks/test_expert_order.py", "-q", "-p", "no:xdist"]
    command += ["--seconds", "0.01", "--keep-memory", "--results", file]
    # pytest-benchmark refuses to measure in a worker of xdist, which this test may be in.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=own)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    rows = list(csv.DictReader(file.open()))
    assert rows
    assert all(row["device"].endswith("threads, memory kept") for row in rows)
