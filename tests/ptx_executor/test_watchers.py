"""Each watcher detects its kind of mistake, reports the location, and does not report the correct kernel."""

import re

import pytest
import torch
from ptx_kernels import execute, kernel

from ptx_executor import program
from ptx_executor.program import WatcherError

STORE = "mad.wide.u32 %rd5, %r1, 4, %rd1; st.global.b32 [%rd5], %r1;"
SHARED = "mov.u32 %r2, tile; mad.lo.s32 %r3, %r1, 4, %r2;"


def zeros(n=64):
    return torch.zeros(n, dtype=torch.int32)


def caught(text, *tensors, **options) -> WatcherError:
    with pytest.raises(WatcherError) as raised:
        execute(text, *tensors, **options)
    return raised.value


def test_a_store_past_the_end():
    execute(kernel(STORE, 1), zeros(32))
    whole = zeros(64)
    found = caught(kernel(STORE, 1), whole[:31])
    assert (found.kind, found.lane, found.warp, found.block) == ("out of bounds", 31, 0, 0)
    assert found.address == whole.data_ptr() + 31 * 4
    assert "4 bytes past the end of tensor 0" in str(found)
    assert "st.global.b32 [%rd5], %r1" in str(found)
    assert re.search(r"PTX line \d+", str(found))


def test_an_index_far_away():
    text = kernel(
        "mad.wide.u32 %rd5, %r1, 4, %rd1; add.s64 %rd5, %rd5, 8589934592; st.global.b32 [%rd5], %r1;",
        1,
    )
    assert caught(text, zeros()).kind == "out of bounds"


def test_a_misaligned_vector():
    text = "mad.wide.u32 %rd5, %r1, 4, %rd1; ld.global.v2.b32 {%r2, %r3}, [%rd5];"
    assert caught(kernel(text, 1), zeros()).kind == "misaligned"
    execute(kernel(text.replace("%r1, 4", "%r1, 8"), 1), zeros())


def test_global_memory_that_nobody_wrote():
    text = kernel(
        "mad.wide.u32 %rd5, %r1, 4, %rd1; ld.global.b32 %r2, [%rd5]; add.s32 %r2, %r2, 1; st.global.b32 [%rd5], %r2;", 1
    )
    fresh = zeros(32)
    execute(text, fresh)
    assert caught(text, fresh, unwritten=(fresh,)).kind == "unwritten"
    execute(kernel(STORE + "ld.global.b32 %r2, [%rd5];", 1), fresh, unwritten=(fresh,))


def test_shared_memory_that_nobody_wrote():
    body = SHARED + "ld.shared.b32 %r4, [%r3];"
    assert caught(kernel(body, 1, shared=128), zeros()).kind == "unwritten"
    execute(kernel(SHARED + "st.shared.b32 [%r3], %r1; ld.shared.b32 %r4, [%r3];", 1, shared=128), zeros())


def test_shared_memory_has_an_end():
    body = SHARED + "st.shared.b32 [%r3], %r1;"
    found = caught(kernel(body, 1, shared=124), zeros())
    assert (found.kind, found.lane) == ("out of bounds", 31)


def test_a_register_that_nobody_wrote():
    """It may be computed with, lane by lane; what has no value may not be stored, be an address or decide anything."""
    store = "mad.wide.u32 %rd5, %r1, 4, %rd1; st.global.b32 [%rd5], %r3;"
    assert caught(kernel("add.s32 %r3, %r1, %r9;" + store, 1), zeros()).kind == "unwritten"
    assert caught(kernel("mad.wide.u32 %rd5, %r9, 4, %rd1; st.global.b32 [%rd5], %r1;", 1), zeros()).kind == "unwritten"
    assert caught(kernel("setp.lt.u32 %p1, %r9, 8; @%p1 bra END; END:", 1), zeros()).kind == "unwritten"
    partly = "setp.lt.u32 %p1, %r1, 8; @%p1 mov.u32 %r2, 1; add.s32 %r3, %r2, 1;"
    assert caught(kernel(partly + store, 1), zeros()).lane == 8
    execute(kernel(partly + store.replace("st.global", "@%p1 st.global"), 1), zeros())
    moved = "shfl.sync.idx.b32 %r3, %r3, 3, 31, -1;"
    execute(kernel(partly + moved + store, 1), zeros())
    assert caught(kernel(partly + moved.replace(" 3, 31", " 9, 31") + store, 1), zeros()).kind == "unwritten"
    execute(kernel(partly + "selp.b32 %r3, %r3, 0, %p1;" + store, 1), zeros())


