"""Counters against counts by hand: a copy, coalesced and strided; a transpose, with and without padding; one MMA."""

import pytest
import torch
from ptx_kernels import execute, kernel

from ptx_executor import counters, model

COPY = """
    mad.wide.u32 %rd5, %r1, {stride}, %rd1; ld.global.b32 %r2, [%rd5];
    mad.wide.u32 %rd6, %r1, {stride}, %rd2; st.global.b32 [%rd6], %r2;
"""


def counted(result, name, opcode):
    """A column, summed over the statements of one instruction."""
    statements = result.program.kernel.statements
    return sum(int(n) for n, s in zip(result.column(name), statements, strict=True) if s.name.startswith(opcode))


@pytest.mark.parametrize(("stride", "sectors"), [(4, 4), (8, 8), (32, 32), (128, 32)])
def test_a_copy(stride, sectors):
    """128 adjacent bytes are 4 sectors of 32; with a stride of 32 bytes or more each lane has its own."""
    source, out = torch.arange(32 * stride // 4, dtype=torch.int32), torch.zeros(32 * stride // 4, dtype=torch.int32)
    if source.data_ptr() % 32 or out.data_ptr() % 32:
        pytest.skip("PyTorch did not align the tensors to a sector")
    result = execute(kernel(COPY.format(stride=stride)), source, out)
    for opcode in ("ld.global", "st.global"):
        assert counted(result, "executed", opcode) == 1
        assert counted(result, "lanes", opcode) == 32
        assert counted(result, "bytes", opcode) == 128
        assert counted(result, "sectors", opcode) == sectors


@pytest.mark.parametrize(("pitch", "passes"), [(32, 32), (33, 1), (34, 2)])
def test_a_transpose(pitch, passes):
    """A warp stores a row of 32 words, then reads a column: words ``pitch`` apart fall into 32 / passes banks."""
    body = f"""
        mov.u32 %r2, tile;
        mad.lo.s32 %r3, %r1, 4, %r2;
        mad.lo.s32 %r4, %r1, {4 * pitch}, %r2;
        st.shared.b32 [%r4], %r1;
        ld.shared.b32 %r5, [%r4];
        st.shared.b32 [%r3], %r1;
    """
    result = execute(kernel(body, 1, shared=4 * 32 * pitch), torch.zeros(1))
    assert counted(result, "wavefronts", "ld.shared") == passes
    assert counted(result, "wavefronts", "st.shared") == passes + 1


def test_wide_accesses_go_by_parts_of_a_warp():
    """512 adjacent bytes are four passes of 128, and no conflict."""
    body = "mov.u32 %r2, tile; mad.lo.s32 %r3, %r1, 16, %r2; st.shared.v4.b32 [%r3], {%r1, %r1, %r1, %r1};"
    result = execute(kernel(body, 1, shared=512), torch.zeros(1))
    assert counted(result, "wavefronts", "st.shared") == 4


def test_one_mma():
    zeros = "".join(f"mov.b32 %r{i}, 0;" for i in range(20, 30))
    kind = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    text = f"{zeros} {kind} {{%r60,%r61,%r62,%r63}}, {{%r20,%r21,%r22,%r23}}, {{%r24,%r25}}, {{%r26,%r27,%r28,%r29}};"
    result = execute(kernel(text, 1), torch.zeros(1))
    assert counted(result, "multiply_adds", "mma") == 16 * 8 * 16
    assert result.column("executed").sum() == 10 + 1 + 3  # the zeros, the mma, the parameter, the thread, ret
    assert result.program.classes.count("matrix") == 1


def test_sums_and_the_model():
    """A copy asks global memory twice, and moves 8 sectors; of what it does, that takes an H100 longest."""
    source, out = torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    result = execute(kernel(COPY.format(stride=8)), source, out)
    found = counters.count(result)
    assert (found.blocks, found.global_requests, found.shared_requests, found.multiply_adds) == (1, 2, 0, 0)
    assert found.executed == result.column("executed").sum()
    assert found.instructions["global"] == 2
    busy = model.cycles(found, 90)
    assert busy["issue"] == found.executed / 4
    assert busy["L2"] == 32 * found.sectors / 64
    assert model.bound(busy) == ("L2", busy["L2"])
    assert model.cycles(found, 80)["tensor cores"] == 0


def test_sums_of_source_lines():
    text = kernel(".loc 1 7 0\nadd.s32 %r2, %r1, 1;\nadd.s32 %r2, %r2, 1;\n.loc 1 9 0\nadd.s32 %r2, %r2, 1;", 1)
    result = execute('.file 1 "layer.py"\n' + text, torch.zeros(1))
    lines = counters.count_lines(result)
    assert list(lines) == [("layer.py", 7), ("layer.py", 9)]
    assert [found.executed for found in lines.values()] == [2, 2]  # ret stands behind line 9


def test_the_main_loop():
    """An outer loop of two turns, and an inner one of three that executes four instructions a turn."""
    body = """
        mov.u32 %r2, 0;
    $outer:
        mov.u32 %r3, 0;
    $inner:
        add.s32 %r4, %r3, %r2;
        add.s32 %r3, %r3, 1;
        setp.lt.s32 %p1, %r3, 3;
        @%p1 bra $inner;
        add.s32 %r2, %r2, 1;
        setp.lt.s32 %p1, %r2, 2;
        @%p1 bra $outer;
    """
    loop, turns = counters.count_main_loop(execute(kernel(body, 1), torch.zeros(1)))
    assert (loop.executed, turns) == (24, 6)
    loop, turns = counters.count_main_loop(execute(kernel("mov.u32 %r2, 0;", 1), torch.zeros(1)))
    assert (loop.executed, turns) == (0, 0)
