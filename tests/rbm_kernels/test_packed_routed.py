"""expert_matmul_packed: experts packed for the processor, and rows that are routed already."""

import pytest
import routed_problems
import torch
from routed_problems import of_other_strides, problem

from rbm_kernels import expert_matmul_packed, pack_experts
from rbm_kernels.ops.packed_experts import reference
from rbm_kernels.ops.packed_experts.op import _eager_given

DTYPES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 8e-3}
# Each shape exists for a reason: (B, D, N, E, k)
SHAPES = routed_problems.SHAPES | {
    "several blocks of the features": (30, 2100, 20, 3, 2),
    "every width of the last panel": (25, 9, 64 + 49, 4, 2),
    "more rows than are processed at once": (800, 5, 7, 4, 3),
    "one choice": (9, 8, 64, 3, 1),
}


def routed(shape, dtype, *, own_rows: bool = False):
    """Rows, gates, experts, weight and bias."""
    x, _, weight, bias, k = problem(shape, dtype)
    rows, features, _, num_experts, _ = shape
    if own_rows:
        x = torch.randn(rows, k, features, dtype=torch.float64).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return x, torch.rand(rows, k, dtype=wide), torch.rand(rows, num_experts).argsort(1)[:, :k].int(), weight, bias


def of_each_pair(x, experts, weight, bias):
    """``[B, k, N]`` in float64: the product of each choice by itself."""
    rows = x.double() if x.dim() == 3 else x.double()[:, None].expand(*experts.shape, -1)
    matrices = weight.double()[experts.long()]
    products = (matrices @ rows[..., None])[..., 0]
    return products if bias is None else products + bias.double()[experts.long()]


@pytest.mark.parametrize("own_rows", [False, True], ids=["", "own rows"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_products(shape, dtype, own_rows):
    x, gates, experts, weight, bias = routed(shape, dtype, own_rows=own_rows)
    for some_bias in (bias, None):
        parts = of_each_pair(x, experts, weight, some_bias)
        tolerance = DTYPES[dtype] * (1 + parts.abs().max().item() if parts.numel() else 1)
        packed, eager = pack_experts(weight, some_bias), reference.pack_experts(weight, some_bias)
        for some_gates in (gates, None):
            wanted = parts if some_gates is None else (gates.double()[..., None] * parts).sum(1)
            for y in (
                expert_matmul_packed(x, some_gates, experts, packed, shape[2]),
                _eager_given(x, some_gates, experts, eager, shape[2]),
            ):
                assert y.dtype == dtype
                torch.testing.assert_close(y.double(), wanted, rtol=0, atol=tolerance * shape[4])


@pytest.mark.parametrize("own_rows", [False, True], ids=["", "own rows"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch_and_with_any_number_of_threads(threads, dtype, own_rows):
    x, gates, experts, weight, bias = routed((50, 701, 40, 4, 2), dtype, own_rows=own_rows)
    packed = pack_experts(weight, bias)
    for some_gates in (gates, None):
        threads(1)
        together = expert_matmul_packed(x, some_gates, experts, packed, 40)
        threads(3)
        assert torch.equal(expert_matmul_packed(x, some_gates, experts, packed, 40), together)
        for size in (1, 7, 19):
            apart = [
                expert_matmul_packed(
                    x[i : i + size],
                    None if some_gates is None else gates[i : i + size],
                    experts[i : i + size],
                    packed,
                    40,
                )
                for i in range(0, 50, size)
            ]
            assert torch.equal(torch.cat(apart), together)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_any_stride(dtype):
    x, gates, experts, weight, bias = routed((20, 13, 5, 4, 2), dtype)
    packed = pack_experts(weight, bias)
    expected = expert_matmul_packed(x, gates, experts, packed, 5)
    for rows in of_other_strides(x):
        given = gates.T.contiguous().T, experts.T.contiguous().T
        assert torch.equal(expert_matmul_packed(rows, *given, packed, 5), expected)
        of_choices = torch.stack([rows, rows], dim=2).transpose(1, 2)
        assert torch.equal(expert_matmul_packed(of_choices, gates, experts, packed, 5), expected)


def test_an_expert_that_a_row_uses_twice_counts_twice():
    x, _, _, weight, bias = routed((3, 4, 5, 2, 2), torch.float32)
    experts, gates = torch.tensor([[1, 1]] * 3, dtype=torch.int32), torch.tensor([[0.25, 0.75]] * 3)
    y = expert_matmul_packed(x, gates, experts, pack_experts(weight, bias), 5)
    torch.testing.assert_close(y, x @ weight[1].T + bias[1])


def test_gradients_are_refused_and_not_lost():
    x, gates, experts, weight, bias = routed((5, 4, 3, 3, 2), torch.float32)
    packed = pack_experts(weight, bias)
    for wanting in ((x.clone().requires_grad_(), gates), (x, gates.clone().requires_grad_())):
        with pytest.raises(RuntimeError, match="no derivative of its own: differentiate rbm::expert_matmul"):
            expert_matmul_packed(*wanting, experts, packed, 3)
        with torch.no_grad():
            assert not expert_matmul_packed(*wanting, experts, packed, 3).requires_grad


BAD = {
    "half": ({"x": lambda t: t.half()}, TypeError, "x has dtype float16, expected float64 or float32 or bfloat16"),
    "dtype of packed": ({"packed": lambda t: t.double()}, TypeError, "packed has dtype float64, expected float32"),
    "dtype of gates": ({"gates": lambda t: t.double()}, TypeError, "gates has dtype float64, expected float32"),
    "dtype of experts": ({"experts": lambda t: t.long()}, TypeError, "experts has dtype int64, expected int32"),
    "one row": ({"x": lambda t: t[0]}, ValueError, r"x has shape \[4\], expected \[\*, \*\]"),
    "rows": ({"experts": lambda t: t[:3]}, ValueError, r"experts has shape \[3, 2\], expected \[5, \*\]"),
    "gates": ({"gates": lambda t: t[:, :1]}, ValueError, r"gates has shape \[5, 1\], expected \[5, 2\]"),
    "choices": (
        {"x": lambda t: t[:, None].expand(-1, 3, -1)},
        ValueError,
        r"experts has shape \[5, 2\], expected \[5, 3\]",
    ),
    "features": ({"x": lambda t: t[:, :3]}, ValueError, "packed has shape"),
    "outputs": ({"out_features": lambda n: 1000}, ValueError, "out_features is 1000, expected between 0 and"),
    "fewer outputs": ({"out_features": lambda n: 0}, RuntimeError, "what pack_experts returned on this processor"),
    "an expert": ({"experts": lambda t: t + 3}, RuntimeError, "experts holds [345] in row 0, expected between 0 and 2"),
}


@pytest.mark.parametrize(("changes", "error", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments(changes, error, message):
    x, gates, experts, weight, bias = routed((5, 4, 3, 3, 2), torch.float32)
    arguments = {"x": x, "gates": gates, "experts": experts, "packed": pack_experts(weight, bias), "out_features": 3}
    for name, change in changes.items():
        arguments[name] = change(arguments[name])
    with pytest.raises(error, match=message):
        expert_matmul_packed(**arguments)
