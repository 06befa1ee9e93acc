"""The Triton kernels of the grouped matmul against the float64 reference: in the interpreter, or on a GPU."""

import pytest
import torch
from matmul_kernels import by_kernels, check
from matmul_problems import DEVICE, NAMES, by_reference, in_float64, problem, serving_kernels
from tile_heights import set_tile_rows

from rbm import FusedRbMLayer
from rbm_kernels import expert_matmul, expert_order
from rbm_kernels.ops.expert_matmul import config, launch
from rbm_kernels.ops.expert_matmul.config import precision_of

pytestmark = pytest.mark.usefixtures("one_thread")

# Each shape exists for a reason: (B, D, N, E, k)
SHAPES = {
    "usual": (40, 32, 48, 8, 3),
    "prime sizes": (37, 37, 31, 5, 2),
    "D below a tile": (20, 5, 16, 4, 2),
    "N below a tile": (20, 16, 7, 4, 2),
    "several tiles of columns": (17, 70, 140, 3, 2),
    "all experts": (19, 8, 9, 3, 3),
    "one expert": (19, 8, 9, 1, 1),
    "more experts than a slice of biases holds": (60, 16, 16, 33, 3),
    "a row short of a tile": (31, 16, 16, 8, 3),
    "one row": (1, 33, 17, 3, 2),
    "no rows": (0, 8, 9, 3, 2),
}


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    """Allocate memory filled with NaN (integers: a valid but wrong row), so that unwritten elements fail."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        memory = empty(*args, **kwargs)
        return memory.fill_(float("nan") if memory.is_floating_point() else 1)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def kernels_serve():
    with serving_kernels():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_against_reference(shape, dtype):
    check(problem(shape, dtype))


def test_without_bias():
    x, weight, _, *rest = problem((20, 16, 20, 5, 2))
    check((x, weight, None, *rest))


@pytest.mark.parametrize(
    "chosen",
    [
        torch.tensor([[0, 2, 3]]).expand(50, 3),
        torch.tensor([[a, b, c] for a in range(5) for b in range(a) for c in range(b)]).repeat(2, 1)[:16],
        torch.tensor([[3, 1, 0], [1, 0, 3], [0, 3, 1]]).repeat(6, 1),
    ],
    ids=["all rows on one set", "every row its own set", "one set in several spellings"],
)
def test_sets(chosen):
    check(problem((chosen.shape[0], 16, 20, 5, 3), chosen=chosen))


@pytest.mark.parametrize("block_m", [1, 7, 16, 64, 200, 2**31 - 1])
def test_any_height_of_tile(block_m):
    """Below, between and above the kernels' own heights: rows of a part that no tile has, tiles of several parts."""
    arguments = problem((70 if block_m > 1 else 20, 16, 18, 6, 2))
    check(arguments, expert_order(arguments[4], 6, block_m))


@pytest.mark.parametrize(("block_m", "own"), [(7, 7), (64, 16), (16, 16)])
def test_a_program_writes_its_own_rows_alone(block_m, own, monkeypatch):
    """The interpreter runs programs one after another, so a later one would overwrite wrong writes into its rows."""
    monkeypatch.setattr(launch, "_parts", lambda *_: 1)
    x, weight, bias, gates, experts, grad = problem((70, 16, 12, 6, 2))
    order = expert_order(experts, 6, block_m)
    y = launch.expert_matmul(x, weight, bias, gates, experts, *order)
    grad_x, grad_gates = launch.backward_input(grad, x, weight, bias, gates, experts, True, *order)
    mine = torch.zeros(70, dtype=torch.bool, device=DEVICE)
    mine[order.order[:own].long()] = True
    for output in (y, grad_x, grad_gates):
        assert output[mine].isfinite().all()
        assert output[~mine].isnan().all()


