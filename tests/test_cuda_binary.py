"""The CUDA code in the built library, read without a GPU."""

import re

import pytest

pytest.importorskip("triton")

from benchmarks.compiled.static_report import CUDA_LIBRARY, CUDA_PROGRAMS, Row, cuda_rows
from rbm_kernels import _machine_code, _native

# RBM_CUDA_ARCHITECTURES decides; tests/test_build.py tests what it decides.
ARCHITECTURES = [int(number) for number in re.findall(r"sm_(\d+)", _native.build_info()["cuda_architectures"] or "")]

pytestmark = [
    pytest.mark.skipif(not CUDA_LIBRARY.exists(), reason="librbm_cuda was not built (nvcc was not found)"),
    pytest.mark.skipif(_machine_code.find_cuobjdump() is None, reason="needs cuobjdump, from CUDA or from Triton"),
]


@pytest.fixture(scope="module")
def kernels() -> dict[tuple[int, str], _machine_code.MachineCode]:
    return _machine_code.read(CUDA_LIBRARY)


@pytest.fixture(scope="module")
def rows(kernels) -> list[Row]:
    return list(cuda_rows(kernels))


def test_every_architecture_and_ptx_of_the_newest():
    listed = _machine_code.cuobjdump("--list-elf", str(CUDA_LIBRARY))
    assert re.findall(r"\.sm_(\d+)\.cubin", listed) == [str(architecture) for architecture in ARCHITECTURES]
    listed = _machine_code.cuobjdump("--list-ptx", str(CUDA_LIBRARY))
    assert re.findall(r"\.sm_(\d+)\.ptx", listed) == [str(ARCHITECTURES[-1])]


def test_no_spills(kernels):
    assert {architecture for architecture, _ in kernels} == set(ARCHITECTURES)
    assert [key for key, code in kernels.items() if code.spilled_bytes] == []


def test_two_blocks_of_the_first_stage_fit_on_a_multiprocessor(rows):
    """One block computes norms while the other waits for its rows."""
    first_stage = [row for row in rows if row.kernel == "memory_statistics_kernel"]
    assert len(first_stage) == len(ARCHITECTURES) * 8  # four dtypes, aligned or not
    for row in first_stage:
        assert row.programs >= row.programs_claimed == CUDA_PROGRAMS, row
        assert row.shared_bytes <= 24 * 1024, row


def test_aligned_rows_come_in_16_byte_loads(rows, kernels):
    aligned = [row for row in rows if row.shape == "16-byte rows"]
    assert len(aligned) == len(ARCHITECTURES) * 8  # two kernels, four dtypes
    for row in aligned:
        assert row.wide_loads >= 4, row
    narrow = [
        name
        for (_, name), code in kernels.items()
        if re.search(r"(statistics|norm)_kernelI\w+?Lb1E", name)
        and any(instruction.startswith("LDG.E.U16") for instruction in code.instructions)
    ]
    assert narrow == []


def test_no_atomics(kernels):
    """Atomic float additions would make the result depend on the order in which blocks run."""
    assert kernels
    for key, code in kernels.items():
        found = [name for name in code.instructions if re.match(r"(ATOM|ATOMS|ATOMG|RED|REDG)\b", name)]
        assert found == [], key
