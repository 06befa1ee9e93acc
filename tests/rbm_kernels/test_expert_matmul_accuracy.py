"""The grouped matmul where sums are long, where numbers are small, and where they are not finite."""

import numpy as np
import pytest
import torch
from known_triton import MOST_SPILLED
from matmul_problems import DEVICE, error_of_share, in_float64, problem

pytest.importorskip("triton")

from rbm_kernels import cosine_topk, expert_matmul, expert_order, routed_matmul
from rbm_kernels._ahead_of_time import compile_for_all
from rbm_kernels.ops.expert_matmul import config, launch, reference
from rbm_kernels.ops.routed_matmul import launch as routed

pytestmark = [
    pytest.mark.usefixtures("one_thread", "device"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),  # NumPy's, of the interpreter
]


def added_in_order(a, b, slice_rows):
    """The sum of ``a[b]^T b[b]`` in float32, row after row, each slice by itself first, as a GPU fuses them."""
    total = np.zeros((a.shape[1], b.shape[1]), np.float32)
    for first in range(0, len(a), slice_rows):
        of_slice = np.zeros_like(total)
        for row, other in zip(a[first : first + slice_rows], b[first : first + slice_rows], strict=True):
            of_slice = (of_slice + np.multiply.outer(row.astype(np.float64), other)).astype(np.float32)
        total += of_slice
    return total


def test_the_error_of_a_share_of_the_weights_gradient():
    """At the reference shape on an H100, of one share of one expert, 32 x 32 of its sums, in the kernel's own order.

    Let u = 2^-24 and let n products of standard deviation s be added, m rows to a slice. A partial sum of t products is
    a random walk, of standard deviation s sqrt(t), and rounding it adds an error that is spread evenly over at most
    u times it to both sides: a variance of at most u^2 s^2 t / 3. Over the n / m sums of slices, t = m, 2m, ..., n,
    that is u^2 s^2 n^2 / (6 m). Within a slice it is u^2 s^2 m^2 / 6, over all slices u^2 s^2 n m / 6. Together

        u s sqrt(n (n / m + m) / 6),

    1.4e-5 for the 8,768 rows of a share in slices of 32, where s = 0.35, and 7.5e-5 in one chain (m = n, or m = 1: the
    same). The c shares of an expert add sqrt(c) times that: 3.8e-5 for the 7.2 of 63,504 rows. The largest of
    E N D = 524,288 errors is 5 standard deviations, 1.9e-4: below the bound of check_error, twice eager PyTorch's error
    (1.5e-4 on a CPU) and one rounding of the largest sum (4e-5), which 1.0e-3 of one chain is not.
    """
    tile = config.weight_tile(90, "ieee", 169_343, 256, 256)
    rows = config.share_rows(90, "ieee", tile, 4, 169_343 * 3, 8)
    assert (rows, tile.block_k) == (8_768, 32)
    generator = np.random.default_rng(0)
    x, grad = generator.standard_normal((2, rows, 32), np.float32)
    gates = torch.rand(rows, 3).softmax(-1)[:, :1].numpy()
    scaled = grad * gates
    exact = scaled.astype(np.float64).T @ x.astype(np.float64)
    std = float((gates.astype(np.float64) ** 2).mean() ** 0.5)
    errors = {m: np.abs(added_in_order(scaled, x, m) - exact) for m in (tile.block_k, rows)}
    for slice_rows, error in errors.items():
        expected = error_of_share(rows, slice_rows, std)
        assert 0.4 * expected < (error**2).mean() ** 0.5 < expected
        assert error.max() < 6 * expected
    assert errors[rows].max() > 4 * errors[tile.block_k].max()


