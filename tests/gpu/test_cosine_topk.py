"""Routing on a GPU: forward and backward against the float64 reference, and what a caller may rely on beside that."""

import pytest
import torch
from on_gpu import (
    OperatorOnGpu,
    check_compiled,
    check_devices,
    check_peak,
    float32_products,
    full_only,
    same_bits,
)
from routing_on_gpu import check_backward, check_forward

from rbm_kernels import cosine_topk
from rbm_kernels.ops.cosine_topk import reference

DTYPES = [torch.float32, torch.bfloat16, *full_only(torch.float16)]
# (B, D, E, k); in the rehearsal at most REHEARSED rows.
REHEARSED = 20
SHAPES = {
    "reference": (169_343, 256, 8, 3),
    "1,433 features": (2_708, 1_433, 8, 3),
    "47 features": (10_007, 47, 8, 3),
    "8,415 features": (34_493, 8_415, 5, 2),
    "1,024 features": (18_333, 1_024, 16, 3),
    "features below a tile": (5_000, 7, 5, 2),
    "one row": (1, 40, 3, 2),
    "a row more than a tile": (65, 40, 3, 2),
    "one expert": (4_001, 64, 1, 1),
    "33 experts": (18_333, 128, 33, 5),
    "64 experts": (18_333, 256, 64, 8),
    "128 experts": (3_001, 100, 128, 8),
}
CORE = ("reference", "64 experts")
# The rehearsal leaves out what differs from these in rows alone, or takes the interpreter seconds.
SLOW = ("8,415 features", "1,024 features", "128 experts", "a row more than a tile")
CASES = [
    pytest.param(*shape, id=name, marks=[pytest.mark.core] * (name in CORE) + [pytest.mark.gpu] * (name in SLOW))
    for name, shape in SHAPES.items()
]


def drawn(gpu, rows, features, num_experts, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(rows, features, generator=generator).to(gpu.name, dtype)
    return h, torch.randn(num_experts, features, generator=generator).to(gpu.name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "features", "num_experts", "k"), CASES)
def test_shapes(rows, features, num_experts, k, dtype, gpu):
    h, memory = drawn(gpu, gpu.size(rows, min(rows, REHEARSED)), features, num_experts, dtype)
    check_forward(cosine_topk(h, memory, k, temperature=0.7), h, memory, k, 0.7)
    grads = torch.randn(2, len(h), k, device=gpu.name)
    check_backward(h, memory, k, grads[0], grads[1], 0.7)


@pytest.mark.parametrize("gradients", ["gates", "cosines"])
@pytest.mark.parametrize("dtype", [torch.float32, *full_only(torch.bfloat16)], ids=str)
def test_partial_gradients(gradients, dtype, gpu):
    h, memory = drawn(gpu, gpu.size(5_000, 9), 47, 6, dtype)
    grad = torch.randn(len(h), 3, device=gpu.name)
    check_backward(h, memory, 3, *((grad, None) if gradients == "gates" else (None, grad)))


@pytest.mark.parametrize("k", [1, 8, *full_only(2, 3, 4, 5, 6, 7)])
def test_top_k(k, gpu):
    h, memory = drawn(gpu, gpu.size(5_000, 9), 100, 8)
    check_forward(cosine_topk(h, memory, k), h, memory, k)
    check_backward(h, memory, k, torch.randn(len(h), k, device=gpu.name), None)


VIEWS = {
    "sliced features": lambda x: x[:, 3:27],
    "every other row": lambda x: x[::2, :24],
    "every other feature": lambda x: x[:, ::2],
    "transposed": lambda x: x.T.contiguous().T,
    "one row for all": lambda x: x[:1].expand(9, -1),
}


@pytest.mark.parametrize("view", [*list(VIEWS)[:2], *full_only(*list(VIEWS)[2:])])
def test_strides(view, gpu):
    h = VIEWS[view](drawn(gpu, 18, 48, 1)[0])
    memory = torch.randn(5, 2 * h.shape[1], device=gpu.name)[:, ::2]
    # Not the bits of contiguous rows: a stride that 16 divides compiles to wider loads, and to sums in another order.
    check_forward(cosine_topk(h, memory, 2), h, memory, 2)
    check_backward(h, memory, 2, torch.randn(2, len(h), device=gpu.name).T, None)


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.float32, *full_only(torch.float16, torch.bfloat16)], ids=str)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of the interpreter
def test_bad_rows_ties_and_zeros(dtype, gpu):
    """NaN stays in its row and its gradient is zero; of equal experts the lower wins; a zero row likes all alike."""
    rows = gpu.size(3_000, 20)
    h, memory = drawn(gpu, rows, 40, 6, dtype)
    clean = cosine_topk(h, memory, 3)
    spoilt = h.clone()
    spoilt[3, 7], spoilt[5, 0], spoilt[rows - 1] = float("nan"), float("inf"), 0
    good = torch.ones(rows, dtype=torch.bool, device=gpu.name)
    good[[3, 5, rows - 1]] = False
    got = cosine_topk(spoilt, memory, 3)
    same_bits([x[good] for x in got], [x[good] for x in clean], "other rows")
    gates, experts, cosines = got
    assert gates[3].isnan().all()
    assert cosines[5].isnan().all()
    assert experts[[3, 5, rows - 1]].tolist() == [[0, 1, 2]] * 3
    assert (cosines[rows - 1] == 0).all()
    leaf = spoilt.requires_grad_()
    (grad,) = torch.autograd.grad(cosine_topk(leaf, memory, 3)[2][good].sum(), leaf)
    assert (grad[[3, rows - 1]] == 0).all()  # an infinite row has no direction either, and no derivative: NaN
    assert grad[good].isfinite().all()

    _, experts, _ = cosine_topk(h, memory[:1].expand(6, -1), 3)
    assert (experts == torch.tensor([0, 1, 2], device=gpu.name)).all()
    for got, expected in zip(
        cosine_topk(h[:9].float(), torch.full_like(memory, float("nan")), 3),
        reference.cosine_topk(h[:9].float(), torch.full_like(memory, float("nan")), 3),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 7), (3, 0)], ids=["no rows", "no features"])
