"""Attention and scale folded into the experts: meaning, derivatives, mistakes, contracts of an operator."""

import math

import pytest
import torch
from folded_problems import check, problem, results

from rbm_kernels import fold_experts

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# (E, N, D)
SHAPES = {
    "usual": (8, 12, 9),
    "one of each": (1, 1, 1),
    "no experts": (0, 5, 4),
    "no outputs": (3, 0, 4),
    "no features": (3, 5, 0),
}


def restated(weight, bias, attention, log_scale, dtype=None):
    """The layer's formula for a row of zeros and for unit vectors: the bias, and the columns of the weight beside it.

    An expert's input is scaled by ``exp(a)`` and its output by ``exp(s)``; a logarithm counts as log 100 at most.
    """
    num_experts, _, features = weight.shape
    rows = torch.cat([weight.new_zeros(1, features), torch.eye(features, dtype=weight.dtype)])
    rows = rows[:, None].expand(-1, num_experts, -1)
    if attention is not None:
        rows = rows * torch.minimum(attention, attention.new_tensor(math.log(100))).exp()
    y = torch.einsum("bed,end->ben", rows, weight)
    y = (y if bias is None else y + bias) * torch.minimum(log_scale, log_scale.new_tensor(math.log(100))).exp()
    return (y[1:] - y[:1]).permute(1, 2, 0), None if bias is None else y[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("attention", [True, False], ids=["attention", "no attention"])
def test_equals_the_layers_formula(shape, bias, attention, dtype):
    arguments = problem(shape, dtype, bias=bias, attention=attention)
    got = results(fold_experts, *arguments)
    truth = results(restated, *(None if t is None else t.double() for t in arguments))
    tolerance = 16 * torch.finfo(dtype).eps
    for one, other in zip(got, truth, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == dtype
            reach = max(1.0, other.abs().max().item()) if other.numel() else 1.0
            torch.testing.assert_close(one.double(), other, atol=tolerance * reach, rtol=0)


@pytest.mark.parametrize("folded", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_of_the_result(dtype, folded):
    """Both results are in it; gradients stay in the dtype of the parameters."""
    arguments = problem((3, 5, 4), dtype, folded=folded)
    got = results(fold_experts, *arguments, dtype=folded)
    assert [t.dtype for t in got] == [folded] * 2 + [dtype] * 4
    for one, whole in zip(got[:2], fold_experts(*arguments[:4]), strict=True):
        assert torch.equal(one, whole.to(folded))
    check(got, *arguments, dtype=folded)


def test_a_scalar_scale():
    weight, bias, attention, log_scale, *grads = problem((3, 5, 4))
    got = results(fold_experts, weight, bias, attention, log_scale[0], *grads)
    expected = results(fold_experts, weight, bias, attention, log_scale, *grads)
    assert got[-1].shape == ()
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other.view(one.shape))


@pytest.mark.parametrize("attention", [True, False])
def test_a_clamped_scale_gets_no_gradient(attention):
    arguments = list(problem((3, 5, 4), torch.float64, attention=attention))
    arguments[3].fill_(4.7)
    got = results(fold_experts, *arguments)
    assert torch.equal(got[-1], torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(got[1], 100 * arguments[1])
    torch.testing.assert_close(got[2:5], results(restated, *arguments)[2:5])


def test_clamped_attention_gets_no_gradient():
    arguments = problem((3, 5, 4), torch.float64)
    attention = arguments[2]
    attention[0, 1], attention[2, 0], attention[1, 3] = 4.7, float("inf"), float("-inf")
    clamped = attention > math.log(100)
    got, truth = results(fold_experts, *arguments), results(restated, *arguments)
    assert torch.equal(got[4] == 0, clamped | (attention == float("-inf")))
    columns = arguments[0].transpose(1, 2)[clamped]
    torch.testing.assert_close(got[0].transpose(1, 2)[clamped], 100 * arguments[3].exp() * columns)
    torch.testing.assert_close(got, truth)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 3), (1, 2)], ids=str)
def test_gradients_of_some(wanted):
    arguments = problem((3, 5, 4))
    every = results(fold_experts, *arguments)[2:]
    leaves = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(arguments[:4])]
    found = torch.autograd.grad(fold_experts(*leaves), [leaves[i] for i in wanted], arguments[4:])
    assert all(torch.equal(one, every[i]) for i, one in zip(wanted, found, strict=True))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("place", [0, 1])
def test_only_one_result_is_used(place, create_graph):
    arguments = problem((3, 5, 4), torch.float64)
    leaves, grad = [t.clone().requires_grad_() for t in arguments[:4]], arguments[4 + place]
    options = {"allow_unused": True, "materialize_grads": True, "create_graph": create_graph}
    got = torch.autograd.grad(fold_experts(*leaves)[place], leaves, grad, **options)
    wanted = torch.autograd.grad(restated(*leaves)[place], leaves, grad, **options)
    torch.testing.assert_close(got, wanted)


def test_what_needs_no_gradient_has_none():
    arguments = problem((3, 5, 4))[:4]
    assert not any(t.requires_grad for t in fold_experts(*arguments))
    folded, folded_bias = fold_experts(arguments[0].requires_grad_(), None, *arguments[2:])
    assert folded.requires_grad
    assert folded_bias is None


