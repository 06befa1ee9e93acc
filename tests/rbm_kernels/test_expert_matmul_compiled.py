"""The grouped matmul's kernels, compiled for every architecture and read: no GPU is needed."""

import re

import pytest
from known_triton import MOST_SPILLED

pytest.importorskip("triton")

from benchmarks.compiled.cases import ARCHITECTURES, CASES, Case
from benchmarks.compiled.everywhere import compiled_everywhere

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
        assert row.spilled_bytes <= MOST_SPILLED, row
        assert row.programs >= (row.programs_claimed or 1), row
        assert row.atomics == 0, row
        if row.kernel in MULTIPLIES:
            assert row.programs_claimed, row
            assert case.in_features % 8 or row.wide_loads > 0, row
            # Tiles of 16 rows are too low for the instructions of sm_90 and later.
            if case.precision != "float32" and case.rows >= 1024:
                assert row.matrix_instructions.startswith(MATRIX_INSTRUCTION[architecture]), row
                # Two per step for the bias, none for the elements of a tile.
                narrow = re.findall(r"\.16 (\d+)", row.loop_shared_accesses)
                assert sum(map(int, narrow)) <= 2, row


@pytest.mark.slow
def test_issuing_takes_less_time_than_multiplying():
    """On sm_90 at the reference shape: instructions of the main loop against the cycles that its products take."""
    bars = {"y": 0.75, "grad_x": 0.75, "grad_x, grad_gates": 0.9, "grad_weight, grad_bias": 1.0}
    shares = {
        row.computes: row.loop_issue_share
        for case, row in compiled_everywhere("expert_matmul")[90]
        if case == Case("expert_matmul", "bfloat16") and row.kernel in MULTIPLIES
    }
    assert shares.keys() == bars.keys()
    assert {name: share for name, share in shares.items() if share > bars[name]} == {}
