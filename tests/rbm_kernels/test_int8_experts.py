"""8-bit experts: exact integer sums, and the results of the eager reference, independent of the batch."""

import pytest
import routed_problems
import torch
from routed_problems import of_other_strides, problem

from rbm_kernels import quantize_experts, routed_matmul, routed_matmul_int8
from rbm_kernels.ops.int8_experts import reference

NAN, INF = float("nan"), float("inf")
# Each shape exists for a reason: (B, D, N, E, k)
SHAPES = routed_problems.SHAPES | {
    "whole lines and panels": (40, 32, 128, 8, 3),
    "every number of panels at once": (13, 20, 16 * 15, 3, 2),
    "nothing is a multiple": (25, 9, 49, 4, 2),
    "one feature": (25, 1, 17, 4, 2),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_answers(shape):
    """Of the reference to rounding, and of the experts in floating point to a share of the largest number."""
    x, memory, weight, bias, k = problem(shape)
    for some_bias in (bias, None):
        experts = quantize_experts(weight, some_bias)
        y = routed_matmul_int8(x, memory, experts, shape[2], k, temperature=0.7)
        wanted = reference.routed_matmul_int8(x, memory, experts, shape[2], k, 0.7)
        torch.testing.assert_close(y, wanted, rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(
            y, routed_matmul(x, memory, weight, some_bias, k, temperature=0.7), rtol=0, atol=0.05
        )


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 11])
@pytest.mark.parametrize("features", [1, 5, 64, 515])
def test_sums_are_those_of_integers(rows, features):
    """Whole numbers with a scale of one in rows and columns: the sums come back as they are."""
    x = torch.randint(-127, 128, (rows, features)).float()
    weight = torch.randint(-127, 128, (1, 16 * 13 + 3, features)).float()
    x[:, 0], weight[..., 0] = 127, -127
    y = routed_matmul_int8(x, None, quantize_experts(weight, None), weight.shape[1])
    assert torch.equal(y.double(), x.double() @ weight[0].double().T)


@pytest.mark.parametrize("sign", [1, -1])
def test_no_sum_saturates(sign):
    """Pairs of products fill 16 bits to 32,258, and the sum of 131,072 products fills 31 bits of 32."""
    x, weight = torch.full((2, 2**17), 127.0), sign * torch.full((1, 17, 2**17), 127.0)
    x[1] = -x[1]
    y = routed_matmul_int8(x, None, quantize_experts(weight, None), 17)
    total = torch.tensor(127.0 * 127 * 2**17) * sign
    assert torch.equal(y, torch.stack([total.expand(17), -total.expand(17)]))


def test_rounding_is_to_even():
    """Numbers half-way between two integers, in a row and in a column."""
    halves = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 127.0]])
    whole = torch.tensor([[0.0, 2, 2, 0, -2, -2, 126, 127]])
    unit = torch.eye(8)[None] * 127
    assert torch.equal(routed_matmul_int8(halves, None, quantize_experts(unit, None), 8), whole * 127)
    weight, scale, _ = reference.unpack(quantize_experts(halves[None], None), 1, 8)
    assert torch.equal(weight[0].float() * scale[0, 0], whole)


def test_what_is_not_finite_stays_in_its_row():
    x, memory, weight, bias, k = problem((30, 21, 20, 4, 2))
    experts = quantize_experts(weight, bias)
    for given in (memory, None):
        chosen = (given, experts, 20, k) if given is not None else (None, experts[:1], 20)
        expected = routed_matmul_int8(x, *chosen)
        bad = x.clone()
        bad[3, 20], bad[8, 0], bad[12, 5] = NAN, INF, -INF
        y = routed_matmul_int8(bad, *chosen)
        is_bad = torch.zeros(30, dtype=torch.bool)
        is_bad[[3, 8, 12]] = True
        assert y[is_bad].isnan().all()
        assert torch.equal(y[~is_bad], expected[~is_bad])
        by_reference = reference.routed_matmul_int8(bad, *chosen[:3], k if given is not None else 1)
        assert torch.equal(by_reference.isnan(), y.isnan())


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-31, 1e-20, 1e20, 3e38])
def test_rows_of_any_size(size):
    """Below 1e-30 a row counts as zeros, and gets the bias; else its answer follows its size."""
    x = torch.randn(5, 30)
    x /= x.abs().amax(1, keepdim=True)
    weight, bias = torch.randn(1, 6, 30) / 30, torch.randn(1, 6)
    y = routed_matmul_int8(x * size, None, quantize_experts(weight, bias), 6)
    unit = routed_matmul_int8(x, None, quantize_experts(weight, None), 6)
    torch.testing.assert_close(y, (unit * size if size > 1e-30 else 0 * unit) + bias[0], rtol=1e-5, atol=1e-6)
    if size < 1e-30:
        assert torch.equal(y, bias.expand(5, 6))


def test_experts_of_any_size():
    """Each column has a scale: a tiny one keeps its bits beside a huge one, and a column of zeros is the bias."""
    x, weight, bias = torch.randn(9, 40), torch.randn(1, 3, 40), torch.tensor([[0.0, 0.0, 5.0]])
    weight *= torch.tensor([1e-20, 1e20, 0.0])[:, None]
    y = routed_matmul_int8(x, None, quantize_experts(weight, bias), 3)
    exact = x @ weight[0].T
    assert ((y[:, :2] - exact[:, :2]).abs() <= 0.05 * exact[:, :2].abs().max(0).values).all()
    assert torch.equal(y[:, 2], torch.full((9,), 5.0))


