"""Derivatives of every order and mode: of each operator in float64, against differences and against its reference."""

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from rbm_kernels import cosine_topk, expert_matmul, fold_experts, memory_statistics, memory_update_, routed_matmul
from rbm_kernels import sparse_expert_matmul as sparse_matmul
from rbm_kernels.ops.expert_matmul import reference as matmul_reference

B, D, N, E, K = 5, 4, 3, 4, 2


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def choices():
    return torch.rand(B, E).argsort(-1)[:, :K].int().contiguous()


def routing():
    memory = draw(E, D)

    def gates_and_cosines(h):
        gates, _, cosines = cosine_topk(h, memory, K, temperature=0.3)
        return gates, cosines

    return gates_and_cosines, (draw(B, D),)


def gates_alone():
    function, tensors = routing()
    return lambda h: function(h)[0], tensors


def matmul():
    experts = choices()
    return lambda *t: expert_matmul(*t, experts), (draw(B, D), draw(E, N, D), draw(E, N), draw(B, K))


def matmul_without_bias():
    experts = choices()
    return lambda x, w, g: expert_matmul(x, w, None, g, experts), (draw(B, D), draw(E, N, D), draw(B, K))


def routed():
    memory = draw(E, D)
    return lambda x, w, b: routed_matmul(x, memory, w, b, K, temperature=0.3), (draw(B, D), draw(E, N, D), draw(E, N))


def routed_operator():
    memory = draw(E, D)
    return lambda *t: torch.ops.rbm.routed_matmul(t[0], memory, *t[1:], K, 0.3), (draw(B, D), draw(E, N, D), draw(E, N))


def rows_in_csr():
    x = draw(B, D) * (torch.rand(B, D) < 0.6)
    crow = torch.nn.functional.pad((x != 0).sum(1).cumsum(0), (1, 0)).int()
    return crow, x.nonzero()[:, 1].int().contiguous(), x[x != 0]


def sparse():
    rows, experts = rows_in_csr(), choices()
    return lambda *t: sparse_matmul(*rows, *t, experts), (draw(E, N, D), draw(E, N), draw(E, D), draw(B, K))


def sparse_without_options():
    rows, experts = rows_in_csr(), choices()
    return lambda w, g: sparse_matmul(*rows, w, None, None, g, experts), (draw(E, N, D), draw(B, K))


def folding():
    def both(*tensors):
        weight, bias = fold_experts(*tensors)
        return torch.cat([weight, bias[..., None]], -1)

    return both, (draw(E, N, D), draw(E, N), draw(E, D), draw(1))


def folding_without_options():
    return lambda w, s: fold_experts(w, None, None, s)[0], (draw(E, N, D), draw(1)[0])


CASES = [
    routing,
    gates_alone,
    matmul,
    matmul_without_bias,
    routed,
    routed_operator,
    sparse,
    sparse_without_options,
    folding,
    folding_without_options,
]
every_operator = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)


def to_number(function):
    """A function of several orders: its sum of squares alone would lose what cancels."""

    def number(*tensors):
        outputs = function(*tensors)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return sum((torch.sin(out) * torch.arange(1.0, 1.0 + out.numel()).view(out.shape)).sum() for out in outputs)

    return number


@every_operator
def test_first_and_second_derivatives_of_both_modes(case):
    function, tensors = case()
    for tensor in tensors:
        tensor.requires_grad_()
    assert gradcheck(function, tensors, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(function, tensors, check_fwd_over_rev=True, check_rev_over_rev=True)


@every_operator
def test_transformations_of_torch_func(case):
    function, tensors = case()
    number, places = to_number(function), tuple(range(len(tensors)))
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    truth = torch.autograd.grad(number(*leaves), leaves)
    torch.testing.assert_close(grad(number, places)(*tensors), truth)
    torch.testing.assert_close(vjp(number, *tensors)[1](torch.ones((), dtype=torch.float64)), truth)
    torch.testing.assert_close(jacrev(number, places)(*tensors), truth)
    torch.testing.assert_close(jacfwd(number, places)(*tensors), truth)
    tangents = tuple(torch.randn_like(tensor) for tensor in tensors)
    along = sum((one * other).sum() for one, other in zip(truth, tangents, strict=True))
    torch.testing.assert_close(jvp(number, tensors, tangents)[1], along)
    second = hessian(number)(*tensors)
    torch.testing.assert_close(second, jacrev(jacfwd(number))(*tensors))
    torch.testing.assert_close(second, torch.autograd.functional.hessian(lambda t: number(t, *tensors[1:]), tensors[0]))


@every_operator
def test_batches_by_vmap_of_values_and_of_gradients(case):
    function, tensors = case()
    number, places = to_number(function), tuple(range(len(tensors)))
    batches = tuple(torch.stack([tensor, tensor + 0.1, -tensor]) for tensor in tensors)
    one_by_one = [[batch[i] for batch in batches] for i in range(3)]
    torch.testing.assert_close(vmap(number)(*batches), torch.stack([number(*one) for one in one_by_one]))
    gradients = zip(*[grad(number, places)(*one) for one in one_by_one], strict=True)
    torch.testing.assert_close(vmap(grad(number, places))(*batches), tuple(torch.stack(each) for each in gradients))
    # One argument batched, the others shared by all.
    for place in places:
        dims = [0 if i == place else None for i in places]
        mixed = [batch if i == place else tensors[i] for i, batch in enumerate(batches)]
        got = vmap(grad(number, place), tuple(dims))(*mixed)
        each = [grad(number, place)(*[m[i] if j == place else m for j, m in enumerate(mixed)]) for i in range(3)]
        torch.testing.assert_close(got, torch.stack(each))


@every_operator
def test_derivatives_of_batches_by_vmap(case):
    """Of vmap itself: an ordinary backward pass, the torch.func transformations, and dual numbers."""
    function, tensors = case()
    number, places = to_number(function), tuple(range(len(tensors)))
    leaves = [torch.stack([tensor, tensor + 0.1, -tensor]).requires_grad_() for tensor in tensors]
    tangents = [torch.randn_like(leaf) for leaf in leaves]
    truth = torch.autograd.grad(sum(number(*[leaf[i] for leaf in leaves]) for i in range(3)), leaves)
    along = sum((one * other).sum() for one, other in zip(truth, tangents, strict=True))

    def whole(*batches):
        return vmap(number)(*batches).sum()

    torch.testing.assert_close(torch.autograd.grad(whole(*leaves), leaves), truth)
    batches = tuple(leaf.detach() for leaf in leaves)
    torch.testing.assert_close(grad(whole, places)(*batches), truth)
    torch.testing.assert_close(jvp(whole, batches, tuple(tangents))[1], along)
    with forward_ad.dual_level(), torch.no_grad():
        dual = whole(*map(forward_ad.make_dual, batches, tangents))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, along)


