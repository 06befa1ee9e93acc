"""RbMFeedForward: its reference, its derivatives, its memory, and the contract of an nn.Module."""

import copy

import pytest
import torch
from torch import nn

import rbm
from rbm import FusedRbMLayer, RbMFeedForward
from rbm.nn import feed_forward
from rbm.nn.feed_forward import ACTIVATIONS
from rbm.nn.parameters import count_parameters
from rbm.nn.reference import ReferenceRbMFeedForward
from rbm_kernels.ops.expert_matmul import op

OPTIONS = {name: {"activation": name} for name in ACTIVATIONS} | {
    "no bias, other width": {"bias": False, "out_features": 4},
    "live gates": {"detach_gates": False, "activation": "swiglu"},
    "one expert": {"num_experts": 1, "top_k": 1},
    "all experts": {"num_experts": 4, "top_k": 4, "gate_temperature": 0.3},
    "raw memory": {"normalize_memory": False, "normalize_memory_input": False},
}


def twins(dtype=torch.float64, **options):
    options = {"num_experts": 5, "top_k": 2, **options}
    layer = RbMFeedForward(7, 9, dtype=dtype, **options)
    reference = ReferenceRbMFeedForward(7, 9, dtype=dtype, **options)
    reference.load_state_dict(layer.state_dict())
    return layer, reference


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_equals_the_reference_over_training_steps(options, dtype):
    pair = twins(dtype, **options)
    for rows in (21, 1, 64):
        x, seen = torch.randn(rows, 7, dtype=dtype), []
        for layer in pair:
            layer.zero_grad()
            h = x.clone().requires_grad_()
            y, routing = layer(h, return_routing=True)
            (y.square().sum() + (routing.gates * routing.cosines).sum()).backward()
            seen.append([y, *routing, h.grad, *(p.grad for p in layer.parameters())])
        for got, expected in zip(*seen, strict=True):
            torch.testing.assert_close(got, expected)
        with torch.no_grad():
            for p, q in zip(*(layer.parameters() for layer in pair), strict=True):
                p -= 0.02 * p.grad
                q -= 0.02 * q.grad
    states = [layer.eval().state_dict() for layer in pair]
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], msg=name)
    with torch.inference_mode():
        x = torch.randn(2, 3, 7, dtype=dtype)
        torch.testing.assert_close(pair[0](x), pair[1](x))


@pytest.mark.parametrize(
    ("kind", "rows"), [(RbMFeedForward, 3), (RbMFeedForward, 10), (ReferenceRbMFeedForward, 3)], ids=str
)
def test_derivatives(kind, rows):
    layer = kind(4, 3, 3, 2, activation="swiglu", detach_gates=False, dtype=torch.float64).eval()
    names, leaves = zip(*layer.named_parameters(), strict=True)
    leaves = [leaf.detach().requires_grad_() for leaf in (torch.randn(rows, 4, dtype=torch.float64), *leaves)]

    def function(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(function, leaves)


def test_rows_are_read_where_they_lie(monkeypatch):
    """Rows are not copied for their experts: every product of the first layer reads the original rows."""
    calls, multiply = [], feed_forward.expert_matmul
    monkeypatch.setattr(feed_forward, "expert_matmul", lambda x, *rest: calls.append(x) or multiply(x, *rest))
    layer, x = RbMFeedForward(7, 9, 5, 3), torch.randn(20, 7)
    layer(x)
    assert [call.shape for call in calls] == [(20, 7), (20, 9)] * 3
    assert all(call.data_ptr() == x.data_ptr() for call in calls[::2])
    layer(x[:15])  # whose copies are as large as the weights of the first product
    assert [call.shape for call in calls[6:]] == [(45, 7), (45, 9)]


def test_what_a_backward_pass_keeps_does_not_grow_with_copies_of_rows():
    kept = []
    layer, x = RbMFeedForward(64, 2, 4, 4, activation="relu"), torch.randn(100, 64)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x.requires_grad_())
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    rows = sum(size for place, size in storages.items() if place not in parameters)
    assert rows < 1.5 * x.nbytes, "four copies of the rows would be four times as much"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(dtype):
    layer = RbMFeedForward(8, 16, 4, 2)
    x = torch.randn(30, 8)
    exact = layer(x)
    with torch.autocast("cpu", dtype):
        got = layer(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), exact, atol=0.05, rtol=0.05)
    layer.to(dtype).eval()
    assert layer.memory.dtype == torch.float32
    assert layer(x.to(dtype)).dtype == dtype


