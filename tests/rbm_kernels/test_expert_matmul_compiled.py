"""The grouped matmul's kernels, compiled for every architecture at the reference shape and read: no GPU is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "helpers" / "static_expert_matmul.py"
ROOT = SCRIPT.parents[2]
# Kilobytes of shared memory that one program may take, and that the programs of a multiprocessor share.
SHARED = {80: (163, 164), 90: (227, 228), 100: (227, 228), 120: (99, 100)}
REGISTERS, THREADS_A_WARP = 65_536, 32


def compiled(precision: str, architecture: int) -> list[dict]:
    """In a process of its own: here the kernels may stand decorated for the interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "ignore", SCRIPT, precision, str(architecture)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90, 100, 120])
@pytest.mark.parametrize("precision", ["bfloat16", "float16", "tf32", "ieee"])
def test_compiled_code_keeps_what_the_configuration_claims(precision, architecture):
    lines = compiled(precision, architecture)
    assert len(lines) == (4 if precision == "float16" else 7)
    for line in lines:
        about = json.dumps(line)
        assert line["spills"] == line["stack"] == 0, about
        # Registers are handed out to a warp by eights, shared memory loses one kilobyte a program to the system.
        per_program = -(-line["registers"] // 8) * 8 * THREADS_A_WARP * line["warps"]
        assert line["programs"] * per_program <= REGISTERS, about
        limit, total = SHARED[architecture]
        assert line["shared"] <= limit * 1024, about
        assert line["programs"] * (line["shared"] + 1024) <= total * 1024, about
        assert line["wide_loads"] > 0, about
        if precision != "ieee":
            instruction = {80: "HMMA", 90: "HGMMA", 100: "UTCMMA", 120: "HMMA"}[architecture]
            assert line[instruction] > 0, about