def test_half_of_a_register_that_nobody_wrote():
    """One value may be packed with none, as LLVM does for sm_120; the half without may not be used."""
    store = "mov.b64 {%r4, %r5}, %rd7; mad.wide.u32 %rd5, %r1, 4, %rd1; st.global.b32 [%rd5], HALF;"
    for pack in ("", "add.f32x2 %rd7, %rd7, %rd7;"):
        body = f"mov.b64 %rd7, {{%r1, %r9}}; {pack} {store}"
        execute(kernel(body.replace("HALF", "%r4"), 1), zeros())
        assert caught(kernel(body.replace("HALF", "%r5"), 1), zeros()).kind == "unwritten"
    whole = "mov.b64 %rd7, {%r1, %r9}; shl.b64 %rd7, %rd7, 1;" + store.replace("HALF", "%r4")
    assert caught(kernel(whole, 1), zeros()).kind == "unwritten"


def test_two_blocks_write_one_address():
    assert caught(kernel(STORE, 1), zeros(), grid=2).kind == "race between blocks"
    apart = "mov.u32 %r2, %ctaid.x; mad.lo.s32 %r1, %r2, 32, %r1;" + STORE
    execute(kernel(apart, 1), zeros(), grid=2)


@pytest.mark.parametrize("seed", range(4))
def test_a_block_reads_what_another_writes(seed):
    """Regardless of the order in which they run."""
    body = (
        "mov.u32 %r2, %ctaid.x; mad.lo.s32 %r1, %r2, 32, %r1;"
        + STORE
        + "xor.b32 %r1, %r1, 32; mad.wide.u32 %rd5, %r1, 4, %rd1; ld.global.b32 %r4, [%rd5];"
    )
    assert caught(kernel(body, 1), zeros(), grid=2, seed=seed).kind == "race between blocks"


EXCHANGE = SHARED + "st.shared.b32 [%r3], %r1; BARRIER xor.b32 %r4, %r3, 128; ld.shared.b32 %r5, [%r4];"


@pytest.mark.parametrize("seed", range(4))
def test_two_warps_without_a_barrier(seed):
    text = kernel(EXCHANGE, 1, shared=256)
    execute(text.replace("BARRIER", "bar.sync 0;"), zeros(), threads=64, seed=seed)
    found = caught(text.replace("BARRIER", ""), zeros(), threads=64, seed=seed)
    assert found.kind in ("race between warps", "unwritten")


@pytest.mark.parametrize("seed", range(4))
def test_a_buffer_that_is_filled_again_too_early(seed):
    """The second barrier is missing: a warp writes while another may still read."""
    text = kernel(EXCHANGE.replace("BARRIER", "bar.sync 0;") + "AGAIN st.shared.b32 [%r3], 7;", 1, shared=256)
    execute(text.replace("AGAIN", "bar.sync 0;"), zeros(), threads=64, seed=seed)
    assert caught(text.replace("AGAIN", ""), zeros(), threads=64, seed=seed).kind == "race between warps"


def test_equal_values_of_two_warps_are_no_race():
    body = "mov.u32 %r2, tile; st.shared.b32 [%r2], VALUE; bar.sync 0; ld.shared.b32 %r3, [%r2];"
    execute(kernel(body.replace("VALUE", "7"), 1, shared=128), zeros(), threads=64)
    body = "shr.u32 %r5, %r1, 5;" + body.replace("VALUE", "%r5")
    assert caught(kernel(body, 1, shared=128), zeros(), threads=64).kind == "race between warps"


