"""Routing: meaning, ties, zero rows, gradients, contracts of an operator."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from rbm_kernels import cosine_topk
from rbm_kernels.ops.cosine_topk import reference

# Each shape exists for a reason: (B, D, E, k)
SHAPES = {
    "usual": (33, 16, 8, 3),
    "prime width": (9, 1433, 4, 3),
    "one row": (1, 5, 3, 2),
    "no rows": (0, 7, 4, 2),
    "all experts": (6, 4, 5, 5),
    "one expert": (6, 4, 1, 1),
    "one feature": (10, 1, 3, 2),
    "many experts": (20, 12, 64, 8),
    "many features": (21, 1500, 21, 2),
}


def brute_force(h, memory, k, temperature=1.0):
    """Row by row, straight from Eq. 3."""
    gates, experts, cosines = [], [], []
    for row in h.double():
        cosine = [float(F.cosine_similarity(row, m, dim=0, eps=1e-12)) for m in memory.double()]
        best = sorted(range(len(cosine)), key=lambda e: (-cosine[e], e))[:k]
        top = torch.tensor([cosine[e] for e in best], dtype=torch.float64)
        gates.append(torch.softmax(top / temperature, 0))
        experts.append(best)
        cosines.append(top)
    return torch.stack(gates), torch.tensor(experts), torch.stack(cosines)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_against_brute_force(shape, dtype):
    b, d, e, k = shape
    h = torch.randn(b, d).to(dtype)
    memory = torch.randn(e, d, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    gates, experts, cosines = cosine_topk(h, memory, k, temperature=0.7)
    accumulated = torch.float64 if dtype == torch.float64 else torch.float32
    assert gates.dtype == cosines.dtype == accumulated
    assert experts.dtype == torch.int32
    assert gates.shape == experts.shape == cosines.shape == (b, k)
    if b == 0:
        return
    expected = brute_force(h, memory, k, temperature=0.7)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(cosines.double(), expected[2], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(gates.double(), expected[0], atol=tolerance, rtol=tolerance)
    # Compare the cosines of the chosen experts, so that rounding among near-ties cannot fail the test.
    all_cosines = F.normalize(h.double(), dim=-1) @ F.normalize(memory.double(), dim=-1).T
    torch.testing.assert_close(all_cosines.gather(1, experts.long()), expected[2], atol=tolerance, rtol=tolerance)
    assert all(len(set(row)) == k for row in experts.tolist())


@pytest.mark.native  # BLAS may give equal columns results that differ in the last bit
def test_ties_go_to_the_lower_expert():
    memory = torch.ones(6, 4)
    _, experts, _ = cosine_topk(torch.randn(50, 4), memory, 3)
    assert torch.equal(experts, torch.tensor([0, 1, 2], dtype=torch.int32).expand(50, 3))


@pytest.mark.native
@pytest.mark.parametrize("k", [1, 9, 40])
def test_many_ties_go_to_the_lower_experts(k):
    distinct = torch.eye(3)
    names = torch.randint(3, (40,))
    h = torch.tensor([[3.0, 2.0, 1.0], [1.0, 3.0, 2.0], [-1.0, -3.0, -2.0], [0.0, -0.0, 0.0]]).repeat(6, 1)
    _, experts, _ = cosine_topk(h, distinct[names], k)
    order = torch.argsort(h[:, names], dim=1, descending=True, stable=True)
    assert torch.equal(experts, order[:, :k].int())


@pytest.mark.native
@pytest.mark.parametrize(
    ("features", "experts", "rows"),
    [(33, 21, 37), (1024, 21, 37), (1500, 21, 37), (33, 70, 163), (519, 600, 163), (2100, 130, 163)],
)  # the last ones in blocks with a row per lane: the first of them with AVX2, the others with AVX-512, too
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_row_has_the_same_cosines_in_every_batch(features, experts, rows, dtype):
    memory_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    h, memory = torch.randn(rows, features).to(dtype), torch.randn(experts, features, dtype=memory_dtype)
    h[18] = 1e30 if dtype != torch.float64 else 1e300  # its square overflows, and so it is multiplied by itself
    h[30, 5] = torch.nan
    k = min(experts, 50)
    whole = cosine_topk(h, memory, k)
    expected = torch.nn.functional.normalize(h[:16].double()) @ torch.nn.functional.normalize(memory.double()).T
    torch.testing.assert_close(whole[2][:16].double(), expected.topk(k).values, rtol=0, atol=1e-6)
    for size in (1, 5, 16, 50):
        parts = [cosine_topk(part, memory, k) for part in h.split(size)]
        for got, same in zip(map(torch.cat, zip(*parts, strict=True)), whole, strict=True):
            torch.testing.assert_close(got, same, rtol=0, atol=0, equal_nan=True)


@pytest.mark.native
def test_rows_without_features_have_cosines_of_zero():
    gates, experts, cosines = cosine_topk(torch.randn(64, 0), torch.randn(130, 0), 2)
    assert torch.equal(cosines, torch.zeros(64, 2))
    assert torch.equal(gates, torch.full((64, 2), 0.5))
    assert torch.equal(experts, torch.tensor([0, 1], dtype=torch.int32).expand(64, 2))


def test_zero_row_and_zero_memory_have_cosine_zero():
    h, memory = torch.randn(3, 4), torch.randn(5, 4)
    h[1], memory[2] = 0, 0
    gates, experts, cosines = cosine_topk(h, memory, 5)
    assert torch.equal(cosines[1], torch.zeros(5))
    assert torch.equal(experts[1], torch.arange(5, dtype=torch.int32))
    torch.testing.assert_close(gates[1], torch.full((5,), 0.2))
    assert (cosines[experts == 2] == 0).all()


def test_lengths_do_not_matter():
    h, memory = torch.randn(20, 6), torch.randn(7, 6)
    scaled = cosine_topk(h * torch.logspace(-6, 6, 20)[:, None], memory * torch.logspace(-3, 3, 7)[:, None], 3)
    for got, expected in zip(scaled, cosine_topk(h, memory, 3), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_gradients(temperature):
    h = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    memory = torch.randn(4, 5, dtype=torch.float64)

    def gates_and_cosines(h):
        gates, _, cosines = cosine_topk(h, memory, 3, temperature=temperature)
        return gates, cosines

    assert torch.autograd.gradcheck(gates_and_cosines, (h,))
    assert torch.autograd.gradcheck(lambda h: gates_and_cosines(h)[0], (h,))
    assert torch.autograd.gradcheck(lambda h: gates_and_cosines(h)[1], (h,))


def test_zero_row_gets_zero_gradient():
    h = torch.randn(3, 4, requires_grad=True)
    with torch.no_grad():
        h[1] = 0
    gates, _, cosines = cosine_topk(h, torch.randn(5, 4), 2)
    (gates.square().sum() + cosines.sum()).backward()
    assert torch.equal(h.grad[1], torch.zeros(4))
    assert (h.grad[[0, 2]].abs().sum(-1) > 0).all()


def test_memory_gets_no_gradient_and_may_move_before_backward():
    h = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    memory = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    cosine_topk(h, memory, 2)[2].sum().backward()
    expected, h.grad = h.grad, None
    assert memory.grad is None

    cosines = cosine_topk(h, memory, 2)[2]
    with torch.no_grad():
        memory.mul_(-3)
    cosines.sum().backward()
    torch.testing.assert_close(h.grad, expected)


def test_non_contiguous_rows():
    h = torch.randn(10, 24, requires_grad=True)
    sliced, memory = h[::2, 1::3], torch.randn(4, 16)[:, ::2]
    got = cosine_topk(sliced, memory, 2)
    for a, b in zip(got, cosine_topk(sliced.contiguous(), memory.contiguous(), 2), strict=True):
        torch.testing.assert_close(a, b)
    got[2].sum().backward()
    assert h.grad[::2, 1::3].abs().sum() > 0
    assert h.grad[1::2].abs().sum() == 0


def test_float32_under_autocast():
    h, memory = torch.randn(20, 8), torch.randn(5, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = cosine_topk(h, memory, 3)
    for got, expected in zip(inside, cosine_topk(h, memory, 3), strict=True):
        assert torch.equal(got, expected)


class OnCuda(torch.Tensor):
    """Rows that say they are on a GPU, whose products would be TensorFloat-32."""

    is_cuda = True


@pytest.mark.parametrize(("setting", "product"), [("tf32", torch.float64), ("ieee", torch.float32)])
def test_the_reference_routes_in_float32_where_pytorch_rounds_products(setting, product, monkeypatch):
    """It serves more than 128 experts on CUDA."""
    h, memory, dtypes = torch.randn(5, 16), torch.randn(150, 16), []
    multiply = torch.Tensor.__matmul__

    def recorded(rows, vectors):
        dtypes.append(rows.dtype)
        return multiply(rows, vectors)

    monkeypatch.setattr(OnCuda, "__matmul__", recorded, raising=False)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = setting
        got = reference.cosine_topk(h.as_subclass(OnCuda), memory, 3)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert set(dtypes) == {product}
    for ours, plain in zip(got, reference.cosine_topk(h, memory, 3), strict=True):
        torch.testing.assert_close(ours.as_subclass(torch.Tensor), plain)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**16), rows=st.integers(2, 40), experts=st.integers(1, 12))
def test_rows_are_independent_and_experts_are_names(seed, rows, experts):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    memory = torch.randn(experts, 5, generator=generator, dtype=torch.float64)
    k = min(3, experts)
    whole = cosine_topk(h, memory, k)

    permutation = torch.randperm(rows, generator=generator)
    for got, expected in zip(cosine_topk(h[permutation], memory, k), whole, strict=True):
        torch.testing.assert_close(got, expected[permutation])
    halves = [cosine_topk(part, memory, k) for part in h.tensor_split(2)]
    for got, expected in zip(map(torch.cat, zip(*halves, strict=True)), whole, strict=True):
        torch.testing.assert_close(got, expected)
    names = torch.randperm(experts, generator=generator)
    _, renamed, _ = cosine_topk(h, memory[names], k)
    assert torch.equal(names[renamed.long()], whole[1].long())


@pytest.mark.parametrize("shape", [(6, 5, 4, 2), (0, 5, 4, 2)])
def test_opcheck(shape):
    b, d, e, k = shape
    h = torch.randn(b, d, requires_grad=True)
    torch.library.opcheck(torch.ops.rbm.cosine_topk.default, (h, torch.randn(e, d), k), {"temperature": 0.5})


@pytest.mark.compiler
def test_fullgraph_compile():
    h, memory = torch.randn(12, 6, requires_grad=True), torch.randn(4, 6)

    def losses(h):
        gates, _, cosines = cosine_topk(h, memory, 2)
        return (gates * cosines).sum()

    (expected,) = torch.autograd.grad(losses(h), h)
    (got,) = torch.autograd.grad(torch.compile(losses, fullgraph=True)(h), h)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"h": torch.randn(4, 3, 2)}, ValueError, r"h has shape \[4, 3, 2\], expected \[\*, \*\]"),
        ({"memory": torch.randn(5, 7)}, ValueError, r"memory has shape \[5, 7\], expected \[\*, 6\]"),
        ({"h": torch.ones(4, 6, dtype=torch.int64)}, TypeError, "h has dtype int64, expected float64 or float32"),
        ({"memory": torch.ones(5, 6).half()}, TypeError, "memory has dtype float16, expected float32 or float64"),
        ({"k": 6}, ValueError, "k is 6, expected between 1 and the number of experts, 5"),
        ({"k": 0}, ValueError, "k is 0"),
        ({"temperature": 0.0}, ValueError, "temperature is 0.0, expected a positive number"),
    ],
)
def test_bad_arguments(change, error, message):
    arguments = {"h": torch.randn(4, 6), "memory": torch.randn(5, 6), "k": 2, **change}
    with pytest.raises(error, match="rbm::cosine_topk: " + message):
        cosine_topk(**arguments)