@pytest.mark.parametrize("rows", [70, 1100])
def test_several_blocks_of_the_list(rows, monkeypatch):
    """The list of rows by expert spans blocks of rows, whose boundaries must not matter."""
    monkeypatch.setattr(launch, "_LIST_BLOCK", 16 if rows == 70 else 1024)
    arguments = problem((rows, 3, 4, 5, 2))
    weight, bias = launch.backward_weight(arguments[5], arguments[0], *arguments[3:5], 5)
    exact = by_reference(*in_float64(arguments))
    torch.testing.assert_close(weight.double(), exact[4], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(bias.double(), exact[5], atol=1e-4, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "architecture", "shape"),
    [
        *(("half", architecture, (150, 130, 140, 4, 2)) for architecture in (80, 90, 100, 120)),
        *(("tf32", architecture, (150, 130, 70, 4, 2)) for architecture in (90, 100)),
        *(("ieee", architecture, (70, 66, 68, 4, 2)) for architecture in (90, 120)),
    ],
)
def test_every_configuration_computes(precision, architecture, shape, monkeypatch):
    """Full tiles of the table, on a shape that fills one and begins another; each tile of the table once."""
    monkeypatch.setattr(launch, "architecture_and_precision", lambda x: (architecture, precision))
    set_tile_rows(monkeypatch, 128)
    check(problem(shape, torch.float16 if precision == "half" else torch.float32))


def test_strides():
    x, weight, bias, gates, experts, grad = problem((20, 12, 10, 4, 2))
    rows = torch.randn(40, 30, device=DEVICE)
    rows[::2, 5:17] = x
    columns = torch.randn(12, 20, device=DEVICE)
    columns[:] = x.T
    scattered = torch.randn(10, 20, device=DEVICE)
    scattered[:] = grad.T
    pair = torch.zeros(20, 4, dtype=torch.int32, device=DEVICE)
    pair[:, ::2] = experts
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    check((rows[::2, 5:17], turned, bias, gates.T.contiguous().T, pair[:, ::2], scattered.T))
    check((columns.T, weight, bias[:, :1].expand(-1, 10), gates, experts, grad[:1].expand(20, -1)))


def test_same_bits_every_time():
    arguments = problem((60, 20, 24, 8, 3), torch.float16)
    for name, first, second in zip(NAMES, by_kernels(*arguments), by_kernels(*arguments), strict=True):
        assert torch.equal(first, second), name


@pytest.mark.parametrize(
    ("shape", "is_small"),
    [((6, 0, 5, 3, 2), True), ((6, 5, 0, 3, 2), True), ((6, 5, 4, 3, 0), True), ((6, 5, 4, 3, 0), False)],
    ids=["no features", "no outputs", "no choices", "no choices to order"],
)
@pytest.mark.usefixtures("kernels_serve")
def test_nothing_to_multiply(shape, is_small, monkeypatch):
    """Left to the reference: a grid of no programs is an error. The gradient of the biases remains without features."""
    monkeypatch.setattr(config, "is_small", lambda *_: is_small)
    x, weight, bias, gates, experts, grad = problem(shape)
    leaves = [t.requires_grad_() for t in (x, weight, bias, gates)]
    y = expert_matmul(x, weight, bias, gates, experts)
    got = (y, *torch.autograd.grad(y, leaves, grad))
    exact = by_reference(*in_float64([t.detach() for t in (x, weight, bias, gates, experts, grad)]))
    expected = [exact[0], exact[1], exact[4], exact[5], exact[2]]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)


def test_empty_experts_get_zero():
    arguments = problem((10, 4, 3, 6, 1), chosen=torch.full((10, 1), 2))
    *_, grad_weight, grad_bias = by_kernels(*arguments)
    unused = [0, 1, 3, 4, 5]
    assert (grad_weight[unused] == 0).all()
    assert (grad_bias[unused] == 0).all()


