"""The C++ of csrc/cpu at its own boundaries: tiles, panels, chunks, few and many rows, threads.

The semantics of each operator are tested in its own file. Here results are compared with the float64 reference; the
bound is at most twice the error of eager PyTorch in the same dtype, plus a floor.
"""

import ctypes
import os

import pytest
import torch
from cpu_problems import FEW, all_operators, all_operators_in_eager, assert_as_good_as_eager, problem, wide

from rbm_kernels.ops.cosine_topk import reference as routing
from rbm_kernels.ops.expert_matmul import reference
from rbm_kernels.ops.expert_order import reference as ordering

pytestmark = pytest.mark.native
ops = torch.ops.rbm

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

# (B, D, N, E, k), for the reason given.
SHAPES = {
    "one row": (1, 37, 29, 5, 3),
    "narrower than a vector": (9, 3, 2, 4, 2),
    "few rows, last": (FEW, 33, 19, 6, 3),
    "many rows, first": (FEW + 1, 33, 19, 6, 3),
    "a tile and a half of rows": (FEW + 50, 40, 64, 40, 1),
    "columns end in a tile of three vectors": (300, 16, 48, 3, 2),
    "columns end inside a vector": (300, 17, 65, 3, 3),
    "wider than the inner block": (270, 1433, 7, 3, 2),
    "every expert": (280, 21, 23, 4, 4),
    "one expert": (300, 9, 6, 1, 1),
    "more outputs than the inner block": (258, 5, 700, 3, 2),
    "many experts": (520, 24, 31, 33, 8),
    "several panels and pieces": (3000, 20, 18, 4, 3),
}


@pytest.fixture
def nan_where_nothing_was_written():
    """The C library fills new memory with one bits, which are NaN, or -1, to expose unwritten elements.

    PyTorch's own filling (torch.use_deterministic_algorithms) does not reach the tensors that C++ makes.
    """
    if "max_malloc_fill_size" in os.environ.get("ASAN_OPTIONS", ""):  # AddressSanitizer's allocator fills it
        yield
        return
    perturb, c_library = -6, ctypes.CDLL(None)  # M_PERTURB of malloc.h: new bytes become the complement of the lowest
    if not hasattr(c_library, "mallopt") or not c_library.mallopt(perturb, 0x100):
        pytest.skip("this C library cannot fill new memory")
    yield
    c_library.mallopt(perturb, 0)


@pytest.mark.usefixtures("nan_where_nothing_was_written")
def test_new_memory_is_filled():
    assert torch.empty(1000).isnan().all()


@pytest.mark.usefixtures("nan_where_nothing_was_written")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", DTYPES)
def test_expert_matmul(shape, dtype):
    *arguments, _ = problem(shape, dtype)
    truth = all_operators_in_eager(*wide(*arguments))
    assert_as_good_as_eager(all_operators(*arguments), all_operators_in_eager(*arguments), truth, dtype)


# Around every multiple of a vector that a panel may end with, at 16, 32 and 64 bytes a vector.
WIDTHS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 47, 48, 49, 63, 64, 65, 80, 129]


def small_integers(*sizes, dtype):
    """Small integers, whose products and sums are exact in float32: in any order, results must agree bitwise."""
    return torch.randint(-4, 5, sizes).to(dtype)


def assert_exact(x, weight, bias, gates, experts, grad):
    arguments = (x, weight, bias, gates, experts, grad)
    for got, expected in zip(all_operators(*arguments), all_operators_in_eager(*wide(*arguments)), strict=True):
        assert torch.equal(got, expected.to(got.dtype))


@pytest.mark.usefixtures("nan_where_nothing_was_written")
@pytest.mark.parametrize("rows", [10, FEW + 10])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_width(rows, dtype):
    for width in WIDTHS:
        for features, outputs in ((width, 5), (5, width), (width, width)):
            _, _, _, gates, experts, _, _ = problem((rows, 1, 1, 3, 2), dtype)
            assert_exact(
                small_integers(rows, features, dtype=dtype),
                small_integers(3, outputs, features, dtype=dtype),
                small_integers(3, outputs, dtype=dtype),
                torch.randint(1, 4, gates.shape).to(gates.dtype) / 2,
                experts,
                small_integers(rows, outputs, dtype=dtype),
            )