def test_nothing_to_read(shape, gpu):
    h, memory = drawn(gpu, *shape, 4)
    rows = h.requires_grad_()
    gates, experts, cosines = cosine_topk(rows, memory, 2)
    assert gates.shape == experts.shape == (shape[0], 2)
    assert (cosines == 0).all()
    (grad,) = torch.autograd.grad(gates.sum(), rows)
    assert grad.shape == shape


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_beyond_31_bits(direction, gpu):
    """B * D passes 2^31: the last rows are routed, and get gradients, as they are alone."""
    rows = gpu.size(2**31 // 256 + 100, 120)

    def work():
        h = torch.zeros(rows, 256, device=gpu.name, dtype=torch.bfloat16)
        h[-100:] = torch.randn(100, 256, device=gpu.name)
        memory = torch.randn(8, 256, device=gpu.name)
        if direction == "forward":
            for a, b in zip(cosine_topk(h, memory, 3), cosine_topk(h[-100:], memory, 3), strict=True):
                torch.testing.assert_close(a[-100:], b)
            return
        gates, cosines = torch.rand(2, 100, 3, device=gpu.name)
        experts = torch.rand(100, 8, device=gpu.name).argsort(-1)[:, :3].int()
        last = gates, h[-100:], memory, gates, experts, cosines
        expected = torch.ops.rbm.cosine_topk_backward(last[0], None, *last[1:])
        gates, experts, cosines = (torch.cat([x.new_zeros(rows - 100, 3), x]) for x in (gates, experts, cosines))
        got = torch.ops.rbm.cosine_topk_backward(gates, None, h, memory, gates, experts, cosines)
        assert (got[:-100] == 0).all()
        torch.testing.assert_close(got[-100:], expected)

    gpu.with_memory(rows * 256 * (8 if direction == "backward" else 4), work)


def step(h, memory):
    """Forward and backward."""
    rows = h.detach().requires_grad_()
    gates, experts, cosines = cosine_topk(rows, memory, 3)
    (grad,) = torch.autograd.grad((gates * cosines).sum(), rows)
    return gates.detach(), experts, cosines.detach(), grad


# One tile a program, and programs that take several tiles, which keep the memory on the chip.
ROWS = [pytest.param(5_000, 12, marks=pytest.mark.core), *full_only((169_343, 12))]


@pytest.mark.parametrize(("full", "small"), ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, *full_only(torch.float32)], ids=str)
class TestOperator(OperatorOnGpu):
    @pytest.fixture
    def call(self):
        return step

    @pytest.fixture
    def draw(self, full, small, dtype, gpu):
        return lambda seed: drawn(gpu, gpu.size(full, small), 64, 8, dtype, seed)

    def test_peak_memory(self, draw, gpu):
        """Three results of B k elements of 4 bytes and grad_h, of B D; for the backward pass two gradients of gates
        and cosines, and the products from which autograd makes them: four tensors of B k. Memory is copied once.
        """
        h, memory = draw(0)
        rows = 4 * len(h) * 3
        check_peak(gpu, step, draw, 9 * rows + h.nbytes + memory.nbytes)


def test_autocast_routes_in_float32(gpu):
    h, memory = drawn(gpu, gpu.size(1_000, 9), 64, 8)
    with torch.autocast(gpu.name, dtype=torch.bfloat16):
        inside = cosine_topk(h, memory, 3)
    same_bits(inside, cosine_topk(h, memory, 3), "autocast")


def test_tf32_is_not_for_routing(gpu):
    h, memory = drawn(gpu, gpu.size(1_000, 9), 64, 8)
    expected = cosine_topk(h, memory, 3)
    with float32_products("tf32"):
        same_bits(cosine_topk(h, memory, 3), expected, "TF32 allowed")


def test_compiled(gpu):
    check_compiled(gpu, lambda h, memory: cosine_topk(h, memory, 3), lambda seed: drawn(gpu, 40, 64, 8, seed=seed))


def test_opcheck(gpu):
    h, memory = drawn(gpu, 6, 16, 4)
    torch.library.opcheck(torch.ops.rbm.cosine_topk.default, (h.requires_grad_(), memory, 2))
    outputs = [x.detach() for x in cosine_topk(h, memory, 2)]
    torch.library.opcheck(
        torch.ops.rbm.cosine_topk_backward.default, (outputs[0], outputs[2], h.detach(), memory, *outputs)
    )


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_two_devices(direction, gpu):
    h, memory = drawn(gpu, 6, 16, 4)
    if direction == "forward":
        check_devices(gpu, "cosine_topk", dict(h=h, memory=memory, k=2))
        return
    gates, experts, cosines = cosine_topk(h, memory, 2)
    arguments = dict(grad_gates=gates, grad_cosines=cosines, h=h, memory=memory)
    check_devices(gpu, "cosine_topk_backward", dict(**arguments, gates=gates, experts=experts, cosines=cosines))
