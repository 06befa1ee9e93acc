"""Scales multiplied into the experts or into the rows, whichever are fewer."""

import copy
import math

import pytest
import torch

from rbm import FusedRbMLayer
from rbm.nn import scaled_experts
from rbm.nn.dropout import dropout
from rbm.nn.moe import MoELayer
from rbm.nn.reference import ReferenceRbMLayer
from rbm.utils.precision import wide

EXPERTS, D, N, K = 4, 12, 16, 2
ALWAYS_ROWS, ALWAYS_EXPERTS = 0, float("inf")


def make(**options):
    """A layer with scales far from one, one of them above the largest factor of 100."""
    layer = FusedRbMLayer(D, N, EXPERTS, K, **{"dtype": torch.float64, "detach_gates": False, **options})
    with torch.no_grad():
        layer.log_scale.fill_(0.4)
        if layer.attention is not None:
            layer.attention.normal_()
            layer.attention[1, 2] = math.log(100) + 1
    return layer


def step(layer, x):
    """Output, gradients by the rows and by all parameters, and the memory that has moved."""
    x = x.clone().requires_grad_()
    y = layer(x)
    leaves = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    grads = torch.autograd.grad(wide(y).square().sum(), leaves)
    layer.eval()
    return y.detach(), *grads, layer.memory.clone()


@pytest.mark.parametrize("outputs_per_row", [ALWAYS_EXPERTS, ALWAYS_ROWS], ids=["experts", "rows"])
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("attention", [True, False], ids=["attention", "no attention"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_both_are_the_definition(bias, attention, p, outputs_per_row, folds_with_gradients, monkeypatch):
    monkeypatch.setattr(scaled_experts, "_OUTPUTS_PER_ROW", outputs_per_row)
    layer, x = make(bias=bias, input_attention=attention, dropout=p), torch.randn(9, D, dtype=torch.float64)
    reference = ReferenceRbMLayer(
        D, N, EXPERTS, K, dtype=torch.float64, detach_gates=False, bias=bias, input_attention=attention, dropout=p
    )
    reference.load_state_dict(layer.state_dict())
    torch.manual_seed(1)
    expected = step(reference, x)
    torch.manual_seed(1)
    for got, wanted in zip(step(layer, x), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    assert len(folds_with_gradients) == (outputs_per_row == ALWAYS_EXPERTS)


def test_the_largest_factor_has_no_gradient(monkeypatch):
    monkeypatch.setattr(scaled_experts, "_OUTPUTS_PER_ROW", ALWAYS_ROWS)
    layer = make()
    layer(torch.randn(40, D, dtype=torch.float64)).square().sum().backward()
    assert layer.attention.grad[1, 2] == 0
    assert (layer.attention.grad != 0).sum() == EXPERTS * D - 1


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_under_autocast(p, monkeypatch):
    layer, x = make(dtype=torch.float32, dropout=p), torch.randn(40, D)
    results = []
    for outputs_per_row in (ALWAYS_EXPERTS, ALWAYS_ROWS):
        monkeypatch.setattr(scaled_experts, "_OUTPUTS_PER_ROW", outputs_per_row)
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            results.append(step(copy.deepcopy(layer), x))
    for folded, scaled in zip(*results, strict=True):
        assert folded.dtype == scaled.dtype
        torch.testing.assert_close(scaled, folded, atol=0.03 * folded.abs().max().item(), rtol=0.03)
    assert results[0][0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("attention", "rows", "expected"), [(True, 4, 0), (True, 5, 1), (False, 8, 0), (False, 9, 1)], ids=str
)
def test_fewer_numbers_are_scaled(attention, rows, expected, folds_with_gradients):
    """With attention each row is scaled once per expert that it goes to, otherwise once."""
    assert EXPERTS * N == 8 * 8
    make(input_attention=attention)(torch.randn(rows, D, dtype=torch.float64))
    assert len(folds_with_gradients) == expected


def test_no_rows(folds_with_gradients):
    y = make()(torch.empty(0, D, dtype=torch.float64))
    y.sum().backward()
    assert y.shape == (0, N)
    assert not folds_with_gradients


def test_a_compiled_layer_scales_what_an_eager_one_does(monkeypatch):
    layer, x = make().eval(), torch.randn(4, D, dtype=torch.float64)
    compiled, many = torch.compile(layer, backend="eager", dynamic=True), x.repeat(3, 1)
    torch.testing.assert_close(compiled(many), layer(many))
    monkeypatch.setattr(scaled_experts, "fold", None)
    torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_layer_does_not_depend_on_the_number_of_rows(strict):
    layer, x = make().eval(), torch.randn(4, D, dtype=torch.float64)
    rows = torch.export.Dim("rows")
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: rows},), strict=strict).module()
    for many in (x, x.repeat(3, 1)):
        torch.testing.assert_close(program(many), layer(many))


def test_subclasses_of_tensor_are_scaled_themselves():
    class Wrapped(torch.Tensor):
        pass

    rows, weight = torch.randn(1, D), torch.randn(EXPERTS, N, D)
    assert scaled_experts._few(rows, weight, K)
    assert scaled_experts._few(rows, torch.nn.Parameter(weight), K)
    assert not scaled_experts._few(rows, weight.as_subclass(Wrapped), K)
    assert not scaled_experts._few(rows, weight.to("meta"), K)


@pytest.mark.parametrize("outputs_per_row", [ALWAYS_EXPERTS, ALWAYS_ROWS], ids=["experts", "rows"])
def test_experts_with_a_learned_router(outputs_per_row, folds_with_gradients, monkeypatch):
    monkeypatch.setattr(scaled_experts, "_OUTPUTS_PER_ROW", outputs_per_row)
    layer, p, x = MoELayer(D, N, EXPERTS, K, router_features=7, dropout=0.4).double(), 0.4, torch.randn(9, D).double()
    with torch.no_grad():
        layer.log_scale.fill_(0.4)
    gates, experts = torch.rand(9, K).double(), torch.rand(9, EXPERTS).topk(K).indices.int()
    torch.manual_seed(1)
    got = layer._combine(x, gates, experts)
    torch.manual_seed(1)
    each = torch.einsum("bd,eod->beo", dropout(x, p), layer.weight) + layer.bias
    expected = layer.log_scale.exp() * (gates[..., None] * each[torch.arange(9)[:, None], experts.long()]).sum(1)
    torch.testing.assert_close(got, expected)
    assert len(folds_with_gradients) == (outputs_per_row == ALWAYS_EXPERTS)
    leaves = [layer.weight, layer.bias, layer.log_scale]
    grads = (torch.autograd.grad(y.square().sum(), leaves) for y in (got, expected))
    for gradient, right in zip(*grads, strict=True):
        torch.testing.assert_close(gradient, right)