@pytest.mark.usefixtures("nan_where_nothing_was_written")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "counts",
    [range(14), [*range(14), FEW], [FEW - 1], [0, FEW + 1], [127, 128, 129], [0, 256, 257, 0], [1500, 3]],
    ids=["few rows", "many rows", "one few", "one many", "a piece", "two pieces", "nearly all"],
)
def test_every_number_of_rows_of_an_expert(counts, dtype):
    """Tiles of six, four, two and one rows; chunks of 128; unused experts."""
    experts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(list(counts))).int()
    experts = experts[torch.randperm(len(experts))]
    assert_exact(
        small_integers(len(experts), 7, dtype=dtype),
        small_integers(len(counts), 9, 7, dtype=dtype),
        small_integers(len(counts), 9, dtype=dtype),
        torch.randint(1, 4, (len(experts), 1)).to(torch.float64 if dtype == torch.float64 else torch.float32) / 2,
        experts[:, None],
        small_integers(len(experts), 9, dtype=dtype),
    )


@pytest.mark.usefixtures("nan_where_nothing_was_written")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [5, FEW + 9])
def test_without_bias_and_without_gates(rows, dtype):
    x, weight, _, gates, experts, grad, _ = problem((rows, 19, 21, 5, 2), dtype)
    arguments = (x, weight, None, gates, experts)
    got = (
        ops.expert_matmul(*arguments),
        ops.expert_matmul_backward_input(grad, *arguments)[1],
        ops.expert_matmul_backward_input(grad, *arguments, False)[0],
        ops.expert_matmul_backward_weight(grad, x, gates, experts, 5, False)[0],
    )
    eager, truth = (
        (
            reference.expert_matmul(*a),
            reference.backward_input(g, *a)[1],
            reference.backward_input(g, *a)[0],
            reference.backward_weight(g, a[0], a[3], a[4], 5)[0],
        )
        for a, g in ((arguments, grad), (wide(*arguments), grad.double()))
    )
    assert_as_good_as_eager(got, eager, truth, dtype)
    assert ops.expert_matmul_backward_input(grad, *arguments, False)[1].numel() == 0
    assert ops.expert_matmul_backward_weight(grad, x, gates, experts, 5, False)[1].numel() == 0


@pytest.mark.usefixtures("nan_where_nothing_was_written")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", DTYPES)
def test_cosine_topk(shape, dtype):
    h, *_, memory = problem(shape, dtype)
    k = shape[-1]
    gates, experts, cosines = ops.cosine_topk(h, memory, k, temperature=0.7)
    truth = routing.cosine_topk(*wide(h, memory), k, 0.7)
    eager = routing.cosine_topk(h, memory, k, 0.7)
    # Compare the cosines of the chosen experts: near-ties may go either way.
    pointed = routing.cosine_topk(*wide(h, memory), memory.shape[0])
    by_expert = torch.zeros_like(pointed[2]).scatter(1, pointed[1].long(), pointed[2])
    found = by_expert.gather(1, experts.long()).to(cosines.dtype)
    accumulated = torch.float64 if dtype == torch.float64 else torch.float32
    assert_as_good_as_eager(
        (gates, cosines, found), (eager[0], eager[2], eager[2]), (*truth[::2], truth[2]), accumulated
    )

    grads = torch.randn_like(gates), torch.randn_like(cosines)
    for pair in (grads, (None, grads[1]), (grads[0], None)):
        outputs = (h, memory, gates, experts, cosines)
        got = ops.cosine_topk_backward(*pair, *outputs, temperature=0.7)
        exact = routing.backward(*wide(*pair), *wide(*outputs), 0.7)
        theirs = routing.backward(*pair, *outputs, 0.7)
        assert_as_good_as_eager((got,), (theirs,), (exact,), dtype)


@pytest.mark.parametrize("num_experts", [5, 8, 9, 13])
@pytest.mark.parametrize("features", [5, 64, 100])
def test_equal_memory_vectors_have_equal_cosines_wherever_they_stand(num_experts, features):
    memory = torch.randn(1, features).expand(num_experts, features)
    _, experts, cosines = ops.cosine_topk(torch.randn(203, features), memory, num_experts)
    assert torch.equal(experts, torch.arange(num_experts, dtype=torch.int32).expand(203, num_experts))
    assert torch.equal(cosines, cosines[:, :1].expand_as(cosines))


