"""Students that run as one operator: same outputs as layer by layer, and never with outdated weights."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from packed_students import C, F, H, make, one_by_one
from torch import nn
from torch.autograd import forward_ad

import rbm
from rbm.nn import packed_student
from rbm.nn.cpu_derivatives import PReLU
from rbm.nn.int8 import quantized
from rbm.nn.moe import MoEStudent
from rbm.nn.reference import ReferenceRbMLayer
from rbm.nn.simmlp import NormalizedMLP, SimMLPStudent
from rbm.nn.students import BatchNorm, MLPStudent, RbMStudent

pytestmark = pytest.mark.native
STUDENTS = {
    "rbm": RbMStudent,
    "mlp": MLPStudent,
    "moe": MoEStudent,
    "moe, gates over all": lambda *sizes, **more: MoEStudent(*sizes, gates_over="all", **more),
    "rbm, int8": lambda *sizes, **more: quantized(RbMStudent(*sizes, **more)),
    "simmlp": SimMLPStudent,
    "simmlp, int8": lambda *sizes, **more: quantized(SimMLPStudent(*sizes, **more)),
    "mlp, int8": lambda *sizes, **more: quantized(MLPStudent(*sizes, **more)),
}


@pytest.mark.parametrize("kind", STUDENTS.values(), ids=STUDENTS.keys())
@pytest.mark.parametrize("norm", ["none", "batch", "layer"])
def test_answers(kind, norm, calls):
    student, x = make(kind, norm, num_layers=3), torch.randn(40, F)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = student(x)
            torch.testing.assert_close(y, one_by_one(student, x), rtol=1e-5, atol=1e-5)
            assert torch.equal(torch.cat([student(row[None]) for row in x]), y)
    assert calls == [40, *[1] * 40] * 2


def test_bits_are_those_of_the_layers():
    student, x = make(norm="none"), torch.randn(40, F)
    with torch.inference_mode():
        assert torch.equal(student(x), one_by_one(student, x))


class Halved(rbm.FusedRbMLayer):
    def forward(self, h, *, return_routing=False):
        return super().forward(h) / 2


class Halving:
    """Halves the output of a norm that is derived from it."""

    def forward(self, x):
        return super().forward(x) / 2


class Marked(torch.Tensor):
    """A subclass of tensors."""


def changed(change):
    """The output after ``change(student)``."""
    return lambda student, x: (change(student), student(x))[1]


def with_layer(layer):
    return changed(lambda student: student.layers.__setitem__(1, layer.eval()))


def with_norm(norm):
    return changed(lambda student: student.norms.__setitem__(0, norm.eval()))


def derived(norm, *sizes):
    return with_norm(type("Derived", (Halving, norm), {})(*sizes))


def with_hook(register):
    def put(student, x):
        hook = register(student)(lambda *_: None)
        try:
            return student(x)
        finally:
            hook.remove()

    return put


def counting(student, x):
    rbm.track_usage(student)
    y = student(x)
    assert student.layers[0].usage.sum() == len(x) * student.layers[0].top_k
    return y


def in_forward_mode(student, x):
    with forward_ad.dual_level():
        y = student(forward_ad.make_dual(x, torch.ones_like(x)))
        assert forward_ad.unpack_dual(y).tangent.abs().sum() > 0
        return y


def in_bfloat16(student, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return student(x)


LAYERS_ANSWER = {
    "hook": with_hook(lambda student: student.layers[1].register_forward_hook),
    "hook before": with_hook(lambda student: student.norms[0].register_forward_pre_hook),
    "hook on all": with_hook(lambda _: nn.modules.module.register_module_forward_hook),
    "hook before all": with_hook(lambda _: nn.modules.module.register_module_forward_pre_hook),
    "another layer": with_layer(ReferenceRbMLayer(H, C)),
    "a derived layer": with_layer(Halved(H, C)),
    "a norm without parameters": with_norm(nn.LayerNorm(H, elementwise_affine=False)),
    "a batch norm without parameters": with_norm(BatchNorm(H, affine=False)),
    "a batch norm without statistics": with_norm(BatchNorm(H, track_running_stats=False)),
    "a norm without a bias": with_norm(nn.LayerNorm(H, bias=False)),
    "a derived LayerNorm": derived(nn.LayerNorm, H),
    "a derived BatchNorm": derived(BatchNorm, H),
    "a derived Identity": derived(nn.Identity),
    "a norm more": changed(lambda student: student.norms.append(nn.Identity().eval())),
    "another forward": changed(lambda student: setattr(student.layers[1], "forward", lambda h: h[:, :C])),
    "another forward of a norm": changed(lambda student: setattr(student.norms[0], "forward", torch.zeros_like)),
    "usage": counting,
    "pretraining": changed(lambda student: setattr(student, "pretraining", True)),
    "trace": lambda student, x: student(x, return_trace=True)[0],
    "sparse": lambda student, x: student(x.to_sparse_csr()),
    "a subclass": lambda student, x: student(x.as_subclass(Marked)),
    "float64": lambda student, x: student.double()(x.double()),
    "a memory in float64": changed(lambda student: setattr(student.layers[0], "memory", torch.randn(8, F).double())),
    "autocast": in_bfloat16,
    "forward mode": in_forward_mode,
    "transformed": lambda student, x: torch.func.vmap(student)(x[:, None])[:, 0],
    "training": lambda student, x: student.train()(x),
    "a layer that trains": changed(lambda student: student.layers[1].train()),
    "a norm that trains": changed(lambda student: student.norms[0].train()),
    "shared memory": lambda student, x: student.share_memory()(x),
}


def check_that_layers_answer(student, ask, asked, calls):
    x = torch.randn(9, F)
    if asked:
        student(x)
        assert calls == [9]
        calls.clear()
    assert ask(student, x).shape == (9, C)
    assert calls == []


@pytest.mark.parametrize("ask", LAYERS_ANSWER.values(), ids=LAYERS_ANSWER.keys())
@pytest.mark.parametrize("asked", [False, True], ids=["first", "later"])
@torch.no_grad()
def test_the_layers_answer(ask, asked, calls):
    check_that_layers_answer(make(), ask, asked, calls)


class Doubled(NormalizedMLP):
    def forward(self, x):
        return super().forward(x) * 2


LAYERS_OF_SIMMLP_ANSWER = {
    "hook": with_hook(lambda student: student.encoder.activation.register_forward_hook),
    "hook on the encoder": with_hook(lambda student: student.encoder.register_forward_pre_hook),
    "another activation": changed(lambda student: setattr(student.encoder, "activation", nn.ReLU().eval())),
    "a slope per channel": changed(lambda student: setattr(student.encoder, "activation", PReLU(H).eval())),
    "a derived encoder": changed(lambda student: setattr(student, "encoder", Doubled([(F, H)]).eval())),
    "another forward": changed(lambda student: setattr(student.encoder, "forward", lambda x: x[:, :H])),
    "a head of another class": changed(lambda student: setattr(student, "head", nn.Linear(H, C).eval())),
    "a norm more": changed(lambda student: student.encoder.norms.append(nn.Identity().eval())),
    "an encoder that trains": changed(lambda student: student.encoder.train()),
    "training": lambda student, x: student.train()(x),
    "sparse": lambda student, x: student(x.to_sparse_csr()),
}


@pytest.mark.parametrize("ask", LAYERS_OF_SIMMLP_ANSWER.values(), ids=LAYERS_OF_SIMMLP_ANSWER.keys())
@pytest.mark.parametrize("asked", [False, True], ids=["first", "later"])
@torch.no_grad()
def test_the_layers_of_simmlp_answer(ask, asked, calls):
    check_that_layers_answer(make(SimMLPStudent, num_layers=3), ask, asked, calls)


def test_with_gradients_the_layers_answer(calls):
    student, x = make(), torch.randn(9, F)
    student(x).sum().backward()
    assert calls == []
    assert student.layers[0].weight.grad.abs().sum() > 0


@torch.no_grad()
def test_rows_that_do_not_fit():
    """The layers answer them, so errors are theirs, also after a call of the operator."""
    student = make()
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"rows of x hold {F + 1} numbers .*, expected {F}: {F} features"):
            student(torch.randn(9, F + 1))
        with pytest.raises(TypeError, match=r"input has dtype torch\.float16, expected torch\.float32"):
            student(torch.randn(9, F).half())
        with pytest.raises(ValueError, match="memory is on cpu and x on meta"):
            student(torch.randn(9, F, device="meta"))
        with pytest.raises(TypeError, match="features are a nested tensor, expected a dense one"):
            student(torch.nested.nested_tensor([torch.randn(F), torch.randn(F)]))
        with pytest.raises(ValueError, match=rf"rows of x hold 0 numbers \(shape \[\]\), expected {F}"):
            student(torch.tensor(1.0))
        student(torch.randn(9, F))
    assert make(norm="none")(torch.randn(2, F, F)).shape == (2, F, C)
    with pytest.raises(TypeError, match=r"input has dtype torch\.float32, expected torch\.bfloat16"):
        make().bfloat16()(torch.randn(9, F))
    with pytest.raises(ValueError, match="memory is on meta"):
        make().to("meta")(torch.randn(9, F))


@pytest.mark.parametrize("logarithm", [-89.0, -200.0, float("nan")])
def test_a_learned_temperature_that_left_its_range(logarithm, calls):
    """Training with too high a learning rate ends so; the layers answer as they do with gradients."""
    student, x = make(MoEStudent), torch.randn(20, F)
    with torch.no_grad():
        student.layers[0].log_temperature.fill_(logarithm)
        y = student(x)
    torch.testing.assert_close(y, student(x).detach(), equal_nan=True)
    assert calls == []


@torch.no_grad()
def test_packs_once(monkeypatch):
    packed = []
    pack = packed_student.pack_network
    monkeypatch.setattr(packed_student, "pack_network", lambda layers: packed.append(1) or pack(layers))
    student, x = make(), torch.randn(3, F)
    for _ in range(3):
        student(x)
    assert packed == [1]


@torch.no_grad()
def test_copies_start_anew_and_nothing_is_saved():
    student, x, sizes = make(), torch.randn(20, F), []
    for _ in range(2):
        file = io.BytesIO()
        torch.save(student, file)
        sizes.append((len(file.getvalue()), [*student.state_dict()]))
        before = student(x)
    assert sizes[0] == sizes[1]
    for copied in (copy.deepcopy(student), pickle.loads(pickle.dumps(student))):
        while copied.layers[0].weight._version < student.layers[0].weight._version:
            copied.layers[0].weight.mul_(1.0)
        copied.layers[0].weight.mul_(2.0)
        torch.testing.assert_close(copied(x), one_by_one(copied, x))
        assert not torch.allclose(copied(x), before)


@torch.no_grad()
def test_compiled_and_exported_programs_hold_the_layers():
    student, x = make(), torch.randn(20, F)
    y = student(x)
    compiled = torch.compile(student, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), y, rtol=1e-5, atol=1e-5)
    program = torch.export.export(student, (x,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    called = {node.target for node in program.graph.nodes}
    assert torch.ops.rbm.routed_matmul.default in called
    assert torch.ops.rbm.packed_network.default not in called
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        traced = torch.jit.trace(student, x)
    assert "packed" not in str(traced.inlined_graph)
