"""Counts of instructions and memory accesses, by running a few blocks of the compiled code."""

import pytest

pytest.importorskip("triton")

from benchmarks.compiled import counted
from benchmarks.compiled.cases import Case


def test_rows_and_their_table():
    """Routing of 700 rows in bfloat16: forward and backward, four blocks of each."""
    rows = list(counted.counted_rows([Case("cosine_topk", "bfloat16", rows=700)], 90))
    assert [row.computes for row in rows] == ["gates, experts, cosines", "grad_h"]
    for row in rows:
        assert row.sampled == min(4, row.blocks)
        assert row.instructions > row.integer > 0
        assert row.multiply_adds > 0
        assert 1 <= row.sectors_a_request <= 32
        assert row.model_cycles >= max(row.model_issue, row.model_tensor_cores, row.model_shared_memory, row.model_l2)
    table = counted.markdown(rows, {"triton": "3", "commit": "c", "date": "d"})
    assert table.count("| cosine_topk ") == 2
    assert "model, no measurement" in table


def test_blocks_that_run():
    assert counted.sampled("cosine_topk_fwd_kernel", (1000, 1, 1)) == [0, 250, 500, 750]
    assert counted.sampled("expert_matmul_bwd_weight_kernel", (1, 3, 1)) == [0, 1, 2]
    assert counted.sampled("expert_matmul_bwd_list_kernel", (1000, 1, 1)) is None
