"""Vectors whose squared length overflows or underflows: cosines, gradients and the memory update remain correct."""

import pytest
import torch

from rbm import FusedRbMLayer
from rbm.nn import sparse_rows
from rbm_kernels import cosine_topk, expert_matmul, memory_update_, routed_matmul
from rbm_kernels.ops.cosine_topk import reference
from rbm_kernels.ops.memory_update import reference as update_reference

LENGTHS = [3e38, 1.0, 1e-38, 1e20, 1e30, 1e14, 1e15, 1e16, 3e38, 1e-11, 0.0, 1e-13]
MEMORY_LENGTHS = [1e30, 1.0, 1e-38, 3e38, 2e15]
WIDTHS = [1, 5, 70, 300]


def of_lengths(lengths, width, dtype):
    """The largest number of each row is its length: exactly the order of magnitude that overflows."""
    rows = torch.randn(len(lengths), width)
    rows /= rows.abs().amax(1, keepdim=True)
    return (rows.double() * torch.tensor(lengths)[:, None].double()).to(dtype)


def routed_alike(h, memory, forward, backward):
    exact = reference.cosine_topk(h.double(), memory.double(), 2, 0.7)
    got = forward(h, memory, 2, 0.7)
    torch.testing.assert_close(got[2].double(), exact[2], rtol=0, atol=3e-7)
    torch.testing.assert_close(got[0].double(), exact[0], rtol=0, atol=3e-7)
    # Nearly equal cosines may be swapped.
    every = reference.all_cosines(h.double(), memory.double())
    torch.testing.assert_close(every.gather(1, got[1].long()), exact[2], rtol=0, atol=3e-7)
    grads = torch.randn(h.shape[0], 2), torch.randn(h.shape[0], 2)
    wide = [grad.double() for grad in grads]
    truth = reference.backward(*wide, h.double(), memory.double(), got[0].double(), got[1], exact[2], 0.7)
    found = backward(*grads, h, memory, *got, 0.7).double()
    # Relative to each row's slopes; what lies below float32's normal numbers has few digits.
    size = truth.abs().amax(1, keepdim=True).clamp_min(1e-4 * wide[0].abs().max() / LENGTHS[0])
    half = h.dtype != torch.float32
    allowed = (1e-2 if half else 2e-5) * size + 1e-39 + 1e-6 / h.double().abs().amax(1, keepdim=True).clamp_min(1e-12)
    excess = ((found - truth).abs() / allowed).amax(1)
    assert (excess <= 1).all(), excess


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
class TestFloat32Range:
    def test_cpu_library(self, width, dtype):
        h, memory = of_lengths(LENGTHS, width, dtype), of_lengths(MEMORY_LENGTHS, width, torch.float32)
        routed_alike(
            h,
            memory,
            lambda h, memory, k, t: cosine_topk(h, memory, k, temperature=t),
            lambda *a: torch.ops.rbm.cosine_topk_backward(*a[:-1], temperature=a[-1]),
        )

    def test_reference(self, width, dtype):
        h, memory = of_lengths(LENGTHS, width, dtype), of_lengths(MEMORY_LENGTHS, width, torch.float32)
        routed_alike(h, memory, reference.cosine_topk, reference.backward)

    def test_triton_kernels(self, width, dtype, device):
        launch = pytest.importorskip("rbm_kernels.ops.cosine_topk.launch")
        h, memory = of_lengths(LENGTHS, width, dtype), of_lengths(MEMORY_LENGTHS, width, torch.float32)

        def on_device(function):
            return lambda *a: _to_cpu(function(*[t.to(device) if isinstance(t, torch.Tensor) else t for t in a]))

        routed_alike(h, memory, on_device(launch.cosine_topk), on_device(launch.backward))

    def test_whole_layer_for_few_rows(self, width, dtype, device):
        """Each row in the range that its product with a weight stays in."""
        width = max(width, 3)  # with one feature all cosines are equal, but for a rounding
        launch = pytest.importorskip("rbm_kernels.ops.routed_matmul.launch")
        h = of_lengths([1e-11, 1.0, 1e16, 1e18], width, dtype)
        memory = of_lengths([1e30, 1.0, 3e38], width, torch.float32)
        weight = torch.randn(3, 4, width).to(dtype)
        gates, experts, _ = reference.cosine_topk(h, memory, 2)
        truth = expert_matmul(h, weight, None, gates, experts)
        for got in (
            routed_matmul(h, memory, weight, None, 2),
            launch.routed_matmul(h.to(device), memory.to(device), weight.to(device), None, 2).cpu(),
        ):
            size = truth.double().abs().amax(1, keepdim=True)
            error = ((got.double() - truth.double()).abs() / size).max()
            assert error < (2e-2 if dtype == torch.bfloat16 else 1e-5)


