"""packed_feed_forward: both products of feed-forward experts in one call, against their equations in float64."""

import math

import pytest
import routed_problems
import torch
from routed_problems import of_other_strides

from rbm_kernels import cosine_topk, pack_experts, packed_feed_forward
from rbm_kernels.checks import accumulation_dtype
from rbm_kernels.ops.packed_experts import reference as packing
from rbm_kernels.ops.packed_feed_forward import op
from rbm_kernels.ops.packed_feed_forward.reference import ACTIVATIONS

DTYPES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}
# Each shape exists for a reason: (B, D, N, E, k)
SHAPES = routed_problems.SHAPES | {
    "several blocks of the features": (30, 2100, 20, 3, 2),
    "every width of the last panel": (25, 9, 64 + 49, 4, 2),
    "more rows than are processed at once": (800, 5, 7, 4, 3),
    "one choice": (9, 8, 64, 3, 1),
}


def problem(shape, dtype, activation: str, hidden: int = 13):
    """Rows, memory, both weights and biases, and k."""
    x, memory, _, _, k = routed_problems.problem(shape, dtype)
    _, features, outputs, num_experts, _ = shape
    wide = ACTIVATIONS[activation][1] * hidden

    def draw(*size: int) -> torch.Tensor:
        return (torch.randn(*size, dtype=torch.float64) / math.sqrt(max(1, size[-1]))).to(dtype)

    weights = [draw(num_experts, wide, features), draw(num_experts, outputs, hidden)]
    return x, memory, weights, [draw(num_experts, wide), draw(num_experts, outputs)], k


def packed(weights, biases, pack=pack_experts):
    return [pack(weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def exact(x, memory, weights, biases, k, activation, temperature):
    """The sum over a row's choices, in float64."""
    gates, experts, _ = cosine_topk(x, memory, k, temperature=temperature)
    rows, activate = x.double()[:, None, :, None], ACTIVATIONS[activation][0]
    for weight, bias, after in zip(weights, biases, (activate, lambda t: t), strict=True):
        rows = weight.double()[experts.long()] @ rows
        if bias is not None:
            rows = rows + bias.double()[experts.long()][..., None]
        rows = after(rows.squeeze(-1)).unsqueeze(-1)
    return (gates.double()[..., None] * rows.squeeze(-1)).sum(1)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_answers(shape, dtype, activation):
    x, memory, weights, biases, k = problem(shape, dtype, activation)
    for some in (biases, [None, None]):
        wanted = exact(x, memory, weights, some, k, activation, 0.7)
        tolerance = DTYPES[dtype] * (1 + wanted.abs().max().item() if wanted.numel() else 1)
        arguments = (13, shape[2], k, activation, 0.7)
        y = packed_feed_forward(x, memory, *packed(weights, some), *arguments)
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), wanted, rtol=0, atol=tolerance)
        eager = op._eager(x, memory, *packed(weights, some, packing.pack_experts), *arguments)
        torch.testing.assert_close(eager.double(), wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_all_numbers(activation, dtype):
    """One expert passes numbers on, so results are activations, compared with PyTorch's."""
    numbers = torch.cat([torch.linspace(-100, 100, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 3e38, -3e38])])
    inputs = numbers.to(dtype)[:, None]
    width, one = ACTIVATIONS[activation][1], torch.ones(1, 1, 1, dtype=dtype)
    first = pack_experts(one.expand(1, width, 1), None)
    y = packed_feed_forward(inputs, one[0], first, pack_experts(one, None), 1, 1, 1, activation)
    wanted = ACTIVATIONS[activation][0](inputs.double().expand(-1, width)).to(dtype)
    unit = 4e-7 if dtype == torch.float32 else 1e-14
    torch.testing.assert_close(y, wanted, rtol=unit, atol=unit)


@pytest.mark.parametrize("dtype", DTYPES)
def test_relu_of_minus_infinity_is_zero(dtype):
    """A bias of minus infinity turns a hidden feature off, as in training; it became NaN."""
    one, off = torch.ones(1, 1, 1, dtype=dtype), torch.full((1, 1), -torch.inf, dtype=dtype)
    memory = one[0].to(accumulation_dtype(one))
    y = packed_feed_forward(one[0], memory, pack_experts(one, off), pack_experts(one, one[0]), 1, 1, 1, "relu")
    assert torch.equal(y, one[0])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bfloat16_activations_of_all_numbers(activation):
    """In panels of whole blocks, which AMX activates by its own instructions. Each feature passes on one number."""
    edges = [0.0, -0.0, 1e-30, -1e-30, 88.5, -88.5, 95.5, -95.5, 127.0, -127.0, 1e18, -1e18]
    x = torch.cat([torch.linspace(-100, 100, 6388), torch.tensor(edges)]).bfloat16().view(100, 64)
    width, one = ACTIVATIONS[activation][1], torch.eye(64, dtype=torch.bfloat16)
    first, second = pack_experts(one.repeat(width, 1)[None], None), pack_experts(one[None], None)
    y = packed_feed_forward(x, torch.ones(1, 64), first, second, 64, 64, 1, activation)
    wanted = ACTIVATIONS[activation][0](x.double().repeat(1, width))
    torch.testing.assert_close(y.double(), wanted, rtol=2e-2, atol=1e-6)
    for number in (torch.nan, torch.inf):
        x[3, 5] = number
        y = packed_feed_forward(x, torch.ones(1, 64), first, second, 64, 64, 1, activation)
        assert not y[3].isfinite().any()
        torch.testing.assert_close(y[4:].double(), wanted[4:], rtol=2e-2, atol=1e-6)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [70, 192])
