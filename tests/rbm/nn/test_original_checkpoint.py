"""Checkpoints of the paper's released code: its names, its logits, and rejection of anything else."""

import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rbm import load_released

WIDTH, HIDDEN, CLASSES, EXPERTS, TOP_K = 12, 10, 4, 5, 2


class Layer(nn.Module):
    """The released layer in eval mode, according to SPEC 1.1, with the released parameter names."""

    def __init__(self, fan_in, fan_out, attends):
        super().__init__()
        self.routing_memory = nn.Parameter(0.9 * F.normalize(torch.randn(EXPERTS, fan_in), dim=1))
        self.temperature = nn.Parameter(torch.tensor([0.8]))
        self.const_attention = nn.Parameter(0.3 * torch.randn(EXPERTS, fan_in) if attends else torch.zeros(EXPERTS))
        self.experts = nn.ModuleList(nn.Sequential(nn.Dropout(0.5), nn.Linear(fan_in, fan_out)) for _ in range(EXPERTS))

    def forward(self, x):
        cosines = F.normalize(x) @ F.normalize(self.routing_memory).T
        chosen = torch.full_like(cosines, -torch.inf).scatter(1, cosines.topk(TOP_K).indices, 0.0)
        gates = torch.softmax(cosines + chosen, dim=-1)
        scales = self.const_attention.clamp(max=torch.log(torch.tensor(100.0))).exp()
        outputs = torch.stack([expert(scales[[i]] * x) for i, expert in enumerate(self.experts)])
        return self.temperature.exp() * torch.einsum("be,ebn->bn", gates, outputs)


class Bypass(nn.Module):
    """The released code keeps its BatchNorm under a name inside another module."""

    def __init__(self, width):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return self.batch_norm(x)


class Released(nn.Module):
    def __init__(self, layers, norm, attends):
        super().__init__()
        sizes = [WIDTH, *[HIDDEN] * (layers - 1), CLASSES]
        self.layers = nn.ModuleList(Layer(a, b, attends) for a, b in itertools.pairwise(sizes))
        norms = {"batch": Bypass, "layer": nn.LayerNorm}
        self.norms = nn.ModuleList(norms[norm](HIDDEN) for _ in range(layers - 1) if norm != "none")
        self.mlp_feature_encoder = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            if i > 0:
                x = F.relu(self.norms[i - 1](x) if len(self.norms) else x)
            x = layer(x)
        return x


