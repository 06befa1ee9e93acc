"""Students that run as one operator notice every change of their weights."""

import weakref

import numpy as np
import pytest
import torch
from packed_students import C, F, H, make, one_by_one
from torch import nn

import rbm
from rbm.nn import packed_student
from rbm.nn.cpu_derivatives import PReLU
from rbm.nn.moe import MoEStudent
from rbm.nn.simmlp import SimMLPStudent
from rbm.nn.sparse_rows import Linear
from rbm.nn.students import MLPStudent

pytestmark = pytest.mark.native


def step(student):
    for parameter in student.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.Adam(student.parameters(), lr=0.1, fused=True).step()


def train_a_norm(student):
    student.norms[0].train()(torch.randn(50, H) * 3)
    student.norms[0].eval()


def move_a_memory(student):
    with torch.enable_grad():
        student.layers[0].train()(torch.randn(50, F) + 5)
    student.layers[0].eval()


def write_behind(student):
    """Change a weight without a new version; eval() of the layer invalidates the cache."""
    student.layers[1].weight.detach().numpy()[:] += 1
    student.layers[1].eval()


CHANGES = {
    "weight": lambda s: s.layers[0].weight.mul_(1.5),
    "bias": lambda s: s.layers[1].bias.add_(1),
    "data": lambda s: setattr(s.layers[0].weight, "data", torch.randn_like(s.layers[0].weight)),
    "parameter": lambda s: setattr(s.layers[1], "weight", nn.Parameter(torch.randn_like(s.layers[1].weight))),
    "attention": lambda s: s.layers[0].attention.add_(0.5),
    "scale": lambda s: s.layers[0].log_scale.add_(0.5),
    "memory": lambda s: s.layers[0].memory.normal_(),
    "memory that follows": move_a_memory,
    "norm": lambda s: s.norms[0].weight.mul_(-2),
    "eps": lambda s: setattr(s.norms[0], "eps", 10.0),
    "statistics": lambda s: s.norms[0].running_var.mul_(4),
    "statistics that follow": train_a_norm,
    "temperature": lambda s: setattr(s.layers[0], "gate_temperature", 0.05),
    "k": lambda s: setattr(s.layers[0], "top_k", 1),
    "a step": step,
    "state_dict": lambda s: s.load_state_dict(make().state_dict()),
    "behind": write_behind,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@torch.no_grad()
def test_notices(change, calls):
    student, x = make(), torch.randn(20, F)
    before = student(x)
    change(student)
    y = student(x)
    torch.testing.assert_close(y, one_by_one(student, x), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(y, before), "a change that changes nothing would test nothing"
    assert calls == [20, 20]


CHANGES_OF_SIMMLP = {
    "slope": lambda s: s.encoder.activation.weight.fill_(-2),
    "activation": lambda s: setattr(s.encoder, "activation", PReLU(init=3.0).eval()),
    "residual": lambda s: setattr(s.encoder, "residual", False),
    "last statistics": lambda s: s.encoder.norms[-1].running_mean.add_(3),
    "head": lambda s: s.head.weight.mul_(-1),
    "encoder": lambda s: setattr(s, "encoder", make(SimMLPStudent, num_layers=3).encoder),
    "a step": step,
}


@pytest.mark.parametrize("change", CHANGES_OF_SIMMLP.values(), ids=CHANGES_OF_SIMMLP.keys())
@torch.no_grad()
def test_notices_in_simmlp(change, calls):
    student, x = make(SimMLPStudent, num_layers=3), torch.randn(20, F)
    before = student(x)
    change(student)
    y = student(x)
    torch.testing.assert_close(y, one_by_one(student, x), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(y, before, rtol=1e-3, atol=1e-3), "a change that changes nothing would test nothing"
    assert calls == [20, 20]


@torch.no_grad()
def test_notices_another_layer():
    """The layer is replaced before the first call; ``eval()`` of any layer invalidates the cache."""
    student, x, layer, layers = make(), torch.randn(20, F), rbm.FusedRbMLayer(H, C).eval(), make().layers
    for change in (lambda: student.layers.__setitem__(1, layer), lambda: setattr(student, "layers", layers)):
        before = student(x)
        change()
        torch.testing.assert_close(student(x), one_by_one(student, x), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(student(x), before)


@torch.no_grad()
def test_notices_what_is_added():
    student, x = make(MLPStudent), torch.randn(20, F)
    assert student(x).shape == (20, C)
    student.norms.append(nn.Identity())
    student.layers.append(Linear(C, 7))
    assert student(x).shape == (20, 7)
    student = make(bias=False, input_attention=False)
    for name, shape in (("bias", (8, H)), ("attention", (8, F))):
        before = student(x)
        setattr(student.layers[0], name, nn.Parameter(torch.randn(shape)))
        torch.testing.assert_close(student(x), one_by_one(student, x), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(student(x), before)


@torch.no_grad()
def test_notices_other_gates():
    student, x = make(MoEStudent), torch.randn(20, F)
    before = student(x)
    student.layers[0].gates_over = "all"
    torch.testing.assert_close(student(x), one_by_one(student, x), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(student(x), before)


@torch.no_grad()
def test_notices_a_change_while_it_packs(monkeypatch):
    student, x = make(), torch.randn(20, F)
    pack = packed_student.pack_network

    def interrupted(layers):
        network = pack(layers)
        student.layers[1].weight.mul_(2.0)
        return network

    monkeypatch.setattr(packed_student, "pack_network", interrupted)
    student(x)
    monkeypatch.setattr(packed_student, "pack_network", pack)
    torch.testing.assert_close(student(x), one_by_one(student, x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_no_other_data_can_come_to_stand_at_the_address_of_the_packed():
    student, x, numbers = make(MLPStudent), torch.randn(20, F), np.ones((H, F), dtype=np.float32)
    student.layers[0].weight.data = torch.from_numpy(numbers)
    student(x)
    held = weakref.ref(numbers)
    del numbers
    student.layers[0].weight.data = torch.randn(H, F)
    assert held() is not None
    torch.testing.assert_close(student(x), one_by_one(student, x), rtol=1e-5, atol=1e-5)
    assert held() is None


@torch.no_grad()
@pytest.mark.parametrize("change", [MLPStudent.eval, MLPStudent.half], ids=["eval", "half"])
def test_a_new_mode_and_a_conversion_drop_the_copy(change):
    student, x, numbers = make(MLPStudent), torch.randn(20, F), np.ones((H, F), dtype=np.float32)
    student.layers[0].weight.data = torch.from_numpy(numbers)
    student(x)
    numbers += 1  # PyTorch does not see this
    held = weakref.ref(student._packed.network)
    change(student)
    assert held() is None
    student.float()
    torch.testing.assert_close(student(x), one_by_one(student, x), rtol=1e-5, atol=1e-5)