def test_a_row_has_the_same_bits_in_every_batch_and_with_any_number_of_threads(threads, dtype, activation, hidden):
    """Threads divide the columns of few rows, if gates and values are in different panels: with 192 hidden features."""
    x, memory, weights, biases, k = problem((90, 701, 40, 4, 2), dtype, activation, hidden=hidden)
    pair, sizes = packed(weights, biases), (hidden, 40, k, activation)
    threads(1)
    together = packed_feed_forward(x, memory, *pair, *sizes)
    threads(3)
    assert torch.equal(packed_feed_forward(x, memory, *pair, *sizes), together)
    for size in (1, 7, 33):
        apart = [packed_feed_forward(part, memory, *pair, *sizes) for part in x.split(size)]
        assert torch.equal(torch.cat(apart), together)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [33, 512, 513])
def test_whole_panels_of_hidden_features(dtype, activation, features):
    """Processors with AMX write them without sums, of rows with at most 512 features: blocks of 1 to 32 rows."""
    x, memory, weights, biases, k = problem((60, features, 9, 3, 2), dtype, activation, hidden=128)
    memory[0] = x[0].double()  # so that one expert has more rows than a block
    for rows in (1, 60):
        y = packed_feed_forward(x[:rows], memory, *packed(weights, biases), 128, 9, k, activation, 0.7)
        wanted = exact(x[:rows], memory, weights, biases, k, activation, 0.7)
        torch.testing.assert_close(y.double(), wanted, rtol=0, atol=DTYPES[dtype] * (1 + wanted.abs().max().item()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [64, 300])
def test_threads_take_parts_of_many_rows(threads, dtype, hidden):
    """Their hidden features would not fit in a cache. Which thread takes which part does not matter."""
    x, memory, weights, biases, k = problem((3000, 6, 9, 3, 2), dtype, "swiglu", hidden=hidden)
    pair = packed(weights, biases)
    threads(1)
    y = packed_feed_forward(x, memory, *pair, hidden, 9, k, "swiglu")
    wanted = exact(x, memory, weights, biases, k, "swiglu", 1.0)
    torch.testing.assert_close(y.double(), wanted, rtol=0, atol=DTYPES[dtype] * (1 + wanted.abs().max().item()))
    for count in (2, 3, 8):
        threads(count)
        assert torch.equal(packed_feed_forward(x, memory, *pair, hidden, 9, k, "swiglu"), y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_any_stride(dtype):
    x, memory, weights, biases, k = problem((20, 13, 5, 4, 2), dtype, "silu")
    pair = packed(weights, biases)
    expected = packed_feed_forward(x, memory, *pair, 13, 5, k, "silu")
    for rows in of_other_strides(x):
        turned = memory.T.contiguous().T
        assert torch.equal(packed_feed_forward(rows, turned, *pair, 13, 5, k, "silu"), expected)


def test_gradients_are_refused_and_not_lost():
    x, memory, weights, biases, k = problem((5, 4, 3, 3, 2), torch.float32, "relu")
    arguments = (memory, *packed(weights, biases), 13, 3, k, "relu")
    with pytest.raises(RuntimeError, match="no derivative of its own: differentiate rbm::expert_matmul"):
        packed_feed_forward(x.requires_grad_(), *arguments)
    with torch.no_grad():
        assert not packed_feed_forward(x, *arguments).requires_grad
    with torch.inference_mode():
        assert packed_feed_forward(x, *arguments).is_inference()


BAD = {
    "half": ({"x": lambda t: t.half()}, TypeError, "x has dtype float16, expected float64 or float32 or bfloat16"),
    "dtype of memory": ({"memory": lambda t: t.double()}, TypeError, "memory has dtype float64, expected float32"),
    "dtype of packed": ({"packed_in": lambda t: t.double()}, TypeError, "packed_in has dtype float64"),
    "features": ({"x": lambda t: t[:, :3]}, ValueError, "memory has shape"),
    "experts": ({"packed_out": lambda t: t[:2]}, ValueError, "packed_out has shape"),
    "hidden": ({"hidden_features": lambda n: 12}, ValueError, "packed_out has shape"),
    "wide": ({"hidden_features": lambda n: 1000}, ValueError, "hidden_features is 1000, expected between 0 and"),
    "negative": ({"hidden_features": lambda n: -1}, ValueError, "hidden_features is -1, expected between 0 and"),
    "outputs": ({"out_features": lambda n: 1000}, ValueError, "out_features is 1000, expected between 0 and"),
    "fewer outputs": ({"out_features": lambda n: 0}, RuntimeError, "what pack_experts returned on this processor"),
    "k": ({"k": lambda k: 9}, ValueError, "k is 9"),
    "activation": ({"activation": lambda name: "tanh"}, ValueError, "activation is 'tanh', expected one of relu, gelu"),
    "temperature": ({"temperature": lambda t: 0.0}, ValueError, "temperature is 0"),
}


@pytest.mark.parametrize(("changes", "error", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments(changes, error, message):
    x, memory, weights, biases, k = problem((5, 4, 3, 3, 2), torch.float32, "relu")
    first, second = packed(weights, biases)
    arguments = {"x": x, "memory": memory, "packed_in": first, "packed_out": second, "hidden_features": 13}
    arguments |= {"out_features": 3, "k": k, "activation": "relu", "temperature": 1.0}
    for name, change in changes.items():
        arguments[name] = change(arguments[name])
    with pytest.raises(error, match=message):
        packed_feed_forward(**arguments)