def released(layers=2, norm="none", attends=True):
    model = Released(layers, norm, attends)
    for parameter in model.norms.parameters():
        nn.init.normal_(parameter, 0.5)
    if norm == "batch":  # running statistics that differ from the initial ones
        for wrapper in model.norms:
            wrapper.batch_norm(2 + 3 * torch.randn(50, HIDDEN))
    return model.eval()


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("norm", ["none", "batch", "layer"])
@pytest.mark.parametrize("attends", [True, False])
def test_equal_logits(tmp_path, layers, norm, attends):
    model, x = released(layers, norm, attends), torch.randn(40, WIDTH)
    torch.save(model.state_dict(), tmp_path / "student.pt")
    student = load_released(tmp_path / "student.pt", top_k=TOP_K, dropout=0.5)
    torch.testing.assert_close(student(x), model(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(load_released(model.state_dict(), top_k=TOP_K)(x), student(x), rtol=0, atol=0)
    assert not student.training
    assert {layer.dropout for layer in student.layers} == {0.5}
    assert not torch.allclose(load_released(model.state_dict(), top_k=TOP_K + 1)(x), student(x), atol=1e-3)


def test_the_default_dtype_changes_no_number():
    state, x = released().state_dict(), torch.randn(40, WIDTH)
    expected = load_released(state, top_k=TOP_K)
    torch.set_default_dtype(torch.bfloat16)
    try:
        student = load_released(state, top_k=TOP_K)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(student(x), expected(x))


def test_a_student_learns_on():
    state = released().state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    student = load_released(state, top_k=TOP_K).train()
    student(torch.randn(20, WIDTH)).sum().backward()
    student.eval()
    assert all(parameter.grad is not None for parameter in student.parameters())
    assert not torch.equal(student.layers[0].memory, before["layers.0.routing_memory"])
    assert all(torch.equal(state[name], before[name]) for name in before), "the caller's tensors stay as they were"


def without(name):
    return lambda state: state.pop(name)


def with_value(name, value):
    return lambda state: state.update({name: value})


FAULTS = {
    "other module": (lambda s: [s.pop(n) for n in list(s) if "routing_memory" in n], "no layers.0.routing_memory"),
    "no expert": (without("layers.1.experts.3.1.weight"), "lacks layers.1.experts.3.1.weight"),
    "no first expert": (without("layers.0.experts.0.1.weight"), "lacks layers.0.experts.0.1.weight"),
    "no scale": (without("layers.0.temperature"), "lacks layers.0.temperature"),
    "no attention": (without("layers.0.const_attention"), "lacks layers.0.const_attention"),
    "layers with a gap": (with_value("layers.3.routing_memory", torch.ones(5, 4)), "lacks layers.2.experts.0.1.weight"),
    "one expert more": (with_value("layers.0.experts.5.1.bias", torch.ones(10)), "has not: layers.0.experts.5.1.bias"),
    "a router": (with_value("layers.0.router.sim_matrix", torch.ones(3)), "has not: layers.0.router.sim_matrix"),
    "shape": (with_value("layers.1.experts.0.1.bias", torch.ones(3)), r"has shape \[3\], expected \[4\]"),
    "dimensions": (with_value("layers.0.routing_memory", torch.ones(3)), r"shape \[3\], expected 2 dimensions"),
    "pretraining": (
        with_value("layers.1.routing_memory", torch.zeros(5, 10)),
        "holds only zeros, as before the end of pret",
    ),
    "no tensor": (with_value("epoch", 3), "holds 'epoch': int, expected tensors by name"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(tmp_path, fault):
    damage, message = FAULTS[fault]
    state = released().state_dict()
    damage(state)
    with pytest.raises(ValueError, match=f"^the state.* {message}" if "shape" not in message else message):
        load_released(state, top_k=TOP_K)
    torch.save(state, tmp_path / "bad.pt")
    with pytest.raises(ValueError, match=message) as stop:
        load_released(tmp_path / "bad.pt", top_k=TOP_K)
    assert str(tmp_path / "bad.pt") in str(stop.value)


def test_attention_of_one_number_an_expert_must_be_none():
    state = released(attends=False).state_dict()
    state["layers.0.const_attention"] += 1
    with pytest.raises(ValueError, match=r"const_attention of shape \[5\] holds more than zeros"):
        load_released(state, top_k=TOP_K)


def test_hidden_widths_differ():
    state = released(layers=3).state_dict()
    for expert in range(EXPERTS):
        state[f"layers.1.experts.{expert}.1.weight"] = torch.ones(HIDDEN + 1, HIDDEN)
    with pytest.raises(ValueError, match=r"hidden layers of widths \[10, 11\]"):
        load_released(state, top_k=TOP_K)


def test_files_that_hold_no_state(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_released(tmp_path / "none.pt", top_k=3)
    torch.save(released(), tmp_path / "module.pt")
    with pytest.raises(ValueError, match=r"as a file of tensors .*torch.save\(model.state_dict\(\), path\)"):
        load_released(tmp_path / "module.pt", top_k=3)
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    with pytest.raises(ValueError, match=r"list.pt holds list, expected what model.state_dict\(\) gave"):
        load_released(tmp_path / "list.pt", top_k=3)
    with pytest.raises(ValueError, match="holds nothing"):
        load_released({}, top_k=3)


class Trap:
    def __reduce__(self):
        return exec, ("import pathlib; pathlib.Path('sprung').touch()",)


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trap.pt").write_bytes(pickle.dumps(Trap(), protocol=2))
    with pytest.raises(ValueError, match="cannot be read as a file of tensors"):
        load_released("trap.pt", top_k=3)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("kind", ["nan", "infinite", "meta", "sparse", "complex", "numbered"])
def test_tensors_that_no_layer_has(kind):
    state = Released(2, "none", True).state_dict()
    name = "layers.0.temperature"
    if kind in ("nan", "infinite"):
        state[name] = torch.tensor([float(kind[:3])])
    elif kind == "sparse":
        state["layers.0.routing_memory"] = state["layers.0.routing_memory"].to_sparse()
    elif kind == "numbered":
        state[3] = state.pop(name)
    else:
        state[name] = state[name].to("meta") if kind == "meta" else state[name] * 1j
    with pytest.raises(ValueError, match=r"^the state(: layers\.0\.temperature holds NaN| holds other than dense)"):
        load_released(state, top_k=TOP_K)


def test_a_damaged_checkpoint_is_told(tmp_path):
    path = tmp_path / "state.pt"
    state = Released(2, "none", True).state_dict()
    torch.save(state, path)
    content = bytearray(path.read_bytes())
    content[content.index(state["layers.0.routing_memory"].numpy().tobytes()) + 2] ^= 64
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot be read as a file of tensors \(its part .* is not what was written"):
        load_released(path, top_k=TOP_K)
