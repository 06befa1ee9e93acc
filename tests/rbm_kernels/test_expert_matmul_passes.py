"""Many experts in several passes over the rows: the kernels against the float64 reference, and the rule."""

import math

import pytest
import torch
from matmul_problems import DEVICE, check_error, in_float64, problem, serving_kernels
from tile_heights import set_tile_rows

from rbm_kernels import expert_matmul, expert_order
from rbm_kernels.ops.expert_matmul import config, launch, reference
from rbm_kernels.ops.expert_order import pass_columns

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ("y", "grad_x", "grad_gates", "grad_x alone")

# Each shape exists for a reason: (B, D, N, E, k), passes
SHAPES = {
    "as many passes as experts": ((40, 32, 48, 8, 3), 3),
    "uneven passes": ((40, 32, 48, 8, 3), 2),
    "prime D, N = 7": ((37, 37, 7, 33, 3), 3),
    "E = 64, k = 8": ((18, 16, 12, 64, 8), 4),
    "E = 64, k = 8, by expert": ((18, 5, 9, 64, 8), 8),
    "several tiles of columns": ((17, 70, 140, 4, 2), 2),
    "all experts": ((19, 8, 9, 3, 3), 2),
    "one row": ((1, 33, 17, 3, 2), 2),
    "no rows": ((0, 8, 9, 3, 2), 2),
}


@pytest.fixture(autouse=True)
def allocated(monkeypatch):
    """Allocate memory filled with NaN (integers: a valid but wrong row), and record its shapes."""
    shapes, empty = [], torch.empty

    def poisoned(*args, **kwargs):
        memory = empty(*args, **kwargs)
        shapes.append(tuple(memory.shape))
        return memory.fill_(float("nan") if memory.is_floating_point() else 1)

    monkeypatch.setattr(torch, "empty", poisoned)
    return shapes


@pytest.fixture
def kernels_serve():
    with serving_kernels():
        yield


def by_kernels(arguments, passes, block_m=16):
    x, weight, bias, gates, experts, grad = arguments
    order = expert_order(experts, weight.shape[0], block_m, passes)
    assert order.order.shape == ((passes, len(x)) if passes > 1 else (len(x),))
    return (
        launch.expert_matmul(x, weight, bias, gates, experts, *order),
        *launch.backward_input(grad, x, weight, bias, gates, experts, True, *order),
        launch.backward_input(grad, x, weight, bias, gates, experts, False, *order)[0],
    )


def by_reference(x, weight, bias, gates, experts, grad):
    grad_x, grad_gates = reference.backward_input(grad, x, weight, bias, gates, experts)
    return reference.expert_matmul(x, weight, bias, gates, experts), grad_x, grad_gates, grad_x


def check(arguments, passes, block_m=16):
    results = by_kernels(arguments, passes, block_m)
    exact, eager = by_reference(*in_float64(arguments)), by_reference(*arguments)
    for name, got, want, plain in zip(NAMES, results, exact, eager, strict=True):
        check_error(name, got, want, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize(("shape", "passes"), SHAPES.values(), ids=SHAPES.keys())
def test_against_reference(shape, passes, dtype):
    check(problem(shape, dtype), passes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_all_rows_on_one_set(dtype):
    check(problem((50, 16, 20, 33, 3), dtype, chosen=torch.tensor([[31, 0, 7]]).expand(50, 3)), 3)


def test_ties():
    """Equal gates, and columns in any order: every spelling of one set."""
    spellings = torch.tensor([[3, 1, 0], [1, 0, 3], [0, 3, 1]]).repeat(6, 1)
    x, weight, bias, gates, experts, grad = problem((18, 16, 20, 5, 3), chosen=spellings)
    check((x, weight, bias, torch.full_like(gates, 1 / 3), experts, grad), 2)


def test_without_bias():
    x, weight, _, *rest = problem((20, 16, 20, 5, 2))
    check((x, weight, None, *rest), 2)


@pytest.mark.parametrize("block_m", [7, 64])
def test_any_height_of_tile(block_m):
    check(problem((70, 16, 18, 6, 2)), 2, block_m)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_strides(dtype):
    """Rows, gates and gradients that are not contiguous: a pass takes columns of its own copies."""
    x, weight, bias, gates, experts, grad = problem((20, 12, 10, 9, 3), dtype)
    wide = torch.zeros(40, 24, dtype=dtype, device=DEVICE)
    wide[::2, 5:17] = x
    check((wide[::2, 5:17], weight, bias, gates.T.contiguous().T, experts.T.contiguous().T, grad.T.contiguous().T), 2)
    check((wide[::2, 5:17], weight, bias[:, :1].expand(-1, 10), gates, experts, grad[:1].expand(20, -1)), 3)


def test_same_bits_every_time():
    arguments = problem((40, 12, 16, 9, 4), torch.float16)
    for name, first, second in zip(NAMES, by_kernels(arguments, 3), by_kernels(arguments, 3), strict=True):
        assert torch.equal(first, second), name


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3)])
def test_twin_of_one_pass(dtype, tolerance):
    """The same sums in another order: float32 between passes, so there is no more rounding than in one pass."""
    arguments = problem((30, 14, 20, 9, 4), dtype)
    whole = by_kernels(arguments, 1)
    for passes in (2, 4):
        for name, got, want in zip(NAMES, by_kernels(arguments, passes), whole, strict=True):
            assert (got - want).abs().max() <= tolerance * want.abs().max(), (name, passes)


