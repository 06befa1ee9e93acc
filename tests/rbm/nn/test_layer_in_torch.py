"""The layers under PyTorch's tools for modules: parametrisations, pruning, hooks, ties, copies, TorchScript."""

import copy
import pickle

import pytest
import torch
from layer_answers import answer, expected
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils import parametrizations, parametrize, prune

import rbm
from rbm import FusedRbMLayer, RbMFeedForward
from rbm.nn.students import MLPStudent, RbMStudent

LAYERS = {
    "FusedRbMLayer": (lambda: FusedRbMLayer(6, 4, 5, 3), "weight"),
    "RbMFeedForward": (lambda: RbMFeedForward(6, 8, 5, 3, out_features=4), "weight_out"),
}


@pytest.fixture(params=LAYERS)
def case(request):
    """A layer in training mode, and the name of one of its weights."""
    make, weight = LAYERS[request.param]
    return make(), weight


def restated(layer: FusedRbMLayer, x: torch.Tensor) -> torch.Tensor:
    """Eqs. 3 and 5 without any operator of ours: all experts for all rows ``[B, D]``."""
    cosines = nn.functional.normalize(x, dim=-1) @ nn.functional.normalize(layer.memory, dim=-1).T
    top, experts = (cosines / layer.gate_temperature).topk(layer.top_k, dim=-1)
    y = torch.einsum("bd,ed,end->ben", x, layer.attention.exp(), layer.weight) + layer.bias
    y = y[torch.arange(len(x))[:, None], experts] * layer.log_scale.exp()
    return (top.softmax(-1)[..., None] * y).sum(1)


class Half(nn.Module):
    def forward(self, tensor):
        return tensor / 2


class LowRank(nn.Module):
    """The update ``A B`` of LoRA, for each expert."""

    def __init__(self, weight):
        super().__init__()
        experts, outputs, features = weight.shape
        self.a, self.b = nn.Parameter(torch.randn(experts, outputs, 2)), nn.Parameter(torch.randn(experts, 2, features))

    def forward(self, weight):
        return weight + self.a @ self.b


@pytest.mark.parametrize(
    "change",
    [
        parametrizations.spectral_norm,
        parametrizations.weight_norm,
        nn.utils.spectral_norm,
        lambda layer, name: prune.l1_unstructured(layer, name, 0.5),
        lambda layer, name: parametrize.register_parametrization(layer, name, LowRank(getattr(layer, name))),
    ],
    ids=["spectral norm", "weight norm", "old spectral norm", "prune", "low rank"],
)
def test_changed_weights(case, change):
    layer, name = case
    x = torch.randn(9, 6)
    before = answer(layer.eval(), x)  # experts are folded by now
    layer.train()
    change(layer, name)
    layer(x).square().sum().backward()
    layer.eval()
    assert not torch.equal(answer(layer, x), before)
    torch.testing.assert_close(answer(layer, x), expected(layer, x))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(0.9)
    torch.testing.assert_close(answer(layer, x), expected(layer, x))
    if isinstance(layer, FusedRbMLayer):
        torch.testing.assert_close(answer(layer, x), restated(layer, x), atol=1e-5, rtol=1e-4)


def test_a_parametrised_memory_routes_but_does_not_move(case):
    layer, _ = case
    x = torch.randn(9, 6)
    layer.eval()
    before = answer(layer, x)
    parametrize.register_parametrization(layer, "memory", Half())
    torch.testing.assert_close(answer(layer, x), before)  # routing does not depend on lengths
    layer.train()
    with pytest.raises(RuntimeError, match=r"memory is parametrised, expected a buffer.*track_memory = False"):
        layer(x)
    layer.track_memory = False
    torch.testing.assert_close(layer(x), before)


