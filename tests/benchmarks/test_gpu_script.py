"""``gpu.sh`` as far as a machine without a GPU can tell: syntax, options, and all that comes before a kernel."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")


def gpu_sh(*arguments) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHON": sys.executable, "TRITON_INTERPRET": "1"}
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd="/")


def test_syntax():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [([], "OUT_DIR"), (["a", "b"], "one OUT_DIR"), (["a", "--budget"], "--budget wants"), (["a", "--fast"], "--fast")],
)
def test_wrong_options(arguments, said):
    result = gpu_sh(*arguments)
    assert result.returncode == 2
    assert said in result.stderr


@without_gpu
def test_dry_run(tmp_path):
    result = gpu_sh(tmp_path / "out", "--dry-run", "--ncu", "--budget", 300)
    assert result.returncode == 0, result.stdout
    assert "budget 300 s" in result.stdout
    assert "no-build-isolation --no-deps -e ." in result.stdout
    suites = [line.split()[2] for line in result.stdout.splitlines() if line.startswith("+ pytest")]
    assert suites[0] == "benchmarks/test_expert_matmul.py"
    # Nothing that measures is forgotten; peak memory is read as Linux counts it, not on a GPU.
    everything = {f"benchmarks/{path.name}" for path in SCRIPT.parent.glob("test_*.py")}
    assert everything - set(suites) == {"benchmarks/test_peak_memory.py"}
    assert "expert_matmul bfloat16 B=169,343" in result.stdout  # what ncu would see
    assert len((tmp_path / "out" / "log.txt").read_text().splitlines()[-10:]) == 10
    assert "dry run: nothing is measured" in result.stdout
    assert not (tmp_path / "out" / "results.csv").exists()


@without_gpu
def test_without_a_gpu_it_says_so(tmp_path):
    result = gpu_sh(tmp_path / "out")
    assert result.returncode == 2
    assert "no GPU found; --dry-run needs none" in result.stdout + result.stderr
