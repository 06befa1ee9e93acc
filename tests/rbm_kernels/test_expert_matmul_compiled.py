"""The grouped matmul's kernels, compiled for every architecture and read: no GPU is needed."""

import pytest

pytest.importorskip("triton")

from benchmarks.compiled.cases import ARCHITECTURES, CASES
from benchmarks.compiled.static_report import compiled_everywhere

MATRIX_INSTRUCTION = {80: "HMMA", 90: "HGMMA", 100: "UTC", 120: "HMMA"}
MULTIPLIES = {"expert_matmul_fwd_kernel", "expert_matmul_bwd_kernel", "expert_matmul_bwd_weight_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiled_code_keeps_what_the_configuration_claims(architecture):
    rows = compiled_everywhere("expert_matmul")[architecture]
    # Four launches, more where experts come in passes; the weight's gradient takes four kernels.
    assert len(rows) >= 7 * sum(case.operator == "expert_matmul" for case in CASES)
    assert {row.kernel for _, row in rows} > MULTIPLIES
    for case, row in rows:
        assert row.spilled_bytes == 0, row
        assert row.programs >= (row.programs_claimed or 1), row
        assert row.atomics == 0, row
        if row.kernel in MULTIPLIES:
            assert row.programs_claimed, row
            assert case.in_features % 8 or row.wide_loads > 0, row
            if case.precision != "float32":
                assert row.matrix_instructions.startswith(MATRIX_INSTRUCTION[architecture]), row