def _to_cpu(result):
    return tuple(t.cpu() for t in result) if isinstance(result, tuple) else result.cpu()


@pytest.mark.parametrize("width", WIDTHS)
def test_float64_range(width):
    """The same directions at lengths that only float64 holds."""
    directions, memory = of_lengths([1.0] * 6, width, torch.float64), of_lengths([1.0] * 4, width, torch.float64)
    lengths = torch.tensor([1e308, 1e200, 1e151, 1e149, 1e-11, 1.0], dtype=torch.float64)[:, None]
    far = memory * torch.tensor([1e308, 1e160, 1.0, 1e-5], dtype=torch.float64)[:, None]
    for forward in (cosine_topk, reference.cosine_topk):
        expected, got = forward(directions, memory, 2), forward(directions * lengths, far, 2)
        torch.testing.assert_close(got[2], expected[2], rtol=0, atol=1e-15)
        assert torch.equal(got[1], expected[1])


def test_nan_and_infinity_among_long_rows_stay_alone():
    h = of_lengths([3e38, 1.0, 1.0, 1e20, 1.0], 9, torch.float32)
    good = cosine_topk(h, memory := torch.randn(4, 9), 2)
    h[1, 3], h[2, 0] = float("nan"), float("inf")
    got = cosine_topk(h, memory, 2)
    assert got[2][1:3].isnan().all()
    for one, other in zip(got, good, strict=True):
        assert torch.equal(one[[0, 3, 4]], other[[0, 3, 4]])
    grad = torch.ones(5, 2)
    found = torch.ops.rbm.cosine_topk_backward(grad, grad, h, memory, *got)
    assert found[[0, 3, 4]].isfinite().all()
    assert torch.equal(found[1], torch.zeros(9))


@pytest.mark.parametrize("update", [memory_update_, update_reference.memory_update_])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_long_memory_moves_from_its_direction(dtype, update):
    largest = 3e38 if dtype == torch.float32 else 1e308
    memory = of_lengths([1.0] * 4, 40, dtype)
    far = memory * torch.tensor([largest, 1e20, 2e15, 1e-11], dtype=dtype)[:, None]
    arguments = torch.randn(4, 40, dtype=dtype), torch.rand(4, dtype=dtype) + 0.5, 0.7
    update(memory, *arguments, normalize=True)
    update(far, *arguments, normalize=True)
    torch.testing.assert_close(far, memory)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_sparse_rows_are_routed_as_dense_ones(mixed, compiled):
    x = of_lengths(LENGTHS, 12, torch.float32)
    x[:, ::3] = 0
    memory = of_lengths(MEMORY_LENGTHS, 12, torch.float32)
    left = x[:, :6] if mixed else x
    rows = sparse_rows.SparseRows(left.to_sparse_csr(), x[:, 6:] if mixed else None)

    def route(values, dense):
        return sparse_rows.cosine_topk(rows._with(values=values, dense=dense), memory, 2)

    if compiled:
        route = torch.compile(route, backend="eager")
    got, expected = route(rows.values, rows.dense), cosine_topk(x, memory, 2)
    torch.testing.assert_close(got[::2], expected[::2], rtol=0, atol=1e-6)
    directed = x.double().norm(dim=1) > 1e-12
    assert torch.equal(got[1][directed], expected[1][directed])


def test_a_layer_answers_long_rows_as_short_ones():
    layer = FusedRbMLayer(8, 3, 4, 2, bias=False).eval()
    x = torch.randn(6, 8)
    x = x / x.abs().amax(1, keepdim=True)
    with torch.no_grad():
        torch.testing.assert_close(layer(x * 2.0**100) * 2.0**-100, layer(x))
