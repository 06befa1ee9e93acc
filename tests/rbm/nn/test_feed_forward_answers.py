"""RbMFeedForward at inference on a CPU: packed experts, which are kept exactly as long as they are valid."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from rbm import RbMFeedForward
from rbm.nn import feed_forward
from rbm.nn.feed_forward import ACTIVATIONS


def make(**options) -> RbMFeedForward:
    return RbMFeedForward(6, 8, 5, 3, **options).eval()


def expected(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The answer with gradients, which packs nothing."""
    with torch.enable_grad():
        return layer(x).detach()


def answer(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return layer(x)


@pytest.fixture
def packings(monkeypatch) -> list:
    """The weights that were packed."""
    packed, pack = [], feed_forward.pack_experts
    monkeypatch.setattr(feed_forward, "pack_experts", lambda weight, bias: packed.append(weight) or pack(weight, bias))
    return packed


@pytest.mark.parametrize("leading", [(), (1,), (7,), (2, 3), (2, 0, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_the_forward_with_gradients(activation, dtype, leading, packings):
    for options in ({}, {"bias": False, "out_features": 33, "gate_temperature": 0.3}):
        layer = make(activation=activation, dtype=dtype, **options)
        x = torch.randn(*leading, 6, dtype=torch.float64).to(dtype)
        wanted = expected(layer, x)
        assert not packings
        for y in (answer(layer, x), answer(layer, x)):
            assert y.shape == (*leading, layer.out_features)
            assert y.dtype == dtype
            torch.testing.assert_close(y, wanted, atol=2e-2 if dtype == torch.bfloat16 else 2e-6, rtol=0)
        assert len(packings) == 2
        packings.clear()


def test_rows_are_counted_and_routed_alike():
    layer, x = make(), torch.randn(40, 6)
    layer.track_usage = True
    y, routing = answer(lambda x: layer(x, return_routing=True), x)
    torch.testing.assert_close(y, answer(layer, x))
    assert torch.equal(layer.usage, 2 * torch.bincount(routing.experts.flatten(), minlength=5))


def step(layer: RbMFeedForward) -> None:
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    layer(torch.randn(9, 6)).sum().backward()
    optimizer.step()


def overwrite(layer: RbMFeedForward) -> None:
    with torch.no_grad():
        layer.bias_out[1] += 1


def replace(layer: RbMFeedForward) -> None:
    layer.weight_out = nn.Parameter(torch.randn_like(layer.weight_out))


CHANGES = {
    "a step": step,
    "in place": overwrite,
    "another parameter": replace,
    "a state_dict": lambda layer: layer.load_state_dict(make().state_dict()),
    "another memory": lambda layer: layer.memory.neg_(),
    "another dtype": lambda layer: layer.double(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_is_seen_and_packed_once(change, packings):
    layer, x = make(), torch.randn(20, 6)
    before = answer(layer, x)
    change(layer)
    x = x.to(layer.weight_in.dtype)
    packings.clear()
    for _ in range(2):
        y = answer(layer, x)
        torch.testing.assert_close(y, expected(layer, x))
        assert not torch.equal(y.float(), before.float())
    assert len(packings) == (0 if change is CHANGES["another memory"] else 2)


def test_training_drops_the_copy_and_another_layer_does_not_get_it():
    layer, x = make(), torch.randn(20, 6)
    y = answer(layer, x)
    assert layer._copy is not None
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for twin in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert twin._copy is None
        assert torch.equal(answer(twin, x), y)
    assert layer.train()._copy is None
    answer(layer, x)
    assert layer._copy is None


def test_what_packed_experts_do_not_serve(packings):
    layer, x = make(), torch.randn(20, 6)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    answer(copy.deepcopy(layer).half(), x.half())
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        _, tangent = torch.autograd.forward_ad.unpack_dual(
            layer(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        )
        assert tangent is not None
    shared = make()
    shared.share_memory()
    answer(shared, x)
    parametrize.register_parametrization(layer, "weight_in", nn.Softplus(), unsafe=True)
    torch.testing.assert_close(answer(layer, x), expected(layer, x))
    assert not packings
    with pytest.raises(ValueError, match=r"input has shape \[20, 5\], expected \[..., 6\]"):
        answer(layer, x[:, :5])
    with pytest.raises(TypeError, match=r"input has dtype torch\.float64, expected torch\.float32"):
        answer(layer, x.double())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_programs_do_not_contain_packed_experts():
    layer, x = make(), torch.randn(20, 6)
    with torch.no_grad():
        y = layer(x)
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        exported = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("rows")},))
        traced = torch.jit.trace(layer, x)
        assert "packed" not in exported.graph_module.code
        assert "packed" not in str(traced.graph)
        for program in (compiled, exported.module(), traced, torch.func.vmap(layer)):
            torch.testing.assert_close(program(x), y)