def test_the_form_holds_what_it_was_given():
    weight, scale = torch.randint(-127, 128, (3, 21, 7)).to(torch.int8), torch.rand(3, 21)
    bias = torch.randn(3, 21)
    packed = reference.pack(weight, scale, bias)
    assert (packed.shape, packed.dtype) == ((3, 2, 5, 64), torch.int8)
    for got, given in zip(reference.unpack(packed, 21, 7), (weight, scale, bias), strict=True):
        assert torch.equal(got, given)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_any_batch_and_number_of_threads_give_the_same_bits(threads, number):
    x, memory, weight, bias, k = problem((70, 900, 112, 8, 3))
    experts = quantize_experts(weight, bias)
    threads(1)
    alone = routed_matmul_int8(x, memory, experts, 112, k)
    threads(number)
    for size in (1, 2, 7, 19, 70):
        parts = [routed_matmul_int8(part, memory, experts, 112, k) for part in x.split(size)]
        assert torch.equal(torch.cat(parts), alone)


def test_rows_of_any_stride():
    x, memory, weight, bias, k = problem((20, 12, 5, 4, 2))
    experts = quantize_experts(weight, bias)
    expected = routed_matmul_int8(x, memory, experts, 5, k)
    apart = experts.transpose(1, 3).contiguous().transpose(1, 3)
    for rows in of_other_strides(x):
        assert torch.equal(routed_matmul_int8(rows, memory.T.contiguous().T, apart, 5, k), expected)


def test_opcheck_and_fullgraph():
    x, memory, weight, bias, k = problem((9, 6, 5, 4, 2))
    experts = quantize_experts(weight, bias)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")  # the fourth is what follows
    for arguments in ((x, memory, experts, 5, k), (x, None, experts[:1], 5)):
        torch.library.opcheck(torch.ops.rbm.routed_matmul_int8.default, arguments, test_utils=checks)
    compiled = torch.compile(routed_matmul_int8, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 300):
        x = torch.randn(rows, 6)
        assert torch.equal(compiled(x, memory, experts, 5, k), routed_matmul_int8(x, memory, experts, 5, k))


def test_gradients_are_refused_and_not_lost():
    x, memory, weight, bias, k = problem((5, 4, 3, 3, 2))
    experts = quantize_experts(weight.requires_grad_(), bias)
    assert not experts.requires_grad
    with pytest.raises(RuntimeError, match="no derivative of its own"):
        routed_matmul_int8(x.requires_grad_(), memory, experts, 3, k)
    with torch.no_grad():
        assert not routed_matmul_int8(x, memory, experts, 3, k).requires_grad
    with torch.inference_mode():
        assert routed_matmul_int8(x, memory, experts, 3, k).is_inference()


BAD = {
    "dtype of x": ({"x": lambda t: t.double()}, TypeError, "x has dtype float64, expected float32"),
    "dtype of memory": ({"memory": lambda t: t.double()}, TypeError, "memory has dtype float64, expected float32"),
    "dtype of experts": ({"experts": lambda t: t.int()}, TypeError, "experts has dtype int32, expected int8"),
    "features": ({"x": lambda t: t[:, :3]}, ValueError, "memory has shape"),
    "one row alone": ({"x": lambda t: t[0]}, ValueError, r"x has shape \[4\], expected \[\*, \*\]"),
    "experts": ({"experts": lambda t: t[:2]}, ValueError, "experts has shape"),
    "outputs": ({"out_features": lambda n: 17}, ValueError, r"expected \[3, 2, 4, 64\] \(what quantize_experts"),
    "negative outputs": ({"out_features": lambda n: -1}, ValueError, "out_features is -1, expected between 0 and"),
    "k": ({"k": lambda k: 9}, ValueError, "k is 9"),
    "k of one expert": ({"memory": lambda t: None}, ValueError, "k is 2, expected 1, since memory is None"),
    "temperature": ({"temperature": lambda t: 0.0}, ValueError, "temperature is 0"),
    "too many features": ({"x": lambda t: torch.zeros(1, 2**17 + 1)}, ValueError, "131073 features, expected at most"),
}


@pytest.mark.parametrize(("changes", "error", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments(changes, error, message):
    x, memory, weight, bias, k = problem((5, 4, 3, 3, 2))
    arguments = {"x": x, "memory": memory, "experts": quantize_experts(weight, bias), "out_features": 3, "k": k}
    arguments["temperature"] = 1.0
    for name, change in changes.items():
        arguments[name] = change(arguments[name])
    with pytest.raises(error, match=message):
        routed_matmul_int8(**arguments)
    with pytest.raises((error, RuntimeError), match=message):
        torch.ops.rbm.routed_matmul_int8(**arguments)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("number", [NAN, INF])
def test_experts_that_are_not_finite(name, number):
    given = {"weight": torch.zeros(2, 3, 4), "bias": torch.zeros(2, 3)}
    given[name].view(-1)[5] = number
    with pytest.raises(ValueError, match=f"{name} holds numbers that are not finite"):
        quantize_experts(**given)


def test_experts_without_numbers():
    experts = quantize_experts(torch.zeros(2, 3, 4, device="meta"), torch.zeros(2, 3, device="meta"))
    assert experts.device.type == "meta"
    assert experts.shape == quantize_experts(torch.zeros(2, 3, 4), torch.zeros(2, 3)).shape


def test_bad_experts():
    with pytest.raises(TypeError, match="weight has dtype float64, expected float32"):
        quantize_experts(torch.zeros(2, 3, 4).double(), None)
    with pytest.raises(ValueError, match=r"weight has shape \[3, 4\], expected \[\*, \*, \*\]"):
        quantize_experts(torch.zeros(3, 4), None)
    with pytest.raises(ValueError, match=r"bias has shape \[2, 4\], expected \[2, 3\]"):
        quantize_experts(torch.zeros(2, 3, 4), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="weight has 131073 features, expected at most 131072"):
        quantize_experts(torch.zeros(1, 1, 2**17 + 1), None)
