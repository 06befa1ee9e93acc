"""Products in bfloat16 with the tile registers of AMX, emulated. RBM_AMX is read once, so they need other processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Numbers that AVX512-BF16 and AMX take for zeros, and the emulation does not. Few rows are multiplied otherwise.
SUBNORMAL = """
import torch
from rbm_kernels import expert_matmul, pack_experts, routed_matmul_packed

x, weight = torch.full((100, 6), 1e-39).bfloat16(), torch.full((2, 5, 6), 2.0**100).bfloat16()
gates, experts, memory = torch.ones(100, 1), torch.zeros(100, 1, dtype=torch.int32), torch.randn(2, 6)
for y in (expert_matmul(x, weight, None, gates, experts),
          routed_matmul_packed(x, memory, pack_experts(weight, None), 5, 1)):
    print(int(y.ne(0).all()), int(y.eq(0).all()))
"""


def has_pairs() -> bool:
    try:
        return " avx512_bf16 " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


pytestmark = [pytest.mark.native, pytest.mark.skipif(not has_pairs(), reason="needs a processor with AVX512-BF16")]


def run(amx: str, *command: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "RBM_AMX": amx, "OMP_NUM_THREADS": "1"}
    # A worker of pytest-xdist passes its name on.
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST")}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(("amx", "expected"), [("0", "0 1\n0 1\n"), ("emulated", "1 0\n1 0\n")])
def test_the_environment_decides(amx, expected):
    done = run(amx, "-c", SUBNORMAL)
    assert done.stdout == expected, done.stderr


def test_emulated_registers_give_what_the_references_give():
    """The tests of bfloat16 and of packed experts, which cover all sizes of a block and its ends."""
    names = ("expert_matmul_bfloat16", "packed_experts", "packed_feed_forward")
    files = [str(HERE / f"test_{name}.py") for name in names]
    done = run("emulated", "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", "bfloat16 or dtype2")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