def test_habits_of_a_module():
    layer = RbMFeedForward(6, 8, 5, 3, activation="swiglu", dropout=0.5)
    shapes = {name: tuple(value.shape) for name, value in layer.state_dict().items()}
    assert shapes == {
        "weight_in": (5, 16, 6),
        "bias_in": (5, 16),
        "weight_out": (5, 6, 8),
        "bias_out": (5, 6),
        "memory": (5, 6),
    }
    assert "6, 8, num_experts=5, top_k=3, out_features=6, activation='swiglu'" in repr(layer)
    assert not torch.equal(layer(torch.ones(4, 6)), layer(torch.ones(4, 6))), "dropout"
    assert layer.eval()(torch.empty(0, 6)).shape == (0, 6)
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        copied.weight_in.zero_()
    assert layer.weight_in.any()
    meta = RbMFeedForward(6, 8, 5, 3, activation="swiglu", device="meta")
    meta.load_state_dict(layer.state_dict(), assign=True)
    x = torch.randn(4, 6)
    assert torch.equal(meta.eval()(x), layer(x))
    torch.testing.assert_close(torch.func.vmap(layer)(x.reshape(2, 2, 6)).reshape(4, 6), layer(x))
    total, active = count_parameters(layer)
    each = 16 * 6 + 16 + 6 * 8 + 6
    assert (total, active) == (5 * each + 30, 3 * each + 30)


@pytest.mark.compiler
def test_trains_compiled_in_one_graph():
    layer, x = RbMFeedForward(6, 8, 5, 2), torch.randn(12, 6)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
    for each in (compiled, layer):
        each(x).square().sum().backward()
    torch.testing.assert_close(compiled.weight_in.grad, layer.weight_in.grad)
    torch.testing.assert_close(compiled._orig_mod.eval().memory, layer.eval().memory)