def test_sums_between_passes_keep_float32():
    """1024.25 after the first pass, 0.25 after the second: float16 would round to 1024 and lose both fractions."""
    weight = torch.full((2, 3, 16), 128.0, dtype=torch.float16, device=DEVICE)
    weight[0, :, 0], weight[1] = 128.5, -128.0
    x = torch.ones(20, 16, dtype=torch.float16, device=DEVICE)
    gates = torch.full((20, 2), 0.5, device=DEVICE)
    experts = torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE).expand(20, 2)
    y, *_ = by_kernels((x, weight, None, gates, experts, torch.ones(20, 3, dtype=torch.float16, device=DEVICE)), 2)
    assert (y == 0.25).all()


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "architecture"), [("half", 90), ("half", 100), ("tf32", 90), ("ieee", 100)])
def test_tiles_of_passes(precision, architecture, monkeypatch):
    """Full tiles where the table has others for passes, on a shape that fills one and begins another."""
    monkeypatch.setattr(launch, "architecture_and_precision", lambda x: (architecture, precision))
    set_tile_rows(monkeypatch, 128)
    dtype = torch.float16 if precision == "half" else torch.float32
    check(problem((140, 66, 140, 4, 2), dtype), 2, 128)


def test_no_tensor_of_pairs(allocated):
    """Float32 sums of B rows, for half precision alone; nothing has a row for each pair of row and expert."""
    for dtype, sums in ((torch.float32, 0), (torch.float16, 1)):
        arguments = problem((40, 24, 20, 7, 3), dtype)
        allocated.clear()
        by_kernels(arguments, 3)
        assert allocated.count((40, 20)) == 1 + sums
        assert allocated.count((40, 24)) == 2 * (1 + sums)
        assert max(torch.Size(shape).numel() for shape in allocated) == 40 * 24


