"""The checks that every operator passes can fail: each detects a fault made for it."""

import pytest
import torch
from float32_sums import check_float32_sums
from on_gpu import (
    RealGpu,
    RehearsedGpu,
    check_compiled,
    check_graph,
    check_no_wait,
    check_peak,
    check_repeats,
    check_side_stream,
)

from benchmarks.measure.device import Graph

GPU = RehearsedGpu()


def draw(seed):
    return (torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)),)


def test_a_graph_that_keeps_its_first_tensors():
    class Stale(RehearsedGpu):
        def capture(self, calls, pool=None):
            return Graph(lambda: None, [call() for call in calls])

    check_graph(GPU, lambda x: (x * 2,), draw)
    with pytest.raises(AssertionError, match="replay with the tensors of seed 1: result 0 differs"):
        check_graph(Stale(), lambda x: (x * 2,), draw)


def test_work_that_does_not_wait_for_its_stream():
    """What a kernel on another stream reads: the tensors as they were before."""
    stale = draw(1)[0] * 2
    results = iter([draw(0)[0] * 2, stale])
    check_side_stream(GPU, lambda x: (x * 2,), draw)
    with pytest.raises(AssertionError, match="side stream: result 0 differs"):
        check_side_stream(GPU, lambda x: (next(results),), draw)


def test_a_graph_of_constants_tells_nothing():
    with pytest.raises(AssertionError, match="seeds must differ"):
        check_graph(GPU, lambda x: (x * 0,), draw)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens where librbm_cuda is not loaded")
def test_triton_serves_memory_updates_where_librbm_cuda_does_not():
    """It is bound to them already: PyTorch refuses to bind it twice, and each test would fail for it."""
    with RealGpu().memory_update_by("Triton"):
        pass


def test_bits_that_change():
    check_repeats(lambda x: (x * 2, x / 0 * 0), draw)
    runs = iter(range(20))
    with pytest.raises(AssertionError, match="run 19: result 0 differs"):
        check_repeats(lambda x: (x * 2 + (next(runs) == 19) * 1e-6,), draw)


def test_a_wait(monkeypatch):
    waits = []

    class Watched(RehearsedGpu):
        def without_synchronisation(self):
            return pytest.raises(RuntimeError)

    check_no_wait(GPU, lambda x: (x,), draw)

    def call(x):
        waits.append(x)
        if len(waits) > 1:
            raise RuntimeError("called a synchronizing CUDA operation")
        return (x,)

    check_no_wait(Watched(), call, draw)
    assert len(waits) == 2, "once to compile, once under watch"


def test_more_memory_than_allowed(monkeypatch):
    monkeypatch.setattr(GPU, "peak_bytes", lambda call: 100_000, raising=False)
    check_peak(GPU, lambda x: (x,), draw, 70_000)
    with pytest.raises(AssertionError, match="100,000 bytes at once, 60,000 allowed"):
        check_peak(GPU, lambda x: (x,), draw, 60_000)


def test_a_graph_that_breaks():
    def call(x):
        torch._dynamo.graph_break()
        return (x,)

    with pytest.raises(torch._dynamo.exc.Unsupported):
        check_compiled(GPU, call, draw)


def chain(terms, sums=2_000):
    """Sums of one float32 chain, exact ones, and sums of squares."""
    a, b = torch.randn(2, terms, sums, generator=torch.Generator().manual_seed(0))
    total = torch.zeros(sums)
    for x, y in zip(a, b, strict=True):
        total += x * y
    products = a.double() * b.double()
    return total, products.sum(0), products.square().sum(0), a, b


def test_bound_of_float32_sums():
    """A chain passes where twice the error of a pairwise sum does not let it; one term that is missing is seen."""
    total, exact, squares, a, b = chain(20_000)
    pairwise = (a * b).sum(0)
    error, eager = (total - exact).abs().max(), (pairwise - exact).abs().max()
    assert error > 2 * eager + torch.finfo(torch.float32).eps * exact.abs().max()
    check_float32_sums("y", total, exact, pairwise, squares, 20_000)
    lost = total - a[777] * b[777]
    with pytest.raises(AssertionError, match="y: error"):
        check_float32_sums("y", lost, exact, pairwise, squares, 20_000)


def test_bound_of_tf32():
    """Cut operands pass where rounded ones are the peer; bfloat16 in their place does not."""

    def keep(x, bits, add=0):
        return ((x.view(torch.int32) + add) & -(1 << bits)).view(torch.float32)

    _, exact, squares, a, b = chain(2_000)
    rounded = (keep(a, 13, 1 << 12).double() * keep(b, 13, 1 << 12)).sum(0).float()
    for bits, right in ((13, True), (16, False)):
        cut = (keep(a, bits).double() * keep(b, bits)).sum(0).float()
        if right:
            assert (cut - exact).abs().max() > 2 * (rounded - exact).abs().max()
            check_float32_sums("y", cut, exact, rounded, squares, 2_000, "tf32")
        else:
            with pytest.raises(AssertionError, match="y: error"):
                check_float32_sums("y", cut, exact, rounded, squares, 2_000, "tf32")