def test_rows_do_not_depend_on_their_neighbours():
    """Bitwise, as long as both parts take the same path: more rows than FEW, or not."""
    x, weight, bias, gates, experts, _, memory = problem((4 * FEW, 45, 50, 7, 3), torch.float32)
    routed = ops.cosine_topk(x, memory, 3)
    whole = ops.expert_matmul(x, weight, bias, gates, experts)
    shuffled = torch.randperm(len(x))
    for part in (shuffled, torch.arange(len(x) - 3), torch.arange(7, FEW + 8)):
        for got, expected in zip(ops.cosine_topk(x[part], memory, 3), routed, strict=True):
            assert torch.equal(got, expected[part])
        assert torch.equal(ops.expert_matmul(x[part], weight, bias, gates[part], experts[part]), whole[part])
    few = torch.arange(9)
    torch.testing.assert_close(ops.expert_matmul(x[few], weight, bias, gates[few], experts[few]), whole[few])


@pytest.mark.parametrize("rows", [3, FEW, 2000])
def test_threads_do_not_change_a_bit(threads, rows):
    """Stronger than documented (the same bits for the same number of threads), since no sum is split."""
    *arguments, memory = problem((rows, 70, 90, 6, 3), torch.float32)

    def run():
        routed = ops.cosine_topk(arguments[0], memory, 3)
        back = ops.cosine_topk_backward(routed[0], routed[2], arguments[0], memory, *routed)
        return *all_operators(*arguments), *routed, back, *ops.expert_order(arguments[4], 6, 16)

    results = []
    for count in (1, 2, 2, 3):
        threads(count)
        results.append(run())
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("rows", [20, FEW + 20])
@pytest.mark.parametrize("layout", ["wide rows", "every second row", "columns first", "one row repeated"])
def test_strides(layout, rows):
    x, weight, bias, gates, experts, grad, memory = problem((rows, 24, 12, 5, 2), torch.float32)

    def lay(t):
        return {
            "wide rows": lambda: torch.cat([t, t, t], 1)[:, t.shape[1] : 2 * t.shape[1]],
            "every second row": lambda: t.repeat_interleave(2, 0)[::2],
            "columns first": lambda: t.T.contiguous().T,
            "one row repeated": lambda: t[:1].expand_as(t),
        }[layout]()

    laid = lay(x), weight.transpose(1, 2).contiguous().transpose(1, 2), lay(bias), lay(gates), lay(experts), lay(grad)
    plain = [t.contiguous() for t in laid]
    for got, expected in zip(all_operators(*laid), all_operators(*plain), strict=True):
        assert torch.equal(got, expected)
    for got, expected in zip(
        ops.cosine_topk(laid[0], lay(memory), 2), ops.cosine_topk(plain[0], lay(memory).contiguous(), 2), strict=True
    ):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("rows", [11, FEW + 11])
def test_skewed_repeated_and_unused_experts(rows):
    x, weight, bias, gates, experts, grad, _ = problem((rows, 18, 14, 6, 2), torch.float64)
    weight[5] = float("nan")  # unused, so it has no effect
    for chosen in (torch.full_like(experts, 3), torch.stack([experts[:, 0] % 2, experts[:, 0] % 2], 1)):
        got = all_operators(x, weight, bias, gates, chosen, grad)
        weight_of_used = weight.nan_to_num()
        expected = all_operators_in_eager(x, weight_of_used, bias, gates, chosen, grad)
        for ours, exact in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, exact)


def test_a_row_that_is_not_finite_harms_no_other():
    for rows in (10, FEW + 10):
        x, weight, bias, gates, experts, _, memory = problem((rows, 20, 15, 5, 3), torch.float32)
        good = ops.expert_matmul(x, weight, bias, gates, experts), *ops.cosine_topk(x, memory, 3)
        x[4, 2], x[7, 19] = float("nan"), float("inf")
        others = torch.tensor([b for b in range(rows) if b not in (4, 7)])
        bad = ops.expert_matmul(x, weight, bias, gates, experts), *ops.cosine_topk(x, memory, 3)
        assert all(torch.equal(a[others], b[others]) for a, b in zip(good, bad, strict=True))
        assert bad[0][4].isnan().all()
        assert torch.equal(bad[2][4], torch.arange(3, dtype=torch.int32))
        assert bad[1][4].isnan().all()


def test_one_nan_cosine_ranks_first():
    memory = torch.eye(4)
    memory[2] = float("nan")
    _, experts, _ = ops.cosine_topk(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), memory, 3)
    _, expected, _ = routing.cosine_topk(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), memory, 3)
    assert torch.equal(experts, expected)