@pytest.mark.compiler
@pytest.mark.parametrize("make", [lambda: RbMFeedForward(6, 8, 5, 2), lambda: FusedRbMLayer(6, 6, 5, 2)])
@pytest.mark.parametrize("kernels", [False, True])
def test_compiles_for_the_valid_rows_of_a_padded_batch(make, kernels, monkeypatch):
    """Their number depends on data, so nothing may be chosen by it; with kernels, neither an order of the rows."""
    monkeypatch.setattr(op, "_kernels_serve", lambda x: kernels)
    layer, x = make(), torch.randn(4, 7, 6)
    twin = copy.deepcopy(layer)

    def step(module, valid):
        output = torch.zeros(4, 7, 6)
        output[valid] = module(x[valid])
        return output

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
        for _ in range(2):
            valid = torch.rand(4, 7) > 0.4
            got, expected = compiled(twin, valid), step(layer, valid)
            torch.testing.assert_close(got, expected)
            got.square().sum().backward()
            expected.square().sum().backward()
    for mine, other in zip(twin.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_features": 0}, "hidden_features is 0, expected at least 1"),
        ({"out_features": -1}, "out_features is -1"),
        ({"in_features": 0, "out_features": 1}, "in_features is 0"),
        ({"activation": "tanh"}, "activation is 'tanh', expected one of relu, gelu, silu, swiglu"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"top_k": 9}, "top_k is 9, expected between 1 and num_experts=8"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        RbMFeedForward(**{"in_features": 6, "hidden_features": 4, **options})


def test_bad_input():
    layer = RbMFeedForward(6, 8, 5, 3)
    with pytest.raises(ValueError, match=r"input has shape \[3, 5\], expected \[\.\.\., 6\]"):
        layer(torch.randn(3, 5))
    with pytest.raises(TypeError, match=r"input is torch.sparse_csr, expected a dense tensor"):
        layer(torch.randn(3, 6).to_sparse_csr())
    with pytest.raises(TypeError, match=r"input has dtype torch.float64, expected torch.float32"):
        layer(torch.randn(3, 6).double())
    with pytest.raises(TypeError, match=r"input is a ndarray, expected a dense tensor$"):
        layer(torch.randn(3, 6).numpy())


@pytest.mark.parametrize("layer", [RbMFeedForward(6, 8, 5, 3), FusedRbMLayer(6, 4, 5, 3)], ids=["network", "linear"])
def test_nested_rows_are_passed_by_their_values(layer):
    nested = torch.nested.nested_tensor([torch.randn(3, 6), torch.randn(1, 6)], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"features are a nested tensor, expected a dense one; .* features.values\(\)"):
        layer(nested)
    output = torch.nested.nested_tensor_from_jagged(layer(nested.values()), nested.offsets())
    assert [len(part) for part in output.unbind()] == [3, 1]


def test_memory_is_placed_in_any_model_and_dead_experts_start_anew():
    centers = torch.eye(6)[:4]
    x = centers.repeat_interleave(10, 0) + 0.01 * torch.randn(40, 6)
    model = nn.Sequential(RbMFeedForward(6, 8, 4, 1), nn.LayerNorm(6), FusedRbMLayer(6, 2, 4, 1)).train()
    model[1].eval()
    rbm.initialize_memory(model, x, seed=1)
    assert [module.training for module in model] == [True, False, True]
    assert (nn.functional.cosine_similarity(centers[:, None], model[0].memory, dim=-1).max(1).values > 0.99).all()
    rbm.track_usage(model)
    model(x)
    assert all(not usage.dead for usage in rbm.expert_usage(model).values())

    with torch.no_grad():  # one memory vector gets all rows, the others none
        model[0].memory.copy_(torch.tensor([[1.0], [-1.0], [-1.0], [-1.0]]) * torch.ones(4, 6))
    weights = model[0].weight_in.clone()
    reset = rbm.reset_dead_experts(model[0], x)
    assert reset == {"": [1, 2, 3]}
    assert (model[0].memory[1:] @ centers.T).max(1).values.min() > 0.99, "each at rows of its own"
    assert len({int(i) for i in (model[0].memory[1:] @ centers.T).argmax(1)}) == 3
    assert torch.equal(model[0].weight_in[1:], weights[:1].expand(3, -1, -1)), "a copy of who served the rows"
    assert rbm.reset_dead_experts(model[0], x) == {}
    with pytest.raises(ValueError, match=r"min_share is 1\.0"):
        rbm.reset_dead_experts(model, x, min_share=1.0)


def test_rows_without_a_direction_of_their_own_revive_nobody():
    layer = FusedRbMLayer(6, 2, 4, 1)
    row = torch.randn(1, 6)
    x = torch.cat([row.expand(9, 6), torch.zeros(3, 6), torch.full((1, 6), torch.nan)])
    with torch.no_grad():
        layer.memory.copy_(torch.cat([row, -row, -row, -row]))
    before = layer.memory.clone()
    assert rbm.reset_dead_experts(layer, x) == {}
    assert torch.equal(layer.memory, before)
    sparse = torch.eye(6)[:3].repeat(5, 1)
    with torch.no_grad():
        layer.memory.copy_(torch.tensor([[1.0], [-1.0], [-1.0], [-1.0]]) * torch.ones(4, 6))
    one_for_all = layer.memory.clone()
    assert rbm.reset_dead_experts(layer, sparse.to_sparse_csr()) == {"": [1, 2, 3]}
    layer.memory.copy_(one_for_all)
    bad = torch.tensor([[torch.inf], [torch.nan]]).expand(2, 6)
    assert rbm.reset_dead_experts(layer, torch.cat([bad, sparse])) == {"": [1, 2, 3]}, "bad rows do not stop it"
    assert layer.memory.isfinite().all()
    assert rbm.reset_dead_experts(layer, torch.empty(0, 6)) == {}


def test_a_revived_expert_is_a_copy_of_the_living_one_that_served_its_row():
    """Here, dead experts come before living ones."""
    layer, axes = FusedRbMLayer(6, 2, 4, 1), torch.eye(6)
    layer.memory.copy_(torch.stack([-axes[0], -axes[1], axes[0], axes[1]]))
    weight = layer.weight.detach().clone()
    x = torch.cat([axes[:2].repeat(3, 1), axes[1:2] + axes[5:]])
    assert rbm.reset_dead_experts(layer, x) == {"": [0]}
    assert torch.equal(layer.weight, weight[[3, 1, 2, 3]])


def test_experts_with_a_small_share_of_an_even_load_are_dead():
    layer, axes = FusedRbMLayer(6, 2, 4, 2), torch.eye(6)
    layer.memory.copy_(axes[:4])
    # Loads of 8, 4, 2 and 2 rows; 8 rows with two experts each make an even load of 4.
    x = 2 * axes[0] + torch.cat([axes[1].expand(4, 6), axes[2].expand(2, 6), axes[3].expand(2, 6)])
    assert rbm.reset_dead_experts(layer, x, min_share=0.5) == {}
    assert rbm.reset_dead_experts(layer, x, min_share=0.75) == {"": [2, 3]}
    torch.testing.assert_close(layer.memory.norm(dim=1), torch.ones(4))


def test_inputs_of_several_arguments_are_sampled_alike():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = FusedRbMLayer(6, 2, 3, 1), []

        def forward(self, a, b):
            self.seen.append((a, b))
            return self.layer(a + b)

    model, x = Sum(), torch.randn(50, 6)
    rbm.initialize_memory(model, (x, -2 * x), max_rows=20)
    rbm.initialize_memory(model, {"b": -2 * x, "a": x}, max_rows=20)
    (a, b), (c, d) = model.seen
    assert len(a) == 20
    assert torch.equal(b, -2 * a)
    assert torch.equal(a, c)
    assert torch.equal(b, d)
    with pytest.raises(ValueError, match="groups are 50 and layer 'layer' sees 100 rows"):
        rbm.initialize_memory(model, (x[:, None].expand(50, 2, 6), x[:, None]), groups=torch.zeros(50).long())

    class Idle(Sum):
        def forward(self, a):
            return a

    with pytest.raises(ValueError, match="forward of the Idle calls none of its layers layer"):
        rbm.initialize_memory(Idle(), x)


@pytest.mark.parametrize("function", [rbm.initialize_memory, rbm.reset_dead_experts])
@pytest.mark.parametrize("features", [7, 12])
def test_rows_that_the_layer_does_not_take(function, features):
    layer = FusedRbMLayer(6, 2, 3, 1)
    before = layer.memory.clone()
    with pytest.raises(ValueError, match=rf"input has shape \[40, {features}\], expected \[\.\.\., 6\]"):
        function(layer, torch.randn(40, features))
    assert torch.equal(layer.memory, before)
