"""PReLU, unit rows and SwiGLU have the values and all derivatives of PyTorch's functions."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional as F

from rbm.nn.cpu_derivatives import PReLU, swiglu, unit_rows
from rbm.nn.feed_forward import RbMFeedForward
from rbm.nn.simmlp import SimMLPStudent
from rbm_kernels.ops.packed_feed_forward import ACTIVATIONS

plain_swiglu = ACTIVATIONS["swiglu"][0]


def derivatives(value, parts):
    """The gradient in ``parts``, and the gradient of its squared length."""
    once = torch.autograd.grad(value, parts, retain_graph=True)
    again = torch.autograd.grad(value, parts, create_graph=True)
    torch.testing.assert_close(again, once)
    return [*once, *torch.autograd.grad(sum(part.square().sum() for part in again), parts)]


@pytest.mark.parametrize("slope", [0.25, -0.5])
def test_prelu_is_pytorchs(slope):
    x = torch.randn(50, 7, requires_grad=True)
    ours, plain = PReLU(init=slope), nn.PReLU(init=slope)
    weights = torch.randn(50, 7)
    found, expected = ((module(x).square() * weights).sum() for module in (ours, plain))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(derivatives(found, [x, ours.weight]), derivatives(expected, [x, plain.weight]))
    with torch.no_grad():
        assert torch.equal(ours(x), plain(x))


def test_prelu_in_mixed_precision():
    """Autocast casts the slope; PyTorch's derivative takes several times as long then."""
    x = torch.randn(200, 7).bfloat16().requires_grad_()
    found = []
    for module in (PReLU(init=0.3), nn.PReLU(init=0.3)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = module(x)
        name = y.grad_fn.name()
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, module.weight])])
        assert ("_PReLU" in name) == isinstance(module, PReLU)
    assert [part.dtype for part in found[0]] == [part.dtype for part in found[1]]
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("part", ["rows", "slope"])
def test_second_derivatives_where_the_rows_or_the_slope_need_none(part):
    x = torch.randn(50, 7, requires_grad=part == "rows")
    found, expected = [], []
    for module, into in ((PReLU(), found), (nn.PReLU(), expected)):
        module.weight.requires_grad_(part == "slope")
        value = module(x).square().sum()
        into += derivatives(value, [x if part == "rows" else module.weight])
    torch.testing.assert_close(found, expected)


PAIRS = [(PReLU(), nn.PReLU()), (unit_rows, lambda x: F.normalize(x, dim=-1)), (swiglu, plain_swiglu)]


@pytest.mark.parametrize(("ours", "plain"), PAIRS)
def test_forward_mode(ours, plain):
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.randn(5, 8), torch.randn(5, 8))
        for found, expected in zip(forward_ad.unpack_dual(ours(x)), forward_ad.unpack_dual(plain(x)), strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("ours", "plain"), PAIRS)
def test_backward_of_several_gradients_at_once(ours, plain):
    """As ``torch.autograd.functional.jacobian(vectorize=True)`` and ``vmap`` of a backward pass ask for them."""
    x = torch.randn(5, 8, requires_grad=True)
    gradients = torch.randn(3, *plain(x).shape)
    expected = torch.stack([torch.autograd.grad(plain(x), x, gradient)[0] for gradient in gradients])
    y = ours(x)
    [found] = torch.autograd.grad(y, x, gradients, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(found, expected)
    [found] = torch.func.vmap(lambda gradient: torch.autograd.grad(y, x, gradient, retain_graph=True))(gradients)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("ours", "plain"), PAIRS)
def test_backward_of_a_gradient_with_a_tangent(ours, plain):
    x = torch.randn(5, 8, requires_grad=True)
    pair = torch.randn(2, *plain(x).shape)
    expected = [torch.autograd.grad(plain(x), x, part)[0] for part in pair]  # linear
    y = ours(x)
    with forward_ad.dual_level():
        [found] = torch.autograd.grad(y, x, forward_ad.make_dual(*pair))
        torch.testing.assert_close([*forward_ad.unpack_dual(found)], expected)


def test_fake_tensors():
    """Tools that estimate the memory of a training step run it without numbers."""
    with FakeTensorMode():
        for module in (SimMLPStudent(6, 8, 3), RbMFeedForward(6, 8, num_experts=3, top_k=2, activation="swiglu")):
            module(torch.randn(20, 6)).sum().backward()
            assert all(parameter.grad.shape == parameter.shape for parameter in module.parameters())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("act", [PReLU(), unit_rows, swiglu])
def test_a_trace_with_gradients_enabled_is_a_program_of_pytorchs_operators(act, tmp_path):
    """A trace of our functions cannot be saved, and PyTorch finds that it differs from a second one."""
    torch.jit.trace(act, torch.randn(5, 8, requires_grad=True)).save(str(tmp_path / "act.pt"))
    x = torch.randn(3, 8)
    torch.testing.assert_close(torch.jit.load(tmp_path / "act.pt")(x), act(x))


@pytest.mark.parametrize("shape", [(50, 7), (7,), (2, 5, 3)])
def test_unit_rows_are_those_of_normalize(shape):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(shape, dtype=torch.float64)
    found, expected = unit_rows(x), F.normalize(x, dim=-1)
    torch.testing.assert_close(found, expected)
    found, expected = ((rows.exp() * weights).sum() for rows in (found, expected))
    torch.testing.assert_close(derivatives(found, [x]), derivatives(expected, [x]))


@pytest.mark.parametrize("shape", [(50, 8), (6,), (2, 5, 4), (0, 4), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_swiglu_is_the_formula(shape, dtype):
    """From adjacent and from other features."""
    backwards = tuple(reversed(range(len(shape))))
    for x in (torch.randn(shape, dtype=dtype), torch.randn(shape[::-1], dtype=dtype).permute(backwards)):
        x.requires_grad_()
        found, expected = swiglu(x), plain_swiglu(x)
        assert "_SwiGLU" in found.grad_fn.name()
        assert torch.equal(found, expected)
        gradient = torch.randn_like(found)
        found, expected = (torch.autograd.grad(y, x, gradient)[0] for y in (found, expected))
        torch.testing.assert_close(found, expected)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    found, expected = ((f(x).exp()).sum() for f in (swiglu, plain_swiglu))
    torch.testing.assert_close(derivatives(found, [x]), derivatives(expected, [x]))


def test_swiglu_keeps_only_its_input():
    kept, x = [], torch.randn(5, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        swiglu(x)
    assert kept == [x.data_ptr()]


def test_a_row_of_zeros_has_the_gradient_that_normalize_gives_it():
    x = torch.zeros(2, 3, requires_grad=True)
    gradient = torch.randn(2, 3)
    found, expected = (torch.autograd.grad(f(x), x, gradient) for f in (unit_rows, F.normalize))
    torch.testing.assert_close(found, expected)


def test_a_student_is_transformed_and_compiled():
    student, x = SimMLPStudent(6, 8, 3, norm="layer"), torch.randn(5, 6)
    student(x).square().sum().backward()
    weights = dict(student.named_parameters())

    def loss(weights, x):
        return torch.func.functional_call(student, weights, (x,)).square().sum()

    found = torch.func.grad(loss)(weights, x)
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x[:, None])
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight.grad)
        torch.testing.assert_close(each[name].sum(0), weight.grad)
    compiled = torch.compile(student, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), student(x))