WRITES = {
    "initialize_memory": rbm.initialize_memory,
    "reset_dead_experts": rbm.reset_dead_experts,
    "reset_parameters": lambda layer, x: layer.reset_parameters(),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_would_be_written_into_a_copy_is_refused(case, name):
    layer, _ = case
    parametrize.register_parametrization(layer.eval(), "memory", Half())
    with pytest.raises(RuntimeError, match=rf"memory is parametrised, expected a buffer, which {name}\(\) writes"):
        WRITES[name](layer, torch.randn(9, 6))


COMPUTED = {
    "weight norm": parametrizations.weight_norm,
    "old spectral norm": nn.utils.spectral_norm,
    "prune": lambda layer, name: prune.random_unstructured(layer, name, 0.5),
}


@pytest.mark.parametrize("change", COMPUTED)
@pytest.mark.parametrize("write", ["reset_dead_experts", "reset_parameters", "clone_expert"])
def test_what_would_be_written_into_computed_experts_is_refused(case, write, change):
    layer, name = case
    if write == "clone_expert" and not hasattr(layer, write):
        return
    writes = {**WRITES, "clone_expert": lambda layer, x: layer.clone_expert()}
    COMPUTED[change](layer, name)
    state = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    with pytest.raises(
        RuntimeError,
        match=rf"{name} is parametrised or pruned, expected a parameter, which {write}\(\) writes in place: first make"
        rf" it one again, by .*remove_parametrizations\(layer, '{name}'\) or prune",
    ):
        writes[write](layer, torch.randn(9, 6).abs())
    assert all(torch.equal(tensor, state[key]) for key, tensor in layer.state_dict().items())


def test_a_memory_that_is_a_parameter(case):
    """It has a gradient from the auxiliary losses, and follows the rows as a buffer does."""
    layer, _ = case
    x, memory = torch.randn(64, 6), layer.memory.clone()
    del layer.memory
    layer.memory = nn.Parameter(memory.clone())
    with rbm.record_routing(layer):
        (layer(x).sum() + rbm.auxiliary_loss(layer)).backward()
    assert layer.memory.grad.abs().sum() > 0
    layer.eval()
    assert not torch.equal(layer.memory, memory)
    torch.testing.assert_close(answer(layer, x), expected(layer, x))


def test_experts_that_are_added_by_hand(case):
    """The next statistics did not fit the memory, or a new expert without a memory vector got no row, silently."""
    layer, weight = case
    for name in (weight, "memory"):
        grown, tensor = copy.deepcopy(layer), getattr(layer, name)
        more = torch.cat([tensor, tensor[:1]]).detach()
        setattr(grown, name, more if name == "memory" else nn.Parameter(more))
        message = rf"num_experts: 5, .*{name}: 6.*; expected 5 for all, with which the {type(layer).__name__} was made"
        with pytest.raises(ValueError, match=message):
            grown(torch.randn(9, 6))
        for use in (grown.eval, grown.state_dict):
            with pytest.raises(ValueError, match=message):
                use()


def test_hooks_run_at_training_and_inference(case):
    layer, _ = case
    layer.track_memory = False
    x, called = torch.randn(9, 6, requires_grad=True), []
    plain = layer.eval()(2 * x).detach() + 1
    layer.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    layer.register_forward_hook(lambda module, inputs, output: output + 1)
    layer.register_full_backward_pre_hook(lambda module, grads: called.append(grads[0].shape))
    layer.register_full_backward_hook(lambda module, grads, _: called.append(grads[0].shape))
    torch.testing.assert_close(answer(layer, x), plain)
    y = layer.train()(x)
    torch.testing.assert_close(y, plain)
    y.sum().backward()
    assert called == [y.shape, x.shape]


def test_tied_weights_are_trained_by_both_and_seen_by_both(case):
    (layer, name), (make, _) = case, LAYERS[type(case[0]).__name__]
    other, x = make(), torch.randn(9, 6)
    setattr(other, name, getattr(layer, name))
    model = nn.ModuleList([layer, other]).eval()
    before = [answer(part, x) for part in model]
    optimizer = torch.optim.SGD([getattr(layer, name)], lr=0.1)
    sum(part(x).sum() for part in model).backward()
    optimizer.step()
    assert len(list(model.parameters())) < 2 * len(list(layer.parameters()))
    for part, old in zip(model, before, strict=True):
        assert not torch.equal(answer(part, x), old)
        torch.testing.assert_close(answer(part, x), expected(part, x))


def test_an_ensemble_of_layers(case):
    """Parameters and memories of several layers in one vmap, as torch.func describes it."""
    make, _ = LAYERS[type(case[0]).__name__]
    layers, x = [make().eval() for _ in range(3)], torch.randn(9, 6)
    parameters, buffers = stack_module_state(layers)
    together = vmap(lambda p, b: functional_call(layers[0], (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(together, torch.stack([layer(x) for layer in layers]))


def test_torchscript_names_what_to_use_instead(case):
    layer, _ = case
    for model in (layer, nn.Sequential(nn.Linear(6, 6), layer)):
        with pytest.raises(RuntimeError, match=f"torch.jit.script does not support {type(layer).__name__}: use torch"):
            torch.jit.script(model)


def test_symbolic_traces_need_the_layer_as_a_leaf(case):
    layer, _ = case
    model, x = nn.Sequential(nn.Linear(6, 6), layer).eval(), torch.randn(9, 6)
    for refused in (model, layer, RbMStudent(6, 8, 4), MLPStudent(6, 8, 4)):
        for training in (True, False):
            with pytest.raises(
                TypeError, match=r"make the layer a leaf of the tracer .*, or use torch\.export\.export"
            ):
                torch.fx.symbolic_trace(refused.train(training))

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return module is layer or super().is_leaf_module(module, name)

    traced = torch.fx.GraphModule(model, Tracer().trace(model))
    assert torch.equal(answer(traced, x), answer(model, x))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@pytest.mark.parametrize("make", [*(make for make, _ in LAYERS.values()), lambda: RbMStudent(6, 8, 4).eval()])
def test_a_copy_of_a_module_compiled_in_place_answers_with_its_own_weights(make, copied):
    module, x = make(), torch.randn(7, 6)
    module.compile(backend="eager")
    module(x)
    twin = copied(module)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(x).any()
