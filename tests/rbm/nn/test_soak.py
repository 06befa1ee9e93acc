"""Two thousand training steps with batches of changing size: no memory leak and no slowdown."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).resolve().parents[2] / "helpers" / "soak.py"


def soaked(*arguments: str) -> dict[str, float]:
    run = subprocess.run([sys.executable, str(SOAK), *arguments], capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc, as Linux has it")
def test_memory_and_time_of_a_step_stay_what_they_are():
    grown = soaked("500", "2000")
    assert grown["tensors"] < 50, "1,500 steps that keep one each would be more"
    assert grown["bytes"] < 8 * 2**20, "1,500 steps that keep 6 KiB each would be more"
    assert grown["slowdown"] < 2, "a loaded machine changes it by a quarter"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc, as Linux has it")
def test_what_is_kept_would_be_noticed():
    grown = soaked("10", "610", "leak")
    assert grown["tensors"] >= 600
    assert grown["bytes"] > 8 * 2**20
