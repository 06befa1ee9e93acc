"""FusedRbMLayer: equivalence with the eager reference, and the contract of an nn.Module."""

import copy
import math

import pytest
import torch
from torch import nn

from rbm import FusedRbMLayer
from rbm.nn.dropout import dropout
from rbm.nn.reference import ReferenceRbMLayer

OPTIONS = {
    "defaults": {},
    "no attention": {"input_attention": False},
    "no bias": {"bias": False},
    "live gates": {"detach_gates": False},
    "temperature": {"gate_temperature": 0.3},
    "raw memory": {"normalize_memory": False},
    "raw rows": {"normalize_memory_input": False},
    "one expert": {"num_experts": 1, "top_k": 1},
    "all experts": {"num_experts": 4, "top_k": 4},
}


def twins(dtype=torch.float64, **options):
    layer = FusedRbMLayer(7, 5, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    reference = ReferenceRbMLayer(7, 5, dtype=dtype, **options)
    reference.load_state_dict(layer.state_dict())
    return layer, reference


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_equals_the_reference_over_training_steps(options):
    pair = twins(**options)
    for _ in range(4):
        x = torch.randn(21, 7, dtype=torch.float64)
        seen = []
        for layer in pair:
            layer.zero_grad()
            rows = x.clone().requires_grad_()
            y, routing = layer(rows, return_routing=True)
            (y.square().sum() + (routing.gates * routing.cosines).sum()).backward()
            seen.append([y, *routing, rows.grad, *(p.grad for p in layer.parameters())])
        for got, expected in zip(*seen, strict=True):
            torch.testing.assert_close(got, expected)
        with torch.no_grad():
            for p, q in zip(*(layer.parameters() for layer in pair), strict=True):
                p -= 0.05 * p.grad
                q -= 0.05 * q.grad
    states = [layer.eval().state_dict() for layer in pair]
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], msg=name)


def test_state_dict_keys_are_pinned():
    shapes = {name: tuple(value.shape) for name, value in FusedRbMLayer(6, 4, 5, 3).state_dict().items()}
    assert shapes == {
        "weight": (5, 4, 6),
        "bias": (5, 4),
        "attention": (5, 6),
        "log_scale": (1,),
        "memory": (5, 6),
    }
    bare = FusedRbMLayer(6, 4, 5, 3, bias=False, input_attention=False).state_dict()
    assert list(bare) == ["weight", "log_scale", "memory"]


def test_initial_values():
    layer = FusedRbMLayer(100, 4, 5, 3, init_scale=3.0, init_attention=1.5)
    assert layer.log_scale.exp().item() == pytest.approx(3.0)
    torch.testing.assert_close(layer.attention.exp(), torch.full((5, 100), 1.5))
    torch.testing.assert_close(layer.memory.norm(dim=-1), torch.ones(5))
    assert layer.weight.abs().max() <= 0.1 < layer.weight.abs().max() * 1.1
    assert 0.05 < layer.bias.abs().max() <= 0.1
    assert "in_features" not in repr(layer)
    assert "100, 4, num_experts=5, top_k=3" in repr(layer)


def test_scales_are_clamped_at_one_hundred():
    layer = FusedRbMLayer(4, 3, 2, 1).eval()
    x = torch.randn(5, 4)
    with torch.no_grad():
        layer.log_scale.fill_(50.0)
        high = layer(x)
        layer.log_scale.fill_(math.log(100.0))
    torch.testing.assert_close(layer(x), high)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 0, 4)])
def test_any_number_of_leading_dimensions(leading):
    layer = FusedRbMLayer(6, 4, 5, 3).eval()
    x = torch.randn(*leading, 6)
    y, routing = layer(x, return_routing=True)
    assert y.shape == (*leading, 4)
    assert all(part.shape == (*leading, 3) for part in routing)
    torch.testing.assert_close(y.reshape(-1, 4), layer(x.reshape(-1, 6)))


