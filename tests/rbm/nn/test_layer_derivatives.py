"""Derivatives of the whole layer, of every order and mode, for dense rows and for sparse ones."""

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

from rbm import FusedRbMLayer
from rbm.nn import scaled_experts
from rbm.nn.sparse_rows import SparseRows

D, N, E, K = 6, 3, 4, 2


def make(**options):
    options = {"detach_gates": False, "dtype": torch.float64, **options}
    layer = FusedRbMLayer(D, N, E, K, **options)
    layer.track_memory = False
    return layer


def dense_rows():
    return torch.randn(5, D, dtype=torch.float64)


def sparse_rows():
    return dense_rows() * (torch.rand(5, D) < 0.6)


def rows_of_each_kind():
    x = sparse_rows()
    return {
        "dense": dense_rows(),
        "sparse": SparseRows(x.to_sparse_csr()),
        "mixed": SparseRows(x[:, :4].to_sparse_csr(), x[:, 4:]),
    }


@pytest.fixture
def _scaled(request, monkeypatch):
    """Multiply the scales of dense rows into the experts, or into the rows."""
    monkeypatch.setattr(scaled_experts, "_OUTPUTS_PER_ROW", {"experts": float("inf"), "rows": 0}[request.param])


# Kinds of rows, and what is scaled; sparse rows themselves always are.
DENSE, OTHERS = [("dense", "experts"), ("dense", "rows")], [("sparse", "rows"), ("mixed", "rows")]


def each(*kinds):
    """Run the test with each of these pairs."""

    def of(test):
        test = pytest.mark.usefixtures("_scaled")(test)
        return pytest.mark.parametrize(("kind", "_scaled"), kinds, indirect=["_scaled"])(test)

    return of


@each(*DENSE, *OTHERS)
def test_derivatives_by_the_parameters(kind):
    layer, rows = make(), rows_of_each_kind()[kind]
    names, parameters = zip(*layer.named_parameters(), strict=True)
    leaves = tuple(parameter.detach().clone().requires_grad_() for parameter in parameters)

    def function(*parameters):
        return functional_call(layer, dict(zip(names, parameters, strict=True)), (rows,))

    assert gradcheck(function, leaves, check_forward_ad=True)
    assert gradgradcheck(function, leaves, check_fwd_over_rev=True)


@each(*DENSE, OTHERS[-1])
def test_derivatives_by_the_rows(kind):
    layer, x = make(), dense_rows()
    fixed = sparse_rows()[:, :4].to_sparse_csr()

    def function(x):
        rows = x if kind == "dense" else SparseRows(fixed, x[:, 4:])
        y, routing = layer(rows, return_routing=True)
        return y, routing.gates, routing.cosines

    assert gradcheck(function, (x.requires_grad_(),), check_forward_ad=True)
    assert gradgradcheck(function, (x,), check_fwd_over_rev=True)


@each(*DENSE, *OTHERS)
def test_transformations_of_torch_func(kind):
    layer, rows = make().eval(), rows_of_each_kind()[kind]
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    tangents = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}

    def loss(parameters):
        return functional_call(layer, parameters, (rows,)).sin().sum()

    leaves = list(layer.parameters())
    truth = dict(zip(parameters, torch.autograd.grad(layer(rows).sin().sum(), leaves), strict=True))
    for transformed in (grad(loss), jacrev(loss), jacfwd(loss)):
        torch.testing.assert_close(transformed(parameters), truth)
    along = sum((truth[name] * tangents[name]).sum() for name in truth)
    torch.testing.assert_close(jvp(loss, (parameters,), (tangents,))[1], along)
    with torch.no_grad():  # inference, for which experts are folded once and cached
        layer(rows)
        torch.testing.assert_close(jvp(loss, (parameters,), (tangents,))[1], along)

    def curvature(scale):
        return loss({**parameters, "log_scale": parameters["log_scale"] + scale})

    zero = torch.zeros((), dtype=torch.float64)
    torch.testing.assert_close(hessian(curvature)(zero), jacrev(jacrev(curvature))(zero))
    stacked = {name: torch.stack([value, value + tangents[name]]) for name, value in parameters.items()}
    pair = [{name: value[i] for name, value in stacked.items()} for i in range(2)]
    torch.testing.assert_close(vmap(loss)(stacked), torch.stack([loss(one) for one in pair]))
    got = vmap(grad(loss))(stacked)
    for name in parameters:
        torch.testing.assert_close(got[name], torch.stack([grad(loss)(one)[name] for one in pair]))