def test_orders_of_passes():
    experts = problem((50, 1, 1, 12, 3))[4]
    whole = expert_order(experts, 12, 16, 2)
    for number, columns in enumerate([slice(0, 2), slice(2, 3)]):
        alone = expert_order(experts[:, columns], 12, 16)
        for together, part in zip(whole[:3], alone[:3], strict=True):
            assert torch.equal(together[number], part)
    for passes in (0, 4):
        with pytest.raises(ValueError, match=f"passes is {passes}, expected between 1 and the experts of a row, 3"):
            expert_order(experts, 12, 16, passes)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_columns_of_passes(k):
    """Every column once, in order, divided as evenly as possible."""
    for passes in range(1, k + 1):
        columns = pass_columns(k, passes)
        assert [column for part in columns for column in range(k)[part]] == list(range(k))
        sizes = [part.stop - part.start for part in columns]
        assert len(sizes) == passes
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.usefixtures("kernels_serve")
def test_autograd(given, monkeypatch):
    """One order for each pass, made once for both directions, by the rule or by the caller."""
    monkeypatch.setattr(config, "passes", lambda rows, num_experts, k: 2)
    *tensors, experts, grad = problem((24, 12, 10, 9, 3))
    exact = [t.double().requires_grad_() for t in tensors]
    ours = [t.clone().requires_grad_() for t in tensors]
    order = expert_order(experts, 9, 16, 3) if given else None
    made = []
    real = torch.ops.rbm.expert_order
    monkeypatch.setattr(torch.ops.rbm, "expert_order", lambda *arguments: made.append(arguments) or real(*arguments))
    expert_matmul(*exact, experts).backward(grad.double())
    y = expert_matmul(*ours, experts, order)
    saved = [tuple(t.shape) for t in y.grad_fn.saved_tensors if t.dtype == torch.int32]
    passes, tiles = (3, 2) if given else (2, 2)
    assert saved == [(24, 3), (passes, 24), (passes, tiles, 9), (passes, tiles)]
    y.backward(grad)
    assert [tuple(arguments[0].shape) for arguments in made] == ([] if given else [(24, 2), (24, 1)])
    for got, want in zip(ours, exact, strict=True):
        torch.testing.assert_close(got.grad.double(), want.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("kernels_serve")
def test_operators_alone_follow_the_rule(monkeypatch):
    """Called without an order, they compute the orders of the rule themselves."""
    monkeypatch.setattr(config, "passes", lambda rows, num_experts, k: 3)
    x, weight, bias, gates, experts, grad = problem((24, 12, 10, 9, 3))
    y = torch.ops.rbm.expert_matmul(x, weight, bias, gates, experts)
    assert torch.equal(y, by_kernels((x, weight, bias, gates, experts, grad), 3)[0])
    got = torch.ops.rbm.expert_matmul_backward_input(grad, x, weight, bias, gates, experts)
    for ours, want in zip(got, by_kernels((x, weight, bias, gates, experts, grad), 3)[1:3], strict=True):
        assert torch.equal(ours, want)


def test_the_rule():
    """Counted in benchmarks/results/unions.csv: what costs least there is what the rule takes."""
    chosen = {
        (rows, experts): config.passes(rows, experts, 3)
        for rows in (18_333, 169_343, 2_449_029)
        for experts in (8, 16, 32, 64)
    }
    assert {shape: passes for shape, passes in chosen.items() if passes > 1} == {
        (18_333, 32): 2,
        (18_333, 64): 3,
        (169_343, 64): 2,
    }
    assert [config.passes(169_343, experts, 8) for experts in (8, 16, 32, 64)] == [1, 1, 4, 4]
    # The paper's layers: one pass for any number of rows. Also for few rows, for which launches dominate.
    assert {config.passes(2**power, 8, 3) for power in range(25)} == {1}
    assert {config.passes(rows, 64, k) for rows in (0, 1, 64, 1000) for k in (1, 3, 8)} == {1}
    assert {config.passes(2**power, 64, 1) for power in range(25)} == {1}
    assert max(config.passes(2**power, 512, 3) for power in range(25)) == 3


@pytest.mark.parametrize(("experts", "k"), [(128, 16), (256, 12), (512, 10), (1024, 8), (1024, 16), (4096, 64)])
def test_sets_of_every_pass_can_be_ranked(experts, k):
    """Few rows of many experts: one pass would be cheapest, but there are more than 2^63 sets."""
    assert math.comb(experts, k) * experts >= 2**63
    for power in range(25):
        size = -(-k // config.passes(2**power, experts, k))
        assert max(math.comb(experts, chosen) for chosen in range(size + 1)) * experts < 2**63


@pytest.mark.usefixtures("kernels_serve")
def test_more_sets_than_64_bits_count():
    x, weight, bias, gates, experts, _ = problem((20, 3, 4, 128, 16))
    want = reference.expert_matmul(*(t.double() for t in (x, weight, bias, gates)), experts)
    torch.testing.assert_close(expert_matmul(x, weight, bias, gates, experts).double(), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("rows", "experts", "size"), [(5000, 16, 1), (5000, 16, 2), (5000, 16, 3), (5000, 32, 3)])
def test_the_rule_knows_the_unions(rows, experts, size):
    """Within 35 % of what is counted on uniform routing, and never below it by more than 3 %."""
    drawn = torch.rand(rows, experts).argsort(-1)[:, :size].int()
    counted = expert_order(drawn, experts, config.tile_rows(rows)).tile_counts.double().mean()
    assert 0.97 <= config.rows_times_union(rows, experts, size) / rows / counted <= 1.35


@pytest.mark.usefixtures("kernels_serve")
def test_rule_is_traced_with_symbols(monkeypatch):
    """A new number of rows does not compile again while the rule says the same: the rows stay a symbol."""
    monkeypatch.setattr(config, "_PASS_LAUNCHES", 0)
    compiled_graphs = []

    def backend(graph, _):
        compiled_graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(expert_matmul, fullgraph=True, dynamic=True, backend=backend)
    for rows, graphs in ((40, 1), (44, 1), (110, 2), (114, 2)):
        x, weight, bias, gates, experts, _ = problem((rows, 3, 4, 32, 3))
        torch.testing.assert_close(
            compiled(x, weight, bias, gates, experts), expert_matmul(x, weight, bias, gates, experts)
        )
        assert len(compiled_graphs) == graphs
    torch._dynamo.reset()