def test_the_compiler_sums_by_slices():
    """``sums += dot(a, b)`` becomes ``dot(a, b, sums)``, one chain, where nothing keeps Triton's compiler from it.

    Then no addition is left: without a bias every other one is part of a multiplication.
    """
    program = (
        "import torch\n"
        "from rbm_kernels.ops.expert_matmul import launch\n"
        "x = torch.empty(169_343, 256, device='meta')\n"
        "gates = torch.empty(169_343, 3, device='meta')\n"
        "launch.backward_weight(x, x, gates, gates.int(), 8, False)\n"
    )
    compiled = compile_for_all([program], [80, 90], before="import torch, triton")
    for architecture, launches in compiled.items():
        kernel = {kernel.name: kernel for _, kernel in launches}["expert_matmul_bwd_weight_kernel"]
        sums = kernel.blocks["BLOCK_M"] * kernel.blocks["BLOCK_N"] // (32 * kernel.num_warps)
        additions = sum(count for name, count in kernel.instructions.items() if name.startswith("FADD"))
        assert additions >= sums, architecture
        assert kernel.spilled_bytes <= MOST_SPILLED, architecture


def worst(got, exact):
    """The largest error, in units of the rounding of the largest number."""
    return float((got.double() - exact).abs().max() / exact.abs().max()) / torch.finfo(got.dtype).eps


def test_small_float16_rows():
    """Rows and gradients of 1e-6, below float16's smallest normal number of 6e-5, under weights of a thousand.

    Rounding a gate times a row would cost several percent; what is left is the rounding of the result.
    """
    x, weight, bias, gates, experts, grad = problem((40, 48, 32, 6, 3), torch.float16)
    x, grad, weight, bias = x * 1e-6, grad * 1e-6, weight * 1e3, bias * 1e-4
    assert 0 < x.abs().median() < torch.finfo(torch.float16).tiny
    arguments = x, weight, bias, gates, experts
    exact = in_float64(arguments)
    assert worst(launch.expert_matmul(*arguments), reference.expert_matmul(*exact)) <= 1
    exact_grad_x, _ = reference.backward_input(grad.double(), *exact)
    for with_gates in (False, True):
        assert worst(launch.backward_input(grad, *arguments, with_gates)[0], exact_grad_x) <= 1


def test_small_float16_gates():
    """Gates of 1e-4 beside large ones, and rows that use nothing else."""
    x, weight, bias, gates, experts, grad = problem((40, 48, 32, 6, 3), torch.float16)
    gates[:, 1] = 1e-4
    gates[:20] = 1e-4
    arguments = x * 1e-2, weight * 10, bias * 1e-2, gates, experts
    exact = in_float64(arguments)
    got, expected = launch.expert_matmul(*arguments), reference.expert_matmul(*exact)
    assert worst(got[:20], expected[:20]) <= 1
    assert worst(got, expected) <= 1
    got, _ = launch.backward_input(grad, *arguments, False)
    expected, _ = reference.backward_input(grad.double(), *exact)
    assert worst(got[:20], expected[:20]) <= 1


def test_small_float16_gradients_of_the_weight():
    """Gradients of 1e-6 meet rows of a thousand: it is the rows that take the gate."""
    x, _, _, gates, experts, grad = problem((40, 48, 32, 6, 3), torch.float16)
    x, grad = x * 1e3, grad * 1e-6
    got, _ = launch.backward_weight(grad, x, gates, experts, 6)
    exact, _ = reference.backward_weight(*in_float64((grad, x, gates, experts)), 6)
    assert worst(got, exact) <= 1


NAN, INF = float("nan"), float("inf")
BAD = 2  # the expert whose numbers are not finite