def test_empty_batch_trains_and_moves_nothing():
    layer = FusedRbMLayer(6, 4, 5, 3)
    before = layer.memory.clone()
    layer(torch.empty(0, 6)).sum().backward()
    layer.eval()
    assert torch.equal(layer.memory, before)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in layer.parameters())


def test_dropout_spares_the_router():
    layer = FusedRbMLayer(64, 3, 4, 2, dropout=0.5)
    x = torch.randn(30, 64)
    first, routing = layer(x, return_routing=True)
    layer.pending_total.zero_()  # keep the memory fixed, so that only the masks differ
    second, again = layer(x, return_routing=True)
    assert not torch.equal(first, second)
    assert torch.equal(routing.experts, again.experts)
    assert torch.equal(routing.cosines, again.cosines)


def test_dropout_draws_one_mask_a_row_for_all_its_experts():
    layer = FusedRbMLayer(64, 3, 4, 2, dropout=0.5)
    layer.clone_expert(0)
    x = torch.randn(30, 64)
    torch.manual_seed(5)
    y = layer(x)
    torch.manual_seed(5)
    masked = dropout(x, 0.5)
    # All experts are equal and the gates sum to one: the layer is one linear map of the masked row.
    expected = 2.0 * (1.1 * masked @ layer.weight[0].T + layer.bias[0])
    torch.testing.assert_close(y, expected)


def test_bfloat16_keeps_a_float32_memory():
    layer = FusedRbMLayer(6, 4, 5, 3)
    exact = layer.memory.clone()
    layer.bfloat16()
    assert layer.weight.dtype == torch.bfloat16
    assert layer.memory.dtype == torch.float32
    assert torch.equal(layer.memory, exact)
    y = layer(torch.randn(9, 6).bfloat16())
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    layer.eval()
    # A decay of 0.9 changes a float32 memory by amounts below bfloat16's precision.
    assert not torch.equal(layer.memory, exact)
    assert not torch.equal(layer.memory, layer.memory.bfloat16().float())
    assert layer.half().memory.dtype == torch.float32
    assert layer.double().memory.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_from_float64_to_half_precision(dtype):
    layer = FusedRbMLayer(6, 4, 5, 3, dtype=torch.float64).to(dtype)
    assert layer.memory.dtype == torch.float32
    x = torch.randn(8, 6, dtype=dtype)
    layer(x).sum().backward()
    with torch.no_grad():
        assert layer.eval()(x).dtype == dtype


def test_dtype_argument():
    assert FusedRbMLayer(6, 4, dtype=torch.bfloat16).memory.dtype == torch.float32
    assert FusedRbMLayer(6, 4, dtype=torch.float64).memory.dtype == torch.float64


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["dense", "sparse", "mixed"])
def test_autocast_leaves_float64_as_linear_does(kind, training):
    layer = FusedRbMLayer(6, 4, 5, 3, dtype=torch.float64).train(training)
    layer.track_memory = False
    x = torch.randn(7, 6, dtype=torch.float64)
    rows = {"dense": x, "sparse": x.to_sparse_csr(), "mixed": (x[:, :4].to_sparse_csr(), x[:, 4:].clone())}[kind]
    with torch.set_grad_enabled(training):
        expected = layer(rows), layer.expert_forward(rows)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.nn.Linear(6, 4, dtype=torch.float64)(x).dtype == torch.float64
            got = layer(rows), layer.expert_forward(rows)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_autocast_mixes_no_float64_with_float32(dtypes, training):
    """Like Linear: float64 is not cast, so the arguments' dtypes do not match."""
    layer = FusedRbMLayer(6, 4, 5, 3, dtype=dtypes[0]).train(training)
    x = torch.randn(7, 6, dtype=dtypes[1])
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(training):
        with pytest.raises(RuntimeError, match="same dtype"):
            torch.nn.Linear(6, 4, dtype=dtypes[0])(x)
        with pytest.raises(TypeError, match=r"(weight|input) has dtype"):
            layer(x)