def test_rows_without_a_direction_have_no_derivative_of_any_kind():
    memory, h = draw(E, D), draw(3, D)
    h[0], h[1] = 0.0, 1e-14
    for out in (0, 2):
        function = lambda h, out=out: cosine_topk(h, memory, K)[out]  # noqa: E731
        for jacobian in (jacrev(function)(h), jacfwd(function)(h)):
            assert torch.equal(jacobian[:2], torch.zeros_like(jacobian[:2]))
            assert (jacobian[2, :, 2] != 0).all()
        assert torch.isfinite(hessian(to_number(function))(h)).all()


def test_selection_of_a_formula_is_that_of_the_operator():
    """Two memory vectors that float32 cannot tell apart: the derivative is of the expert that the operator chose."""
    h, memory = torch.randn(64, 8), torch.randn(3, 8)
    memory = torch.cat([memory, memory * 1.0000001])
    gates, experts, _ = cosine_topk(h, memory, 2)
    with forward_ad.dual_level():
        dual = cosine_topk(forward_ad.make_dual(h, torch.randn_like(h)), memory, 2)
        torch.testing.assert_close(forward_ad.unpack_dual(dual[0]).primal, gates)
    assert torch.equal(dual[1], experts)


def test_autocast_rounds_no_derivative():
    x, weight, gates, experts = torch.randn(B, 64), torch.randn(E, N, 64), torch.rand(B, K), choices()

    def function(x):
        return expert_matmul(x, weight, None, gates, experts)

    def tangent():
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x)))).tangent

    def slope():
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(function(leaf).square().sum(), leaf, create_graph=True)[0].detach()

    exact = tangent(), slope()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close((tangent(), slope()), exact)


@every_operator
def test_a_gradient_that_carries_a_tangent(case):
    """Forward mode through a backward pass that PyTorch does not record."""
    function, tensors = case()
    leaves = [tensor.requires_grad_() for tensor in tensors]
    out = function(*leaves)
    out = out[0] if isinstance(out, tuple) else out
    first, second = torch.randn_like(out), torch.randn_like(out)
    with forward_ad.dual_level():
        found = torch.autograd.grad(out, leaves, forward_ad.make_dual(first, second), retain_graph=True)
        tangents = [forward_ad.unpack_dual(each).tangent for each in found]
    # The backward pass is linear in the gradient that comes in.
    torch.testing.assert_close(tangents, list(torch.autograd.grad(out, leaves, second)))


def test_a_tensor_passed_twice_has_both_derivatives_twice():
    experts = torch.zeros(4, 1, dtype=torch.int32)

    def function(t):
        return expert_matmul(t, t[None], None, t[:, :1], experts)

    assert gradgradcheck(function, (draw(4, 4).requires_grad_(),))


def test_statistics_are_constants():
    h, gates, experts = torch.randn(B, D, requires_grad=True), torch.rand(B, K), choices()
    assert not any(out.requires_grad for out in memory_statistics(h, gates, experts, E))
    assert torch.equal(grad(lambda h: memory_statistics(h, gates, experts, E)[0].sum() + h.sum())(h), torch.ones(B, D))
    value, tangent = jvp(lambda h: memory_statistics(h, gates, experts, E)[0], (h.detach(),), (torch.ones(B, D),))
    assert torch.equal(tangent, torch.zeros_like(value))


