"""Routing and matmul in one operator: meaning, derivative, contracts of an operator."""

import pytest
import torch

from rbm_kernels import cosine_topk, expert_matmul, routed_matmul

# Each shape exists for a reason: (B, D, N, E, k)
SHAPES = {
    "usual": (33, 16, 12, 8, 3),
    "prime sizes": (31, 37, 7, 5, 2),
    "one row": (1, 5, 4, 3, 2),
    "more rows than a small batch": (70, 6, 5, 4, 2),
    "no rows": (0, 5, 4, 3, 2),
    "all experts": (9, 4, 3, 3, 3),
    "one expert": (9, 4, 3, 1, 1),
}


def problem(shape, dtype=torch.float64):
    b, d, n, e, k = shape
    memory = torch.randn(e, d, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    return torch.randn(b, d).to(dtype), memory, torch.randn(e, n, d).to(dtype), torch.randn(e, n).to(dtype), k


def composition(x, memory, weight, bias, k, temperature=1.0):
    gates, experts, _ = cosine_topk(x, memory, k, temperature=temperature)
    return expert_matmul(x, weight, bias, gates, experts)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_two_operators(shape, dtype):
    x, memory, weight, bias, k = problem(shape, dtype)
    for some_bias in (bias, None):
        y = routed_matmul(x, memory, weight, some_bias, k, temperature=0.7)
        assert y.dtype == dtype
        torch.testing.assert_close(y, composition(x, memory, weight, some_bias, k, 0.7))
    assert y.shape == (shape[0], shape[2])


def test_float64_memory_of_float32_rows():
    x, memory, weight, bias, k = problem((20, 6, 5, 4, 2), torch.float32)
    wide = memory.double()
    torch.testing.assert_close(routed_matmul(x, wide, weight, bias, k), routed_matmul(x, memory, weight, bias, k))
    weight.requires_grad_()
    torch.testing.assert_close(routed_matmul(x, wide, weight, bias, k), routed_matmul(x, memory, weight, bias, k))


def test_strides():
    x, memory, weight, bias, k = problem((20, 12, 5, 4, 2))
    wide = torch.randn(40, 24, dtype=torch.float64)
    wide[::2, ::2] = x
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    got = routed_matmul(wide[::2, ::2], memory.T.contiguous().T, turned, bias.T.contiguous().T, k)
    torch.testing.assert_close(got, routed_matmul(x, memory, weight, bias, k))


@pytest.mark.parametrize("call", [routed_matmul, torch.ops.rbm.routed_matmul], ids=["function", "operator"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_gradients(call, with_bias):
    """Gradients are correct for every way of calling it, although it is made for inference."""
    x, memory, weight, bias, k = problem((7, 5, 4, 6, 3))
    tensors = [t.requires_grad_() for t in ((x, weight, bias) if with_bias else (x, weight))]

    def of_tensors(x, weight, bias=None):
        return call(x, memory, weight, bias, k, temperature=0.5)

    assert torch.autograd.gradcheck(of_tensors, tensors)


@pytest.mark.parametrize("call", [routed_matmul, torch.ops.rbm.routed_matmul], ids=["function", "operator"])
@pytest.mark.parametrize("needed", range(3))
def test_each_gradient_alone(call, needed):
    x, memory, weight, bias, k = problem((20, 6, 5, 4, 2))
    x, weight, bias = (t.requires_grad_(i == needed) for i, t in enumerate((x, weight, bias)))
    wanted = (x, weight, bias)[needed]
    (expected,) = torch.autograd.grad(composition(x, memory, weight, bias, k).square().sum(), wanted)
    (grad,) = torch.autograd.grad(call(x, memory, weight, bias, k).square().sum(), wanted)
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("call", [routed_matmul, torch.ops.rbm.routed_matmul], ids=["function", "operator"])
def test_memory_gets_no_gradient_and_may_move_before_backward(call):
    x, memory, weight, bias, k = problem((8, 4, 3, 5, 2))
    x.requires_grad_()
    memory.requires_grad_()
    (expected,) = torch.autograd.grad(call(x, memory, weight, bias, k).square().sum(), x)
    y = call(x, memory, weight, bias, k).square().sum()
    with torch.no_grad():
        memory.mul_(-3)
    y.backward()
    torch.testing.assert_close(x.grad, expected)
    assert memory.grad is None


def test_without_gradients_the_result_has_none():
    x, memory, weight, bias, k = problem((8, 4, 3, 5, 2))
    weight.requires_grad_()
    with torch.no_grad():
        assert not routed_matmul(x, memory, weight, bias, k).requires_grad
    with torch.inference_mode():
        assert routed_matmul(x, memory, weight, bias, k).is_inference()
    assert routed_matmul(x, memory, weight, bias, k).requires_grad


def test_arithmetic_is_its_own_under_autocast():
    x, memory, weight, bias, k = problem((20, 8, 6, 5, 3), torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = routed_matmul(x, memory, weight, bias, k)
    assert torch.equal(inside, routed_matmul(x, memory, weight, bias, k))


@pytest.mark.parametrize("rows", [12, 0])
@pytest.mark.parametrize("with_gradients", [True, False])
def test_opcheck(rows, with_gradients):
    x, memory, weight, bias, k = problem((rows, 6, 5, 4, 2), torch.float32)
    for tensor in (x, weight, bias):
        tensor.requires_grad_(with_gradients)
    operator = torch.ops.rbm.routed_matmul.default
    torch.library.opcheck(operator, (x, memory, weight, bias, k), {"temperature": 0.5})
    torch.library.opcheck(operator, (x, memory, weight, None, k))


@pytest.mark.compiler
def test_fullgraph_compile():
    x, memory, weight, bias, k = problem((12, 6, 5, 4, 2), torch.float32)
    compiled = torch.compile(routed_matmul, fullgraph=True)
    torch.testing.assert_close(compiled(x, memory, weight, bias, k), routed_matmul(x, memory, weight, bias, k))
    weight.requires_grad_()
    grads = [
        torch.autograd.grad(function(x, memory, weight, bias, k).square().sum(), weight)[0]
        for function in (compiled, routed_matmul)
    ]
    torch.testing.assert_close(*grads)


def test_export_with_any_number_of_rows():
    class Module(torch.nn.Module):
        def forward(self, x, memory, weight, bias):
            return routed_matmul(x, memory, weight, bias, 2)

    x, memory, weight, bias, _ = problem((12, 6, 5, 4, 2), torch.float32)
    shapes = ({0: torch.export.Dim("batch")}, None, None, None)
    exported = torch.export.export(Module(), (x, memory, weight, bias), dynamic_shapes=shapes)
    assert torch.ops.rbm.routed_matmul.default in {node.target for node in exported.graph.nodes}
    for rows in (1, 70):
        more = torch.randn(rows, 6)
        got = exported.module()(more, memory, weight, bias)
        torch.testing.assert_close(got, routed_matmul(more, memory, weight, bias, 2))


@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.randn(4, 3)}, ValueError, r"weight has shape \[3, 5, 6\], expected \[\*, \*, 3\]"),
        ({"x": torch.randn(6)}, ValueError, r"x has shape \[6\], expected \[\*, \*\]"),
        ({"weight": torch.randn(3, 5, 6).double()}, TypeError, "weight has dtype float64, expected float32"),
        ({"bias": torch.randn(3, 4)}, ValueError, r"bias has shape \[3, 4\], expected \[3, 5\]"),
        ({"memory": torch.randn(4, 6)}, ValueError, r"memory has shape \[4, 6\], expected \[3, 6\] \(experts of"),
        ({"memory": torch.randn(3, 5)}, ValueError, r"memory has shape \[3, 5\], expected \[\*, 6\]"),
        ({"memory": torch.randn(3, 6).half()}, TypeError, "memory has dtype float16, expected float32 or float64"),
        ({"k": 4}, ValueError, "k is 4, expected between 1 and the number of experts, 3"),
        ({"temperature": 0.0}, ValueError, "temperature is 0.0, expected a positive number"),
    ],
)
def test_bad_arguments(change, error, message, needs_gradient):
    arguments = {"x": torch.randn(4, 6), "memory": torch.randn(3, 6), "weight": torch.randn(3, 5, 6)}
    arguments = {**arguments, "bias": torch.randn(3, 5), "k": 2, **change}
    arguments["weight"].requires_grad_(needs_gradient)
    with pytest.raises(error, match="rbm::routed_matmul: " + message):
        routed_matmul(**arguments)


def test_what_an_implementation_in_cpp_says_is_said_better(monkeypatch):
    """C++ can only raise RuntimeError: arguments are then checked again in Python, and other failures are kept."""

    def fails(*args, **kwargs):
        raise RuntimeError("rbm::routed_matmul: out of paper")

    monkeypatch.setattr(torch._C, "_AutoDispatchBelowAutograd", fails)  # which the operator is called in
    x, memory, weight, bias, k = problem((4, 6, 5, 3, 2), torch.float32)
    with pytest.raises(ValueError, match=r"bias has shape \[3, 4\]"):
        routed_matmul(x, memory, weight, bias[:, :4], k)
    with pytest.raises(RuntimeError, match="out of paper"):
        routed_matmul(x, memory, weight, bias, k)