@pytest.mark.parametrize(
    "store",
    [
        "st.global.b32 [%rd1], VALUE;",
        "mov.u32 %r2, tile; st.shared.b32 [%r2], VALUE;",
        "mov.u32 %r2, tile; stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r2], {VALUE};",
    ],
    ids=["global", "shared", "matrix"],
)
def test_lanes_that_store_at_one_address(store):
    """Which lane wins is undefined, so they may only store copies of the same value."""
    execute(kernel("mov.u32 %r9, 7;" + store.replace("VALUE", "%r9"), 1, shared=128), zeros())
    found = caught(kernel(store.replace("VALUE", "%r1"), 1, shared=128), zeros())
    assert (found.kind, found.lane) == ("race between lanes", 1)


COPY = (
    SHARED
    + """
    mad.wide.u32 %rd5, %r1, 4, %rd1;
    cp.async.ca.shared.global [%r3], [%rd5], 4;
    cp.async.commit_group;
    WAIT
    ld.shared.b32 %r4, [%r3];
    mad.wide.u32 %rd5, %r1, 4, %rd2;
    st.global.b32 [%rd5], %r4;
"""
)


def test_a_copy_that_was_not_waited_for():
    text = kernel(COPY, 2, shared=128)
    source, out = torch.arange(32, dtype=torch.int32), zeros(32)
    execute(text.replace("WAIT", "cp.async.wait_group 0;"), source, out)
    assert out.equal(source)
    for wait in ("", "cp.async.wait_group 1;"):
        assert caught(text.replace("WAIT", wait), source, out).kind == "copy not waited for"


def test_a_copy_fills_up_with_zeros():
    """The fourth operand is how many bytes are read."""
    text = kernel(COPY.replace("[%rd5], 4;", "[%rd5], 4, %r9;", 1), 2, shared=128).replace(
        "WAIT", "cp.async.wait_group 0;"
    )
    text = text.replace("mov.u32 %r2, tile;", "mov.u32 %r2, tile; and.b32 %r9, %r1, 1; shl.b32 %r9, %r9, 2;")
    source, out = torch.arange(100, 132, dtype=torch.int32), zeros(32)
    execute(text, source, out)
    assert out.equal(torch.where(torch.arange(32) % 2 == 1, source, 0))


def test_a_barrier_that_a_warp_never_reaches():
    body = "setp.ge.u32 %p1, %r1, 32; @%p1 bra END; bar.sync 0; END:"
    found = caught(kernel(body, 1), zeros(), threads=64)
    assert found.kind == "barrier"
    assert "warp 0 waits at a barrier that warp 1" in str(found)


def test_a_barrier_that_half_a_warp_reaches():
    body = "setp.ge.u32 %p1, %r1, 16; @%p1 bra END; bar.sync 0; END:"
    assert caught(kernel(body, 1), zeros()).kind == "divergence"


def test_a_shuffle_that_names_absent_lanes():
    body = "setp.ge.u32 %p1, %r1, 16; @%p1 bra END; shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1; END:"
    assert caught(kernel(body, 1), zeros()).kind == "divergence"


def test_a_loop_without_an_end(monkeypatch):
    monkeypatch.setattr(program, "MOST_INSTRUCTIONS", 10_000)
    assert caught(kernel("AGAIN: bra AGAIN;", 1), zeros()).kind == "endless"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("frobnicate.b32 %r2, %r1;", r"line 10: the instruction frobnicate \(frobnicate.b32\) is not known"),
        ("add.sat.s32 %r2, %r1, %r1;", "the form add.sat.s32 is not known: nothing is known of .sat"),
        ("add.f16x2 %r2, %r1, %r1;", "the form add.f16x2 is not known: its type is not known"),
        ("mov.u32 %r2, %clock;", "special register %clock is not known"),
        ("bar.sync 1;", "only barrier 0"),
        ("mov.u32 %r2, nowhere;", "line 10: nowhere is not known"),
        ("mov.u32 %r2, 5", "no semicolon|is not known|no statement"),
    ],
)
def test_what_is_not_known_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        execute(kernel(text, 1), zeros())
