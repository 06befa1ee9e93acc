"""The grouped matmul on a GPU: ``y`` and all four gradients against the float64 reference, precision by precision."""

from itertools import combinations

import pytest
import torch
from matmul_on_gpu import DTYPES, NAMES, by_operators, by_reference, check, check_operators
from matmul_problems import check_error, in_float64, problem
from on_gpu import (
    OperatorOnGpu,
    check_compiled,
    check_devices,
    check_peak,
    float32_products,
    full_only,
    same_bits,
)

from rbm_kernels import expert_matmul, expert_order
from rbm_kernels.ops.expert_matmul import config, reference

PRECISIONS = ["bfloat16", "ieee", *full_only("tf32", "float16")]
# (B, D, N, E, k) on the GPU and in the rehearsal, which leaves out what has no shape there.
SHAPES = {
    "reference": ((169_343, 256, 256, 8, 3), (20, 24, 32, 5, 3)),
    "1,433 features": ((2_708, 1_433, 256, 8, 3), (17, 133, 20, 4, 3)),
    "8,415 features": ((4_001, 8_415, 256, 5, 2), None),
    "47 features and outputs": ((18_333, 47, 47, 8, 3), (9, 47, 47, 3, 2)),
    "N below a tile": ((2_708, 256, 7, 8, 3), (20, 16, 7, 4, 2)),
    "one output": ((2_708, 100, 1, 8, 3), None),
    "1,024 features and outputs": ((18_333, 1_024, 1_024, 8, 3), None),
    "one expert": ((5_000, 64, 96, 1, 1), (19, 8, 9, 1, 1)),
    "all experts": ((5_000, 64, 96, 4, 4), None),
    "33 experts in two passes": ((18_333, 128, 128, 33, 3), (14, 16, 12, 33, 3)),
    "64 experts in three passes": ((18_333, 128, 130, 64, 3), None),
    "64 experts in four passes": ((169_343, 256, 256, 64, 8), None),
    "a row short of a tile": ((127, 64, 64, 8, 3), None),
    "one row": ((1, 33, 17, 3, 2), None),
    "no rows": ((0, 8, 9, 3, 2), (0, 8, 9, 3, 2)),
}
CORE = ("reference",)
CASES = [
    pytest.param(*shapes, id=name, marks=[pytest.mark.core] * (name in CORE) + [pytest.mark.gpu] * (shapes[1] is None))
    for name, shapes in SHAPES.items()
]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("full", "small"), CASES)
def test_shapes(full, small, precision, gpu):
    arguments = problem(gpu.size(full, small), DTYPES[precision], device=gpu.name)
    check_operators(arguments, precision)


@pytest.mark.parametrize("precision", ["bfloat16", *full_only("ieee")])
@pytest.mark.parametrize("k", [8, *full_only(1, 2, 3, 4, 5, 6, 7)])
def test_top_k(k, precision, gpu):
    arguments = problem((gpu.size(5_000, 12), 48, 40, 8, k), DTYPES[precision], device=gpu.name)
    check_operators(arguments, precision)


@pytest.mark.parametrize("precision", ["bfloat16", *full_only("ieee", "tf32")])
@pytest.mark.parametrize("passes", [2, *full_only(3, 5, 8)])
def test_passes(passes, precision, gpu):
    arguments = problem((gpu.size(5_000, 12), 48, 40, gpu.size(16, 9), 8), DTYPES[precision], device=gpu.name)
    order = expert_order(arguments[4], gpu.size(16, 9), gpu.size(128, 16), passes)
    check_operators(arguments, precision, order)


@pytest.mark.parametrize("precision", ["bfloat16", *full_only("ieee")])
@pytest.mark.parametrize("block_m", [7, *full_only(1, 16, 32, 64, 128, 200)])
def test_any_height_of_tile(block_m, precision, gpu):
    """Below, between and above the kernels' own heights, which the order does not know."""
    arguments = problem((gpu.size(3_000, 20), gpu.size(64, 24), 40, 4, 2), DTYPES[precision], device=gpu.name)
    check_operators(arguments, precision, expert_order(arguments[4], 4, block_m))