def test_autocast():
    layer = FusedRbMLayer(16, 4, 5, 3).eval()
    x = torch.randn(20, 16)
    expected, routing = layer(x, return_routing=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, inside = layer(x, return_routing=True)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, atol=5e-2, rtol=5e-2)
    assert torch.equal(inside.experts, routing.experts)
    assert inside.cosines.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer.train()(x).float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_deepcopy_is_independent():
    layer = FusedRbMLayer(6, 4, 5, 3)
    layer(torch.randn(8, 6))
    copied = copy.deepcopy(layer)
    assert torch.equal(copied.pending_sum, layer.pending_sum)
    copied.eval()
    with torch.no_grad():
        copied.weight.zero_()
    assert not torch.equal(copied.memory, layer.memory)
    assert layer.weight.abs().sum() > 0


def test_meta_device():
    layer = FusedRbMLayer(6, 4, 5, 3, device="meta")
    assert layer(torch.empty(7, 6, device="meta")).shape == (7, 4)
    layer.eval()
    layer.to_empty(device="cpu").reset_parameters()
    assert torch.isfinite(layer(torch.randn(7, 6))).all()
    loaded = FusedRbMLayer(6, 4, 5, 3, device="meta")
    loaded.load_state_dict(layer.state_dict(), assign=True)
    x = torch.randn(7, 6)
    torch.testing.assert_close(loaded.eval()(x), layer(x))
    loaded.train()(x)


def test_expert_forward_and_clone():
    layer = FusedRbMLayer(6, 4, 5, 3)
    x = torch.randn(9, 6)
    torch.testing.assert_close(layer.expert_forward(x, 2), x @ layer.weight[2].T + layer.bias[2])
    layer.clone_expert(2)
    assert all(torch.equal(layer.weight[e], layer.weight[2]) for e in range(5))
    assert all(torch.equal(layer.bias[e], layer.bias[2]) for e in range(5))


def test_export_in_eval_with_a_dynamic_batch():
    layer = FusedRbMLayer(6, 4, 5, 3).eval()
    exported = torch.export.export(layer, (torch.randn(4, 6),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for rows in (2, 4, 11):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(exported.module()(x), layer(x))


@pytest.mark.compiler
def test_fullgraph_compile_trains_like_eager():
    eager = FusedRbMLayer(6, 4, 5, 3)
    compiled = torch.compile(copy.deepcopy(eager), fullgraph=True)
    for step in range(3):
        x = torch.randn(16, 6)
        for layer in (eager, compiled):
            layer.zero_grad()
            layer(x).square().sum().backward()
        torch.testing.assert_close(compiled.weight.grad, eager.weight.grad, msg=f"step {step}")
    states = [layer.eval().state_dict() for layer in (eager, compiled._orig_mod)]
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], msg=name)


def test_inside_another_model():
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), FusedRbMLayer(6, 2, 4, 2), nn.Softmax(-1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    x = torch.randn(200, 3)
    labels = (x[:, 0] > 0).long()
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.nll_loss(model(x).clamp_min(1e-6).log(), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_features": 0}, "in_features is 0, expected at least 1"),
        ({"out_features": -1}, "out_features is -1"),
        ({"num_experts": 2, "top_k": 3}, "top_k is 3, expected between 1 and num_experts=2"),
        ({"top_k": 0}, "top_k is 0"),
        ({"decay": 1.5}, "decay is 1.5, expected between 0 and 1"),
        ({"dropout": 1.0}, "dropout is 1.0, expected at least 0 and below 1"),
        ({"gate_temperature": 0.0}, "gate_temperature is 0.0, expected a positive number"),
        ({"init_scale": -2.0}, "init_scale is -2.0"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        FusedRbMLayer(**{"in_features": 6, "out_features": 4, **options})


def test_bad_input():
    layer = FusedRbMLayer(6, 4, 5, 3)
    with pytest.raises(ValueError, match=r"input has shape \[3, 5\], expected \[\.\.\., 6\]"):
        layer(torch.randn(3, 5))
    with pytest.raises(TypeError, match=r"input has dtype torch.bfloat16, expected torch.float32, that of the param"):
        layer(torch.randn(3, 6).bfloat16())