@pytest.mark.parametrize("_scaled", ["experts", "rows"], indirect=True)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.usefixtures("_scaled")
def test_gradients_of_each_sample_add_up_to_that_of_the_batch(training):
    layer, x = make().train(training), dense_rows()
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def loss(parameters, row):
        return functional_call(layer, parameters, (row[None],)).square().sum()

    each = vmap(grad(loss), (None, 0))(parameters, x)
    whole = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    for got, expected in zip(each.values(), whole, strict=True):
        assert got.shape == (5, *expected.shape)
        torch.testing.assert_close(got.sum(0), expected)


def test_a_penalty_on_the_gradient_trains():
    """The double backward of a gradient penalty, compared with finite differences."""
    layer, x = make(), dense_rows().requires_grad_()

    def penalty():
        (slope,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        return slope.square().sum()

    penalty().backward()
    place, step = (1, 2, 3), 1e-6
    with torch.no_grad():
        layer.weight[place] += step
    above = penalty()
    with torch.no_grad():
        layer.weight[place] -= 2 * step
    torch.testing.assert_close(layer.weight.grad[place], (above - penalty()).detach() / (2 * step), rtol=1e-5, atol=0)


@pytest.mark.parametrize("transformed", [grad, vmap, lambda f: lambda w: jvp(f, (w,), (w,))])
def test_a_memory_that_moves_is_refused_before_anything_moves(transformed):
    layer, x = make(), dense_rows()
    layer.track_memory = True
    layer(x)
    state = [layer.memory.clone(), layer.pending_sum.clone(), layer.pending_total.clone()]

    def loss(weight):
        return functional_call(layer, {"weight": weight}, (x,)).sum()

    weight = layer.weight.detach()
    with pytest.raises(RuntimeError, match="set track_memory = False on the layer, or call eval"):
        transformed(loss)(weight if transformed is not vmap else weight[None])
    for before, after in zip(state, [layer.memory, layer.pending_sum, layer.pending_total], strict=True):
        assert torch.equal(before, after)


def test_training_under_forward_mode_leaves_a_plain_record():
    """Dual numbers without torch.func: the memory uses the rows without their tangent."""
    for rows in rows_of_each_kind().values():
        layer = make()
        layer.track_memory = True
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(layer.weight.detach(), torch.ones_like(layer.weight))
            y = functional_call(layer, {"weight": dual}, (rows,))
            assert torch.autograd.forward_ad.unpack_dual(y).tangent is not None
        assert layer.pending_total.sum() > 0
        layer.eval()


@pytest.mark.parametrize("detach_gates", [True, False])
def test_forward_mode_without_gradients_has_the_same_tangents(detach_gates):
    """The operator of inference has the derivative of gates that are not detached, and takes no dual parameters."""
    layer, x, v = make(detach_gates=detach_gates).eval(), dense_rows(), dense_rows()
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    directions = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}

    def of_dual_numbers():
        with forward_ad.dual_level():
            dual = {name: forward_ad.make_dual(parameters[name], directions[name]) for name in parameters}
            return forward_ad.unpack_dual(functional_call(layer, dual, (forward_ad.make_dual(x, v),))).tangent

    expected = of_dual_numbers()
    with torch.no_grad():
        layer(x)  # experts are packed by now
        torch.testing.assert_close(of_dual_numbers(), expected)
        by_func = jvp(lambda p, x: functional_call(layer, p, (x,)), (parameters, x), (directions, v))[1]
        torch.testing.assert_close(by_func, expected)
        by_rows = jvp(layer, (x,), (v,))[1]
    torch.testing.assert_close(by_rows, jvp(layer, (x,), (v,))[1])