@pytest.mark.parametrize("options", [True, False])
def test_strides_do_not_reach_the_result(options):
    """The fake implementation says contiguous, and so do the kernels."""
    arguments = [None if t is None else t.mT.contiguous().mT if t.dim() > 1 else t for t in problem((3, 5, 4))]
    if not options:
        arguments[1] = arguments[2] = arguments[5] = None
    got = results(fold_experts, *arguments)
    assert all(t.is_contiguous() for t in got if t is not None)
    check(got, *arguments)
    for t in torch.ops.rbm.fold_experts_backward(*arguments[4:], *arguments[:4]):
        assert t.is_contiguous()


def test_autocast_changes_nothing():
    arguments = problem((3, 5, 4))
    expected = results(fold_experts, *arguments)
    with torch.autocast("cpu", torch.bfloat16):
        got = results(fold_experts, *arguments)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def mistakes():
    weight, bias, attention, log_scale, *_ = problem((3, 5, 4))
    return {
        "weight of integers": (
            (weight.int(), bias, attention, log_scale),
            TypeError,
            "weight has dtype int32, expected",
        ),
        "weight of two dimensions": (
            (weight[0], None, None, log_scale),
            ValueError,
            r"weight has shape \[5, 4\], expected \[\*, \*, \*\] \(experts by outputs by features\)",
        ),
        "dtype of bias": (
            (weight, bias.half(), attention, log_scale),
            TypeError,
            "bias has dtype float16, expected float32",
        ),
        "shape of bias": ((weight, bias[:, :4], attention, log_scale), ValueError, r"bias has shape \[3, 4\]"),
        "dtype of attention": (
            (weight, bias, attention.double(), log_scale),
            TypeError,
            "attention has dtype float64, expected float32",
        ),
        "shape of attention": (
            (weight, bias, attention[:2], log_scale),
            ValueError,
            r"attention has shape \[2, 4\], expected \[3, 4\] \(experts by features, as in weight\)",
        ),
        "dtype of log_scale": (
            (weight, bias, attention, log_scale.bfloat16()),
            TypeError,
            "log_scale has dtype bfloat16, expected float32",
        ),
        "two scales": (
            (weight, bias, attention, torch.zeros(2)),
            ValueError,
            r"log_scale has shape \[2\], expected \[1\] or \[\] \(one number\)",
        ),
        "no scale": ((weight, bias, attention, torch.zeros(0)), ValueError, r"log_scale has shape \[0\]"),
        "scale of two dimensions": (
            (weight, bias, attention, log_scale[None]),
            ValueError,
            r"log_scale has shape \[1, 1\]",
        ),
    }


@pytest.mark.parametrize("name", mistakes())
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_mistakes_get_a_sentence(name, device):
    arguments, error, sentence = mistakes()[name]
    arguments = [None if t is None else t.to(device) for t in arguments]
    for call in (fold_experts, torch.ops.rbm.fold_experts):
        with pytest.raises(error, match=f"^rbm::fold_experts: {sentence}"):
            call(*arguments)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_dtype_that_is_none_of_these(device):
    arguments = [t.to(device) for t in problem((3, 5, 4))[:4]]
    expected = "dtype is int32, expected None or one of float64, float32, bfloat16, float16"
    with pytest.raises(TypeError, match=f"^rbm::fold_experts: {expected}"):
        fold_experts(*arguments, dtype=torch.int32)


@pytest.mark.parametrize("place", [0, 1], ids=["grad_weight", "grad_bias"])
def test_gradients_that_do_not_fit_are_refused(place):
    arguments = problem((3, 5, 4))
    name = ("grad_weight", "grad_bias")[place]
    for wrong, error in ((arguments[4 + place][:2], ValueError), (arguments[4 + place].int(), TypeError)):
        grads = [wrong if i == place else t for i, t in enumerate(arguments[4:])]
        with pytest.raises(error, match=f"^rbm::fold_experts_backward: {name} has "):
            torch.ops.rbm.fold_experts_backward(*grads, *arguments[:4])


@pytest.mark.parametrize("options", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype, options):
    arguments = problem((3, 5, 4), dtype, bias=options, attention=options)
    leaves = [None if t is None else t.clone().requires_grad_() for t in arguments[:4]]
    torch.library.opcheck(torch.ops.rbm.fold_experts.default, leaves)
    torch.library.opcheck(torch.ops.rbm.fold_experts.default, arguments[:4], {"dtype": torch.float16})
    turned = (arguments[0].mT.contiguous().mT, *arguments[1:4])
    torch.library.opcheck(torch.ops.rbm.fold_experts.default, turned)
    torch.library.opcheck(torch.ops.rbm.fold_experts_backward.default, (*arguments[4:], *turned))


def test_compile():
    arguments = problem((3, 5, 4))

    def by_operator(weight, bias, attention, log_scale):
        folded, folded_bias = fold_experts(weight, bias, attention, log_scale)
        return folded.sin().sum() + folded_bias.cos().sum()

    compiled = torch.compile(by_operator, backend="aot_eager", fullgraph=True)
    leaves = [t.clone().requires_grad_() for t in arguments[:4]]
    expected = torch.autograd.grad(by_operator(*leaves), leaves)
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves), leaves), expected)