@pytest.mark.parametrize(("features", "outputs"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("rows", [0, 3, FEW + 3])
def test_nothing_to_multiply(rows, features, outputs):
    *arguments, memory = problem((rows, max(features, 1), max(outputs, 1), 4, 2), torch.float64)
    x, weight, bias, gates, experts, grad = arguments
    arguments = (x[:, :features], weight[:, :outputs, :features], bias[:, :outputs], gates, experts, grad[:, :outputs])
    for got, expected in zip(all_operators(*arguments), all_operators_in_eager(*arguments), strict=True):
        torch.testing.assert_close(got, expected)
    for got, expected in zip(
        ops.cosine_topk(x[:, :features], memory[:, :features], 2),
        routing.cosine_topk(x[:, :features], memory[:, :features], 2),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("num_experts", "k"), [(8, 3), (5, 5), (1, 1), (64, 8), (30, 6)])
def test_expert_order(num_experts, k):
    """64 choose 8 sets are too many to count: those are sorted."""
    experts = torch.rand(700, num_experts).argsort(-1)[:, :k].int()
    got = ops.expert_order(experts, num_experts, 48)
    for ours, expected in zip(got, ordering.expert_order(experts, num_experts, 48), strict=True):
        assert torch.equal(ours, expected)


def test_order_of_sets_beyond_64_bits():
    with pytest.raises(RuntimeError, match="expert_order: there are more than 2\\^63 sets of up to 60 of 128 experts"):
        ops.expert_order(torch.arange(60, dtype=torch.int32)[None], 128, 16)


@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1])
@pytest.mark.parametrize("rows", [4, FEW + 4])
def test_expert_out_of_range(rows, bad):
    x, weight, bias, gates, experts, grad, memory = problem((rows, 6, 5, 5, 2), torch.float32)
    experts[2, 1] = bad
    message = f"experts holds {bad} in row 2, expected between 0 and 4"
    for call in (
        lambda: ops.expert_matmul(x, weight, bias, gates, experts),
        lambda: ops.expert_matmul_backward_input(grad, x, weight, bias, gates, experts),
        lambda: ops.expert_matmul_backward_weight(grad, x, gates, experts, 5),
        lambda: ops.expert_order(experts, 5, 16),
        lambda: ops.cosine_topk_backward(gates, gates, x, memory, gates, experts, gates),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()


def test_bad_arguments_past_the_python_functions():
    x, weight, bias, gates, experts, grad, memory = problem((4, 6, 5, 3, 2), torch.float32)
    for call, message in (
        (lambda: ops.expert_matmul(x, weight[:, :, :5], bias, gates, experts), "weight has shape"),
        (lambda: ops.expert_matmul(x, weight.double(), bias, gates, experts), "weight has dtype float64"),
        (lambda: ops.expert_matmul(x, weight, bias[:2], gates, experts), "bias has shape"),
        (lambda: ops.expert_matmul(x, weight, bias, gates[:3], experts), "gates has shape"),
        (lambda: ops.expert_matmul(x, weight, bias, gates, experts.long()), "experts has dtype int64"),
        (lambda: ops.expert_matmul_backward_input(grad[:3], x, weight, bias, gates, experts), "grad has shape"),
        (lambda: ops.expert_matmul_backward_weight(grad[:3], x, gates, experts, 3), "grad has shape"),
        (lambda: ops.expert_matmul_backward_weight(grad, x, gates, experts, 0), "num_experts is 0"),
        (lambda: ops.cosine_topk(x, memory[:, :4], 2), "memory has shape"),
        (lambda: ops.cosine_topk(x, memory, 4), "k is 4, expected between 1 and 3 experts"),
        (lambda: ops.cosine_topk(x, memory, 2, temperature=0.0), "temperature is 0"),
        (lambda: ops.cosine_topk(x.int(), memory, 2), "h has dtype int32"),
        (lambda: ops.expert_order(experts, 3, 0), "block_m is 0"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()


def test_the_error_of_the_weights_gradients_does_not_grow_with_the_rows():
    """Sums in parts. When the 60,000 rows of the bias were added one after the other, its error was 5.3e-6."""
    generator = torch.Generator().manual_seed(0)
    x, grad = torch.randn(60_000, 8, generator=generator), torch.randn(60_000, 24, generator=generator)
    gates, experts = torch.rand(60_000, 1, generator=generator), torch.zeros(60_000, 1, dtype=torch.int32)
    got = ops.expert_matmul_backward_weight(grad, x, gates, experts, 1, True)
    expected = reference.backward_weight(grad.double(), x.double(), gates.double(), experts, 1)
    for one, other in zip(got, expected, strict=True):
        assert (one.double() - other).norm() < 8e-7 * other.norm()
