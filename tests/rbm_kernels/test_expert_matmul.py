"""The grouped matmul: meaning, derivatives, precision, contracts of an operator."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rbm_kernels import expert_matmul, expert_order
from rbm_kernels.ops.expert_matmul import op

# Each shape exists for a reason: (B, D, N, E, k)
SHAPES = {
    "usual": (33, 16, 12, 8, 3),
    "prime sizes": (31, 37, 7, 5, 2),
    "one row": (1, 5, 4, 3, 2),
    "no rows": (0, 5, 4, 3, 2),
    "all experts": (9, 4, 3, 3, 3),
    "one expert": (9, 4, 3, 1, 1),
}


def problem(shape, dtype=torch.float64, seed=0):
    b, d, n, e, k = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(b, d, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(e, n, d, generator=generator, dtype=torch.float64).to(dtype)
    bias = torch.randn(e, n, generator=generator, dtype=torch.float64).to(dtype)
    gates = torch.rand(b, k, generator=generator, dtype=torch.float64)
    gates = gates if dtype == torch.float64 else gates.float()
    experts = torch.rand(b, e, generator=generator).argsort(-1)[:, :k].int().contiguous()
    return x, weight, bias, gates, experts


def brute_force(x, weight, bias, gates, experts):
    """Row by row and expert by expert, in float64."""
    rows = []
    for b in range(x.shape[0]):
        y = torch.zeros(weight.shape[1], dtype=torch.float64)
        for j, e in enumerate(experts[b].tolist()):
            y += gates[b, j].double() * (weight[e].double() @ x[b].double() + bias[e].double())
        rows.append(y)
    return torch.stack(rows) if rows else torch.zeros(0, weight.shape[1], dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_against_brute_force(shape, dtype):
    arguments = problem(shape, dtype)
    y = expert_matmul(*arguments)
    assert y.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(y.double(), brute_force(*arguments), atol=tolerance * 10, rtol=tolerance)


@pytest.mark.parametrize("shape", [(7, 5, 4, 6, 3), (3, 2, 3, 2, 2)])
def test_gradients(shape):
    x, weight, bias, gates, experts = problem(shape)
    differentiable = [t.requires_grad_() for t in (x, weight, bias, gates)]
    assert torch.autograd.gradcheck(lambda x, w, b, g: expert_matmul(x, w, b, g, experts), differentiable)
    assert torch.autograd.gradcheck(lambda x, w, g: expert_matmul(x, w, None, g, experts), (x, weight, gates))


@pytest.mark.parametrize("needed", range(4))
def test_each_gradient_alone_equals_the_joint_one(needed):
    *tensors, experts = problem((20, 6, 5, 4, 2))
    joint = torch.autograd.grad(expert_matmul(*[t.requires_grad_() for t in tensors], experts).square().sum(), tensors)
    alone = [t.detach().requires_grad_(i == needed) for i, t in enumerate(tensors)]
    (grad,) = torch.autograd.grad(expert_matmul(*alone, experts).square().sum(), alone[needed])
    torch.testing.assert_close(grad, joint[needed])


def test_unused_expert_gets_zero_gradient():
    x, weight, bias, gates, experts = problem((10, 4, 3, 3, 1))
    experts = experts % 2
    weight.requires_grad_()
    expert_matmul(x, weight, bias, gates, experts).sum().backward()
    assert weight.grad[2].abs().sum() == 0
    assert (weight.grad[:2].abs().sum((1, 2)) > 0).all()


def test_order_never_changes_the_result():
    arguments = problem((50, 6, 5, 8, 3))
    order = expert_order(arguments[-1], 8, 16)
    torch.testing.assert_close(expert_matmul(*arguments, order), expert_matmul(*arguments))


def test_strides():
    x, weight, bias, gates, experts = problem((20, 12, 5, 4, 2))
    wide = torch.randn(40, 24, dtype=torch.float64)
    wide[::2, ::2] = x
    got = expert_matmul(wide[::2, ::2], weight.transpose(1, 2).contiguous().transpose(1, 2), bias, gates, experts)
    torch.testing.assert_close(got, expert_matmul(x, weight, bias, gates, experts))


@pytest.mark.parametrize("name", ["reference", "chosen by the dispatcher"])
def test_gradients_have_the_strides_that_tracing_expects(name):
    """A compiled program relies on the strides of the fake implementation."""
    x, weight, bias, gates, experts = (tensor.mT.contiguous().mT for tensor in problem((20, 12, 5, 4, 2)))
    grad = torch.randn(5, 20, dtype=torch.float64).T
    backward = op._eager_backward_input if name == "reference" else torch.ops.rbm.expert_matmul_backward_input
    got = backward(grad, x, weight, bias, gates, experts)
    for tensor, fake in zip(got, op._fake_backward_input(grad, x, weight, bias, gates, experts), strict=True):
        assert tensor.stride() == fake.stride()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**16), rows=st.integers(2, 30), experts=st.integers(1, 7))
def test_rows_are_independent_and_experts_are_names(seed, rows, experts):
    x, weight, bias, gates, chosen = problem((rows, 4, 3, experts, min(2, experts)), seed=seed)
    whole = expert_matmul(x, weight, bias, gates, chosen)
    generator = torch.Generator().manual_seed(seed)

    permutation = torch.randperm(rows, generator=generator)
    permuted = expert_matmul(x[permutation], weight, bias, gates[permutation], chosen[permutation])
    torch.testing.assert_close(permuted, whole[permutation])
    names = torch.randperm(experts, generator=generator)
    renamed = expert_matmul(x, weight[names], bias[names], gates, names.argsort()[chosen.long()].int())
    torch.testing.assert_close(renamed, whole)


def test_opcheck():
    x, weight, bias, gates, experts = problem((12, 6, 5, 4, 2), torch.float32)
    differentiable = [t.requires_grad_() for t in (x, weight, bias, gates)]
    operator = torch.ops.rbm.expert_matmul.default
    torch.library.opcheck(operator, (*differentiable, experts))
    torch.library.opcheck(operator, (x, weight, None, gates, experts, *expert_order(experts, 4, 8)))


@pytest.mark.parametrize(
    ("position", "value", "error", "message"),
    [
        (0, torch.randn(4, 3), ValueError, r"weight has shape \[3, 5, 6\], expected \[\*, \*, 3\]"),
        (1, torch.randn(3, 5, 6).double(), TypeError, "weight has dtype float64, expected float32"),
        (2, torch.randn(3, 4), ValueError, r"bias has shape \[3, 4\], expected \[3, 5\]"),
        (3, torch.rand(5, 2), ValueError, r"gates has shape \[5, 2\], expected \[4, \*\]"),
        (3, torch.rand(4, 2).half(), TypeError, "gates has dtype float16, expected float32"),
        (4, torch.zeros(4, 3, dtype=torch.int32), ValueError, r"experts has shape \[4, 3\], expected \[4, 2\]"),
        (4, torch.zeros(4, 2).long(), TypeError, r"experts has dtype int64, expected int32; use experts.to\("),
    ],
)
def test_bad_arguments(position, value, error, message):
    arguments = list(problem((4, 6, 5, 3, 2), torch.float32))
    arguments[position] = value
    with pytest.raises(error, match="rbm::expert_matmul: " + message):
        expert_matmul(*arguments)


def test_what_is_no_order():
    x, weight, bias, gates, experts = problem((4, 6, 5, 3, 2), torch.float32)
    for order, kind in ((expert_order(experts, 3).order, "Tensor"), (3, "int")):
        with pytest.raises(TypeError, match=rf"order is a {kind}, expected None or all that rbm_kernels\.expert_order"):
            expert_matmul(x, weight, bias, gates, experts, order)
