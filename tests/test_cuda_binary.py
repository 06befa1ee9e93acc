"""What nvcc made of the CUDA sources, read from the library itself: no GPU is needed, and each of these can fail."""

import importlib.util
import os
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from rbm_kernels import _native

LIBRARY = _native.LIBRARY_DIR / "librbm_cuda.so"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
# Threads of a block, and blocks that must fit on a multiprocessor of 65,536 registers together.
THREADS, BLOCKS = 256, 2


def find_cuobjdump() -> str | None:
    """CUDA's own, else the one that Triton brings."""
    triton = importlib.util.find_spec("triton")
    folders = [os.environ["PATH"], "/usr/local/cuda/bin"]
    if triton is not None:
        folders.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    return shutil.which("cuobjdump", path=os.pathsep.join(folders))


CUOBJDUMP = find_cuobjdump()
pytestmark = [
    pytest.mark.skipif(not LIBRARY.exists(), reason="librbm_cuda was not built (nvcc was not found)"),
    pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump, from CUDA or from Triton"),
]


def cuobjdump(*arguments: str) -> str:
    # It runs nvdisasm, which stands beside it.
    path = f"{Path(CUOBJDUMP).parent}{os.pathsep}{os.environ['PATH']}"
    command = [CUOBJDUMP, *arguments, str(LIBRARY)]
    return subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def resources() -> dict[tuple[str, str], dict[str, int]]:
    """(architecture, mangled kernel) -> REG, STACK, SHARED, LOCAL, ..."""
    found, architecture, kernel = {}, "", ""
    for line in cuobjdump("--dump-resource-usage").splitlines():
        if match := re.match(r"arch = (sm_\d+)", line):
            architecture = match[1]
        elif match := re.match(r"\s*Function (\w+):", line):
            kernel = match[1]
        elif "REG:" in line:
            found[architecture, kernel] = {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", line)}
    return found


@pytest.fixture(scope="module")
def hopper() -> dict[str, list[str]]:
    """Mangled kernel -> its instructions on sm_90, the first word of each."""
    instructions, kernel = defaultdict(list), ""
    for line in cuobjdump("-sass", "-arch", "sm_90").splitlines():
        if match := re.match(r"\s*Function : (\w+)", line):
            kernel = match[1]
        elif match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", line):
            instructions[kernel].append(match[1])
    return instructions


def test_every_architecture_and_ptx_of_the_newest():
    assert tuple(re.findall(r"\.(sm_\d+)\.cubin", cuobjdump("--list-elf"))) == ARCHITECTURES
    assert re.findall(r"\.(sm_\d+)\.ptx", cuobjdump("--list-ptx")) == [ARCHITECTURES[-1]]


def test_no_spills(resources):
    assert {architecture for architecture, _ in resources} == set(ARCHITECTURES)
    spilled = {key: use for key, use in resources.items() if use["STACK"] or use["LOCAL"]}
    assert spilled == {}


def test_two_blocks_of_the_first_stage_fit_on_a_multiprocessor(resources):
    """One block forms norms while the other waits for its rows."""
    first_stage = {key: use for key, use in resources.items() if "memory_statistics_kernel" in key[1]}
    assert len(first_stage) == len(ARCHITECTURES) * 8  # four dtypes, aligned or not
    for key, use in first_stage.items():
        assert use["REG"] * THREADS * BLOCKS <= 65536, key
        assert use["SHARED"] <= 24 * 1024, key


def test_aligned_rows_come_in_16_byte_loads(hopper):
    aligned = {name: code for name, code in hopper.items() if re.search(r"(statistics|norm)_kernelI\w+?Lb1E", name)}
    assert len(aligned) == 8  # two kernels, four dtypes
    for name, code in aligned.items():
        assert sum(instruction.startswith("LDG.E.128") for instruction in code) >= 4, name
        assert not any(instruction.startswith("LDG.E.U16") for instruction in code), name


def test_no_atomics(hopper):
    """Atomic float additions would make the result depend on the order in which blocks run."""
    assert hopper
    for name, code in hopper.items():
        assert not any(re.match(r"(ATOM|ATOMS|ATOMG|RED|REDG)\b", instruction) for instruction in code), name