def test_a_memory_that_is_differentiated_does_not_move():
    weighted_sum, total = torch.rand(E, D), torch.ones(E)
    memory = torch.rand(E, D, requires_grad=True)
    for moving in (memory, memory * 2):
        with pytest.raises(RuntimeError, match="memory is being differentiated"):
            memory_update_(moving, weighted_sum, total, 0.5)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="memory is being differentiated"):
        memory_update_(forward_ad.make_dual(memory.detach(), torch.ones(E, D)), weighted_sum, total, 0.5)
    with torch.no_grad():
        memory_update_(memory, weighted_sum, total, 0.5)


def test_no_derivative_of_routing_reaches_the_memory():
    """In no mode: the memory follows the rows, and no loss."""
    x, memory = draw(B, D), draw(E, D)

    def gates(memory):
        return cosine_topk(x, memory, K, temperature=0.3)[0].square().sum()

    leaf = memory.clone().requires_grad_()
    assert torch.autograd.grad(gates(leaf), leaf, allow_unused=True) == (None,)
    assert not grad(gates)(memory).any()
    assert not jvp(gates, (memory,), (draw(E, D),))[1].any()


def backward_operators():
    x, weight, experts, y = draw(B, D), draw(E, N, D), choices(), draw(B, N)
    routing = cosine_topk(x, draw(E, D), K)
    rows = rows_in_csr()
    rbm = torch.ops.rbm
    return {
        "cosine_topk_backward": lambda g: rbm.cosine_topk_backward(g, None, x, draw(E, D), *routing),
        "expert_matmul_backward_input": lambda g: rbm.expert_matmul_backward_input(y, x, weight, None, g, experts),
        "expert_matmul_backward_weight": lambda g: rbm.expert_matmul_backward_weight(y, x, g, experts, E),
        "sparse_expert_matmul_backward_gates": lambda g: rbm.sparse_expert_matmul_backward_gates(
            y, *rows, weight, None, None, g, experts
        ),
        "sparse_expert_matmul_backward_weight": lambda g: rbm.sparse_expert_matmul_backward_weight(
            y, *rows, weight, None, g, experts
        ),
        "fold_experts_backward": lambda g: rbm.fold_experts_backward(weight, None, weight, None, None, g[0, :1]),
    }


@pytest.mark.parametrize("name", backward_operators())
def test_an_operator_of_a_backward_pass_refuses_a_derivative_of_its_own(name):
    call, gates = backward_operators()[name], draw(B, K)
    call(gates)
    with pytest.raises(RuntimeError, match=f"rbm::{name} has no derivative of its own: differentiate rbm::"):
        call(gates.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="no derivative of its own"):
        jvp(lambda g: call(g), (gates,), (gates,))
    with torch.no_grad():
        call(gates.clone().requires_grad_())


def test_the_ordinary_backward_uses_the_kernels(monkeypatch):
    """The formula costs E / k times the work: it serves only what the kernels cannot."""
    monkeypatch.setattr(matmul_reference, "expert_matmul", None)
    _, tensors = matmul()
    experts = choices()
    leaves = [tensor.requires_grad_() for tensor in tensors]
    expert_matmul(*leaves, experts).sum().backward()
    assert all(leaf.grad is not None for leaf in leaves)


def test_compiled_graphs_keep_their_first_derivative():
    function, tensors = matmul()
    leaves = [tensor.requires_grad_() for tensor in tensors]
    truth = torch.autograd.grad(function(*leaves).sin().sum(), leaves)
    compiled = torch.compile(lambda *t: function(*t).sin().sum(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves), leaves), truth)


def test_functional_call_of_a_module_around_an_operator():
    class Product(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(draw(E, N, D))

        def forward(self, x, gates, experts):
            return expert_matmul(x, self.weight, None, gates, experts)

    module, x, gates, experts = Product(), draw(B, D), draw(B, K), choices()

    def loss(parameters, x, gates, experts):
        return functional_call(module, parameters, (x[None], gates[None], experts[None])).square().sum()

    parameters = {"weight": module.weight.detach()}
    each = vmap(grad(loss), (None, 0, 0, 0))(parameters, x, gates, experts)["weight"]
    (whole,) = torch.autograd.grad(module(x, gates, experts).square().sum(), module.weight)
    torch.testing.assert_close(each.sum(0), whole)


def test_anomaly_mode_names_the_operator():
    """Every operator's node had the same name, in the profiler too."""
    _, (x, *tensors) = matmul()
    y = expert_matmul(x.fill_(float("nan")).requires_grad_(), *(t.requires_grad_() for t in tensors), choices())
    assert y.grad_fn.name() == "rbm_expert_matmulBackward"
    with (
        pytest.warns(UserWarning, match="Anomaly Detection|Error detected in rbm_expert_matmulBackward"),
        pytest.raises(RuntimeError, match="'rbm_expert_matmulBackward' returned nan"),
        torch.autograd.detect_anomaly(),
    ):
        y.sum().backward()