def with_a_bad_expert(dtype, rows=84):
    """Infinity in a weight and NaN in a bias of one expert; the first half of the rows never uses it."""
    chosen = torch.tensor([[0, 1], [1, 3], [0, 3]]).repeat(rows // 6, 1)
    chosen = torch.cat([chosen, torch.tensor([[0, 1], [1, BAD], [BAD, 3]]).repeat(rows // 6, 1)])
    x, weight, bias, gates, experts, grad = problem((rows, 20, 18, 4, 2), dtype, chosen=chosen)
    weight[BAD, 3, 4], bias[BAD, 5] = INF, NAN
    return x, weight, bias, gates, experts, grad, (experts == BAD).any(1)


def finite_rows(*outputs):
    return torch.stack([output.isfinite().all(1) for output in outputs]).all(0)


@pytest.mark.skipif(DEVICE != "cpu", reason="tests the operators of the CPU")
def test_a_bad_expert_on_the_cpu_reaches_its_own_rows_alone():
    for rows in (84, 600):  # few rows, and many
        x, weight, bias, gates, experts, grad, uses_bad = with_a_bad_expert(torch.float32, rows)
        y = expert_matmul(x, weight, bias, gates, experts)
        grad_x, grad_gates = torch.ops.rbm.expert_matmul_backward_input(grad, x, weight, bias, gates, experts)
        assert torch.equal(finite_rows(y), ~uses_bad)
        assert torch.equal(finite_rows(grad_x), ~uses_bad)
        assert torch.equal(grad_gates.isfinite(), experts != BAD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_a_bad_expert_in_the_kernels_reaches_its_own_rows_alone(dtype):
    x, weight, bias, gates, experts, grad, uses_bad = with_a_bad_expert(dtype)
    order = expert_order(experts, 4, 16)
    assert any(0 < uses_bad[tile].sum() < len(tile) for tile in order.order.long().split(16)), "no tile has both"
    y = launch.expert_matmul(x, weight, bias, gates, experts, *order)
    alone, _ = launch.backward_input(grad, x, weight, bias, gates, experts, False, *order)
    grad_x, grad_gates = launch.backward_input(grad, x, weight, bias, gates, experts, True, *order)
    for rows in (y, alone, grad_x):
        assert torch.equal(finite_rows(rows), ~uses_bad)
    assert torch.equal(grad_gates.isfinite(), experts != BAD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_a_bad_expert_of_the_routed_kernel_reaches_its_own_rows_alone(dtype):
    x, weight, bias, *_ = with_a_bad_expert(dtype)
    memory = torch.randn(4, 20, device=DEVICE)
    _, experts, _ = cosine_topk(x[:60], memory, 2)
    uses_bad = (experts == BAD).any(1)
    assert 0 < uses_bad.sum() < 60
    assert torch.equal(finite_rows(routed.routed_matmul(x[:60], memory, weight, bias, 2)), ~uses_bad)
    assert torch.equal(finite_rows(routed_matmul(x[:60], memory, weight, bias, 2)), ~uses_bad)


def test_a_bad_expert_in_the_reference_reaches_every_row():
    x, weight, bias, gates, experts, grad, _ = with_a_bad_expert(torch.float32)
    assert not finite_rows(reference.expert_matmul(x, weight, bias, gates, experts)).any()
    assert not finite_rows(reference.backward_input(grad, x, weight, bias, gates, experts)[0]).any()


@pytest.mark.parametrize("rows", [84, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("bad", ["x", "grad"])
def test_a_bad_row_reaches_its_own_experts_alone(bad, dtype, rows):
    """Its result and the gradients of its own experts; in the reference, the gradients of all experts."""
    x, weight, bias, gates, experts, grad = problem((rows, 20, 18, 6, 2), dtype)
    (x if bad == "x" else grad)[7, 3] = INF
    others = torch.arange(rows, device=DEVICE) != 7
    used = torch.zeros(6, dtype=torch.bool, device=DEVICE)
    used[experts[7].long()] = True
    implementations = {
        "kernels": (launch.expert_matmul, launch.backward_input, launch.backward_weight),
        "operators": (
            torch.ops.rbm.expert_matmul,
            torch.ops.rbm.expert_matmul_backward_input,
            torch.ops.rbm.expert_matmul_backward_weight,
        ),
    }
    for name, (forward, backward_input, backward_weight) in implementations.items():
        y = forward(x, weight, bias, gates, experts)
        grad_x, _ = backward_input(grad, x, weight, bias, gates, experts)
        grad_weight, grad_bias = backward_weight(grad, x, gates, experts, 6)
        assert finite_rows(y, grad_x)[others].all(), name
        assert not finite_rows(y if bad == "x" else grad_x)[7], name
        assert torch.equal(finite_rows(grad_weight.flatten(1)), ~used), name
        assert torch.equal(finite_rows(grad_bias), ~used if bad == "grad" else torch.ones_like(used)), name
    assert not finite_rows(reference.backward_weight(grad, x, gates, experts, 6)[0].flatten(1)).any()