@pytest.mark.usefixtures("kernels_serve")
@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (3,), (0, 1, 2), (0, 1, 2, 3)])
def test_autograd(needed, monkeypatch):
    """Through the operators: each gradient alone and together, from one order for both passes."""
    made = []
    real = torch.ops.rbm.expert_order
    monkeypatch.setattr(torch.ops.rbm, "expert_order", lambda *arguments: made.append(arguments) or real(*arguments))
    *tensors, experts, grad = problem((24, 12, 10, 5, 2))
    exact = [t.double().requires_grad_(i in needed) for i, t in enumerate(tensors)]
    ours = [t.clone().requires_grad_(i in needed) for i, t in enumerate(tensors)]
    expert_matmul(*exact, experts).backward(grad.double())
    assert not made
    expert_matmul(*ours, experts).backward(grad)
    assert len(made) == 1
    for index, (got, want) in enumerate(zip(ours, exact, strict=True)):
        assert (got.grad is None) == (index not in needed)
        if got.grad is not None:
            torch.testing.assert_close(got.grad.double(), want.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("kernels_serve")
def test_expanded_gradient():
    """``sum().backward()`` sends one number with strides of zero."""
    *tensors, experts, _ = problem((24, 12, 10, 5, 2))
    ours = [t.clone().requires_grad_() for t in tensors]
    exact = [t.double().requires_grad_() for t in tensors]
    expert_matmul(*ours, experts).sum().backward()
    expert_matmul(*exact, experts).sum().backward()
    for got, want in zip(ours, exact, strict=True):
        torch.testing.assert_close(got.grad.double(), want.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("kernels_serve")
def test_opcheck():
    x, weight, bias, gates, experts, grad = problem((12, 6, 5, 4, 2))
    differentiable = [t.clone().requires_grad_() for t in (x, weight, bias, gates)]
    torch.library.opcheck(torch.ops.rbm.expert_matmul.default, (*differentiable, experts))
    for wanted in (False, True):
        backward = torch.ops.rbm.expert_matmul_backward_input.default
        torch.library.opcheck(backward, (grad, x, weight, bias, gates, experts, wanted))
        backward = torch.ops.rbm.expert_matmul_backward_weight.default
        torch.library.opcheck(backward, (grad, x, gates, experts, 4, wanted))


def test_shares_fill_whole_waves():
    """At the reference shape on an H100: one program per multiprocessor, and no second because of rounding up."""
    tile = config.weight_tile(90, "half", 169_343, 256, 256)
    length = config.share_rows(90, "half", tile, 2, 169_343 * 3, 8)
    counts = [length + 1] * 7
    counts.append(169_343 * 3 - sum(counts))
    programs = 2 * sum(-(-count // length) for count in counts)
    assert 0.9 * 132 <= programs <= 132


@pytest.mark.parametrize("setting", ["ieee", "tf32"])
def test_tf32_follows_pytorch(setting):
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = setting
        assert precision_of(torch.zeros(1)) == setting
        assert precision_of(torch.zeros(1, dtype=torch.float16)) == "half"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.usefixtures("kernels_serve")
def test_layer_trains_like_the_reference():
    """Twins from one seed, one through the kernels: the same losses, step by step."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(40, 10, generator=generator).to(DEVICE)
    target = torch.randn(40, 6, generator=generator).to(DEVICE)
    losses = {}
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(1)
        layer = FusedRbMLayer(10, 6, num_experts=5, top_k=2, detach_gates=False).to(DEVICE).to(dtype)
        optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
        losses[dtype] = []
        for _ in range(6):
            loss = (layer(h.to(dtype)) - target.to(dtype)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[dtype].append(loss.item())
    assert losses[torch.float32] == pytest.approx(losses[torch.float64], rel=1e-5)
    assert losses[torch.float32][-1] < losses[torch.float32][0]


def test_offsets_beyond_32_bits():
    """A row whose first element is beyond 2^31: memory is only reserved, and one of its pages is touched."""
    stride = 2**31 + 8
    storage = torch.empty_strided((2, 4), (stride, 1), dtype=torch.float16, device="cpu" if DEVICE == "cpu" else "cuda")
    x, *rest, grad = problem((2, 4, 3, 2, 1), torch.float16)
    storage.copy_(x)
    check((storage, *rest, grad))