@pytest.mark.parametrize("precision", ["bfloat16", *full_only("ieee")])
@pytest.mark.parametrize("experts", ["spellings of one set", *full_only("one set", "one expert without rows")])
def test_sets(experts, precision, gpu):
    rows = gpu.size(6_000, 18)
    chosen = {
        "one set": torch.tensor([[0, 2, 3]]).expand(rows, 3),
        "spellings of one set": torch.tensor([[3, 1, 0], [1, 0, 3], [0, 3, 1]]).repeat(rows // 3, 1),
        "one expert without rows": torch.rand(rows, 4).argsort(-1)[:, :3],
    }[experts]
    x, weight, bias, gates, *rest = problem((rows, 40, 36, 5, 3), DTYPES[precision], chosen=chosen, device=gpu.name)
    if experts == "spellings of one set":
        gates = torch.full_like(gates, 1 / 3)
    arguments = (x, weight, bias, gates, *rest)
    check_operators(arguments, precision)
    *_, grad_weight, grad_bias = by_operators(*arguments)
    assert (grad_weight[4] == 0).all()
    assert (grad_bias[4] == 0).all()


@pytest.mark.parametrize("precision", ["ieee", *full_only("bfloat16")])
def test_strides(precision, gpu):
    rows = gpu.size(2_000, 12)
    x, weight, bias, gates, experts, grad = problem((rows, 24, 18, 5, 3), DTYPES[precision], device=gpu.name)
    wide = torch.randn(2 * rows, 40, device=gpu.name).to(x.dtype)
    wide[::2, 5:29] = x
    columns = torch.zeros(rows, 6, dtype=torch.int32, device=gpu.name)
    columns[:, ::2] = experts
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    gates, scattered = gates.T.contiguous().T, grad.T.contiguous().T
    check_operators((wide[::2, 5:29], turned, bias, gates, columns[:, ::2], scattered), precision)
    one_column, one_row = bias[:, :1].expand(-1, 18), grad[:1].expand(rows, -1)
    check_operators((x.T.contiguous().T, weight, one_column, gates, experts, one_row), precision)


# What autograd may ask for, of x, weight, bias and gates, with a bias and without.
SUBSETS = [subset for size in range(1, 5) for subset in combinations(range(4), size)]
REHEARSED_SUBSETS = [(0,), (1, 2), (0, 1, 2, 3)]


@pytest.mark.parametrize("with_bias", [True, *full_only(False)], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    "wanted", [pytest.param(s, marks=[pytest.mark.gpu] * (s not in REHEARSED_SUBSETS), id=str(s)) for s in SUBSETS]
)
def test_partial_gradients(wanted, with_bias, gpu):
    arguments = list(problem((gpu.size(2_000, 24), 40, 36, 6, 2), device=gpu.name))
    if not with_bias:
        arguments[2], wanted = None, tuple(index for index in wanted if index != 2)
        if not wanted:
            arguments[2] = None
            assert not expert_matmul(*arguments[:5]).requires_grad
            return
    leaves = [None if t is None else t.requires_grad_(i in wanted) for i, t in enumerate(arguments[:4])]
    y = expert_matmul(*leaves, arguments[4])
    given = dict(zip(wanted, torch.autograd.grad(y, [leaves[i] for i in wanted], arguments[5]), strict=True))
    detached = [t if t is None else t.detach() for t in arguments]
    results = (y.detach(), given.get(0), given.get(3), None, given.get(1), given.get(2))
    check(results, detached)


def test_expanded_gradient(gpu):
    """``sum().backward()`` sends one number with strides of zero."""
    arguments = list(problem((gpu.size(2_000, 24), 40, 36, 5, 2), device=gpu.name))
    arguments[5] = arguments[5].new_ones(1, 1).expand_as(arguments[5])
    leaves = [t.requires_grad_() for t in arguments[:4]]
    y = expert_matmul(*leaves, arguments[4])
    grad_x, grad_weight, grad_bias, grad_gates = torch.autograd.grad(y.sum(), leaves)
    check((y.detach(), grad_x, grad_gates, None, grad_weight, grad_bias), [t.detach() for t in arguments])


@pytest.mark.core
@pytest.mark.parametrize("precision", ["bfloat16", *full_only("ieee", "float16")])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of the interpreter
def test_bad_rows_stay_alone(precision, gpu):
    """A row that is not a number spoils its own results, and its experts' weights, and no other row's."""
    rows = gpu.size(3_000, 20)
    x, weight, bias, gates, experts, grad = problem((rows, 40, 36, 9, 2), DTYPES[precision], device=gpu.name)
    experts[3] = torch.tensor([4, 7], device=gpu.name)
    clean = by_operators(x, weight, bias, gates, experts, grad)
    spoilt, others = x.clone(), torch.arange(rows, device=gpu.name) != 3
    spoilt[3, 5] = float("nan")
    got = by_operators(spoilt, weight, bias, gates, experts, grad)
    for name, a, b in zip(NAMES[:4], got, clean, strict=False):
        same_bits([a[others]], [b[others]], name)
    assert got[0][3].isnan().all()
    assert got[2][3].isnan().all()
    for grad_of, before in ((got[4], clean[4]), (got[5], clean[5])):
        untouched = [0, 1, 2, 3, 5, 6, 8]
        same_bits([grad_of[untouched]], [before[untouched]], "other experts")
    assert got[4][[4, 7], :, 5].isnan().all()


@pytest.mark.parametrize("direction", ["forward", "backward input", "backward weight"])
def test_beyond_31_bits(direction, gpu):
    """B * D and B * N pass 2^31. Small whole numbers and gates of one make every sum exact, in bfloat16 too."""
    rows = gpu.size(2**31 // 256 + 100, 110)

    def work():
        generator = torch.Generator(gpu.name).manual_seed(0)

        def whole(*shape):
            drawn = torch.randint(-1, 2, shape, generator=generator, device=gpu.name, dtype=torch.int8)
            return drawn.to(torch.bfloat16)

        x = torch.zeros(rows, 256, device=gpu.name, dtype=torch.bfloat16)
        x[-100:] = whole(100, 256)
        weight, bias = whole(4, 256, 256), whole(4, 256)
        experts = torch.randint(0, 4, (rows, 1), generator=generator, device=gpu.name, dtype=torch.int32)
        gates = torch.ones(rows, 1, device=gpu.name)
        last = [t[-100:] for t in (gates, experts)]
        if direction == "forward":
            y = expert_matmul(x, weight, None, gates, experts)
            assert torch.equal(y[-100:], reference.expert_matmul(x[-100:], weight, None, *last))
            assert not y[:-100].any()
            return
        grad = torch.zeros(rows, 256, device=gpu.name, dtype=torch.bfloat16)
        grad[-100:] = whole(100, 256)
        if direction == "backward weight":
            got = torch.ops.rbm.expert_matmul_backward_weight(grad, x, gates, experts, 4)
            same_bits(got, reference.backward_weight(grad[-100:], x[-100:], *last, 4), direction)
            return
        got = torch.ops.rbm.expert_matmul_backward_input(grad, x, weight, bias, gates, experts)
        same_bits(
            [t[-100:] for t in got], reference.backward_input(grad[-100:], x[-100:], weight, bias, *last), direction
        )
        assert not any(t[:-100].any() for t in got)

    # Two or three tensors of rows, masks of their elements, and the routing.
    gpu.with_memory(rows * 256 * (2 * 3 + 1) + rows * 256, work)


def test_the_rule_cuts_passes(gpu):
    """The shapes above take the passes that their names say: a new rule must not empty them."""
    passes = {name: config.passes(full[0], full[3], full[4]) for name, (full, _) in SHAPES.items()}
    assert {name: number for name, number in passes.items() if number > 1} == {
        "33 experts in two passes": 2,
        "64 experts in three passes": 3,
        "64 experts in four passes": 4,
    }


# (B, D, N, E, k): one pass, and several.
DRAWN = [
    pytest.param((18_333, 128, 128, 8, 3), "bfloat16", id="one pass", marks=pytest.mark.core),
    pytest.param((18_333, 128, 128, 8, 3), "ieee", id="one pass, ieee", marks=pytest.mark.gpu),
    pytest.param((18_333, 128, 47, 8, 3), "tf32", id="one pass, tf32", marks=pytest.mark.gpu),
    pytest.param((18_333, 128, 128, 64, 3), "bfloat16", id="three passes", marks=[pytest.mark.gpu, pytest.mark.core]),
]


def step(x, weight, bias, gates, experts, grad):
    """Forward and all gradients."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias, gates)]
    y = expert_matmul(*leaves, experts)
    return y.detach(), *torch.autograd.grad(y, leaves, grad)


@pytest.mark.parametrize(("shape", "precision"), DRAWN)
class TestOperator(OperatorOnGpu):
    @pytest.fixture(autouse=True)
    def _products(self, precision):
        with float32_products("tf32" if precision == "tf32" else "ieee"):
            yield

    @pytest.fixture
    def call(self):
        return step

    @pytest.fixture
    def draw(self, shape, precision, gpu):
        shape = gpu.size(shape, (12, 16, 12, 3, 2))
        return lambda seed: problem(shape, DTYPES[precision], seed, device=gpu.name)


@pytest.mark.parametrize("shape", [(18_333, 128, 128, 8, 3), *full_only([18_333, 128, 128, 64, 3])], ids=str)
def test_compiled(shape, gpu):
    shape = gpu.size(shape, (12, 16, 12, 3, 2))

    def forward(x, weight, bias, gates, experts, grad):
        return (expert_matmul(x, weight, bias, gates, experts),)

    check_compiled(gpu, forward, lambda seed: problem(shape, torch.bfloat16, seed, device=gpu.name))


@pytest.mark.core
@pytest.mark.parametrize("precision", ["bfloat16", *full_only("ieee")])
def test_peak_memory(precision, gpu):
    """Nothing of B k N elements, which is what others write: at the reference shape 260 MB in bfloat16.

    The results, ``y`` and four gradients. For each row and choice 8 bytes of the list by expert; for each row 144 at
    most for its order (see test_expert_order). Partial sums of the weight's gradient in float32: a tile for each
    program of two waves, two programs a multiprocessor, 128 x 256 elements at most and as much again for the bias and
    for the last share of each expert: ``4 (4 M 128 256 + E N (D + 1))`` bytes for M multiprocessors, at most 148 on
    the machines that the table knows but one.
    """
    rows, features, outputs, experts, k = gpu.size((169_343, 256, 256, 8, 3), (12, 16, 12, 3, 2))

    def draw(seed):
        return problem((rows, features, outputs, experts, k), DTYPES[precision], seed, device=gpu.name)

    results = sum(t.nbytes for t in step(*draw(0)))
    partial = 4 * (4 * 148 * 128 * 256 + experts * outputs * (features + 1))
    check_peak(gpu, step, draw, results + 8 * rows * k + 144 * rows + partial)


def test_autocast_changes_nothing(gpu):
    arguments = problem((gpu.size(2_000, 12), 24, 18, 5, 2), device=gpu.name)
    with torch.autocast(gpu.name, dtype=torch.bfloat16):
        inside = step(*arguments)
    same_bits(inside, step(*arguments), "autocast")


@pytest.mark.parametrize("operator", ["forward", *full_only("backward input", "backward weight")])
def test_opcheck(operator, gpu):
    x, weight, bias, gates, experts, grad = problem((8, 6, 5, 4, 2), device=gpu.name)
    if operator == "forward":
        leaves = [t.requires_grad_() for t in (x, weight, bias, gates)]
        torch.library.opcheck(torch.ops.rbm.expert_matmul.default, (*leaves, experts))
    elif operator == "backward input":
        backward = torch.ops.rbm.expert_matmul_backward_input.default
        for wanted in (False, True):
            torch.library.opcheck(backward, (grad, x, weight, bias, gates, experts, wanted))
    else:
        backward = torch.ops.rbm.expert_matmul_backward_weight.default
        for wanted in (False, True):
            torch.library.opcheck(backward, (grad, x, gates, experts, 4, wanted))


@pytest.mark.parametrize("operator", ["forward", "backward input", "backward weight"])
def test_two_devices(operator, gpu):
    x, weight, bias, gates, experts, grad = problem((6, 8, 5, 4, 2), device=gpu.name)
    routed = dict(x=x, weight=weight, bias=bias, gates=gates, experts=experts)
    if operator == "forward":
        order, tile_experts, tile_counts, block_m = expert_order(experts, 4, 16)
        ordered = dict(order=order, tile_experts=tile_experts, tile_counts=tile_counts, block_m=block_m)
        check_devices(gpu, "expert_matmul", routed | ordered)
    elif operator == "backward input":
        check_devices(gpu, "expert_matmul_backward_input", dict(grad=grad) | routed)
    else:
        arguments = dict(grad=grad, x=x, gates=gates, experts=experts, num_experts=4)
        check_devices(gpu, "expert_matmul_backward_weight", arguments)


@pytest.mark.core
@pytest.mark.parametrize("bad", [float("inf"), *full_only(float("nan"))])
@pytest.mark.parametrize("precision", ["bfloat16", *full_only("ieee", "float16")])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of the interpreter
def test_bad_experts_reach_no_farther_than_their_tiles(precision, bad, gpu):
    """Infinity and NaN in an expert's weight and bias: see "Numbers that are not finite" in the operator's README.

    They stay with the rows that use the expert in ``grad_gates``, and in float16 in ``y`` and ``grad_x`` alone; with
    the tiles of those rows otherwise.
    """
    rows = gpu.size(3_000, 48)
    x, weight, bias, gates, experts, grad = problem((rows, 40, 36, 6, 2), DTYPES[precision], device=gpu.name)
    order = expert_order(experts, 6, 16)
    uses = (experts == 4).any(-1)
    tiles = torch.zeros_like(uses)
    for tile in order.order.long().split(16):
        tiles[tile] = uses[tile].any()
    assert 0 < uses.sum() < tiles.sum() < rows
    clean = by_operators(x, weight, bias, gates, experts, grad, order)
    weight[4, 3, 7] = bias[4, 5] = bad
    got = by_operators(x, weight, bias, gates, experts, grad, order)
    own = {"grad_gates", "y", "grad_x alone"} if precision == "float16" else {"grad_gates"}
    for name, a, b in zip(NAMES[:4], got, clean, strict=False):
        reached = uses if name in own else tiles
        same_bits([a[~reached]], [b[~reached]], name)
        assert not a[uses].isfinite().all(-1).any(), name
    same_bits(got[4:], clean[4:], "gradients of weight and bias, which do not see the weight")


@pytest.mark.parametrize("k", [1, *full_only(3)])
def test_float16_with_small_gates(k, gpu):
    """Gates times rows are below 6e-8, float16's smallest number: their products with large weights are not lost."""
    x, weight, bias, gates, experts, grad = problem((gpu.size(3_000, 20), 64, 36, 6, k), torch.float16, device=gpu.name)
    arguments = (x * 1e-3, weight * 2e3, bias * 1e-3, gates * 1e-5, experts, grad * 1e-3)
    exact, eager = by_reference(*in_float64(arguments)), by_reference(*arguments)
    got = by_operators(*arguments)
    for place in (0, 3):  # what one accumulator forms: y, and grad_x where the gates want no gradient
        check_error(NAMES[place], got[place], exact[place], eager[place])
