"""What folds the experts: the operator for plain tensors of a GPU outside of a compiler, and PyTorch elsewhere."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from rbm import FusedRbMLayer, RbMFeedForward, RbMStudent
from rbm.nn import folded_weights as folding
from rbm.nn import scaled_experts
from rbm_kernels import fold_experts
from rbm_kernels.ops.fold_experts import reference


class OnGpu:
    """In the place of a tensor."""

    is_cuda = True


class Wrapped(OnGpu):
    """In the place of a tensor of a subclass, such as a distributed one."""


@pytest.mark.parametrize(
    ("weight", "compiling", "expected"),
    [(OnGpu(), False, "operator"), (OnGpu(), True, "reference"), (Wrapped(), False, "reference")],
    ids=["plain", "compiled", "subclass"],
)
def test_who_folds(weight, compiling, expected, monkeypatch):
    monkeypatch.setattr(folding, "Tensor", OnGpu)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    monkeypatch.setattr(folding, "fold_experts", lambda *given, dtype: ("operator", *given, dtype))
    monkeypatch.setattr(reference, "fold_experts", lambda *given: ("reference", *given))
    given = (weight, None, None, torch.zeros(1), torch.bfloat16)
    assert folding.fold(*given) == (expected, *given)


def test_a_cpu_folds_by_the_definition(monkeypatch):
    monkeypatch.setattr(folding, "fold_experts", None)
    weight, log_scale = torch.nn.Parameter(torch.randn(3, 4, 5)), torch.zeros(1)
    assert torch.equal(folding.fold(weight, None, None, log_scale)[0], weight)


def by_operator(weight, bias, attention, log_scale, dtype=None):
    return fold_experts(weight, bias, attention, log_scale, dtype=dtype)


def step(layer, x):
    """Output, loss gradients and moved memory of a training step."""
    y = layer(x)
    grads = torch.autograd.grad(y.float().square().sum(), list(layer.parameters()))
    return y.detach(), *grads, layer.memory


@pytest.mark.parametrize("kernels", [False, True], ids=["eager", "Triton"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_a_training_step_through_the_operator(bias, autocast, kernels, monkeypatch):
    """As on a GPU: the same output, gradients and memory as with PyTorch's operators."""
    layer, x = FusedRbMLayer(12, 5, num_experts=4, top_k=2, bias=bias), torch.randn(20, 12)
    with torch.no_grad():
        for logarithm in (layer.attention, layer.log_scale):
            logarithm.add_(0.3 * torch.randn_like(logarithm))
    other = copy.deepcopy(layer)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = step(layer, x)
        monkeypatch.setattr(scaled_experts, "fold", by_operator)
        if kernels:
            pytest.importorskip("triton")
            from triton_on_cpu import serving_kernels

            with serving_kernels(["fold_experts", "fold_experts_backward"]) as calls:
                results = step(other, x)
            assert calls == {"fold_experts": 1, "fold_experts_backward": 1}
        else:
            results = step(other, x)
    for got, wanted in zip(results, expected, strict=True):
        assert got.dtype == wanted.dtype
        # Under autocast, a folded weight may be rounded to its neighbour in bfloat16.
        tolerance = 0.05 if autocast else 1e-5
        torch.testing.assert_close(got, wanted, atol=tolerance * wanted.abs().max().item(), rtol=tolerance)


@pytest.mark.compiler
@pytest.mark.parametrize("make", [FusedRbMLayer, RbMFeedForward, RbMStudent])
def test_a_compiled_function_that_changes_the_mode_is_one_graph(make):
    """Calls of eval() are counted, and a graph that reads the count would be compiled anew for each number."""
    module, x, counter = make(6, 8, 5), torch.randn(12, 6), CompileCounter()

    def trains_and_answers(module):
        trained = module.train()(x)
        return trained.detach(), module.eval()(x).detach()

    folding.steps()  # counts from here on, as after any inference
    twin = copy.deepcopy(module)
    compiled = torch.compile(trains_and_answers, backend=counter, fullgraph=True)
    for _ in range(10):
        torch.testing.assert_close(compiled(twin), trains_and_answers(module))
    assert counter.frame_count == 1
