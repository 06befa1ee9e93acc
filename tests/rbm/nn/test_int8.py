"""Students with 8-bit weights: close to float32, a quarter of the bytes, for every way of serving."""

import copy
import pickle

import numpy as np
import pytest
import torch
from saved_runs import save_run

import rbm
from rbm.nn.int8 import Int8Layer, quantized
from rbm.nn.moe import MoEStudent
from rbm.nn.parameters import dtype_of
from rbm.nn.sparse_rows import SparseRows
from rbm.serving.export import export_student
from rbm.serving.prediction import Predictor, predict_file
from rbm.serving.server.student import open_student

F, C = 200, 7


@pytest.fixture(scope="module")
def student():
    return rbm.RbMStudent(F, 64, C, norm="batch", num_experts=6, top_k=2).eval()


def bytes_of(module) -> int:
    return sum(tensor.nbytes for tensor in module.state_dict().values())


@torch.inference_mode()
def assert_near(got, expected, tolerance=0.03):
    """Relative to the largest logit, except for rows that rounding sends to another expert of a later layer."""
    off = (got - expected).abs().amax(1)
    assert (off <= tolerance * expected.abs().max()).float().mean() > 0.95


@pytest.mark.parametrize("kind", [rbm.RbMStudent, rbm.MLPStudent])
@pytest.mark.parametrize("norm", ["none", "batch", "layer"])
def test_answers_are_near_and_bytes_a_quarter(kind, norm):
    student = kind(F, 128, C, norm=norm).eval()
    x, small = torch.randn(300, F), quantized(student)
    with torch.inference_mode():
        assert_near(small(x), student(x))
        assert torch.equal(torch.cat([small(row[None]) for row in x[:20]]), small(x)[:20])
    assert bytes_of(small) < 0.3 * bytes_of(student)
    assert not any(isinstance(layer, rbm.FusedRbMLayer | torch.nn.Linear) for layer in small.modules())
    assert dtype_of(small) == torch.float32


def test_gates_have_the_temperature_of_the_layer():
    """With this one, the closest expert has nearly all of the row. In a student, too, they run as one operator."""
    x = torch.randn(40, F)
    student = rbm.RbMStudent(F, 64, C, norm="layer", num_experts=6, top_k=3, gate_temperature=0.01).eval()
    small = quantized(student)
    assert not any(tensor.requires_grad for tensor in (*small.parameters(), *small.buffers()))
    with torch.inference_mode():
        y, routing = small.layers[0](x, return_routing=True)
        expected = student.layers[0].route(x)
        torch.testing.assert_close(routing.gates, expected.gates)
        assert_near(y, student.layers[0](x))
        assert_near(small.layers[0](x), student.layers[0](x))
        torch.testing.assert_close(small(x), small(x, return_trace=True)[0])


def test_the_student_stays_as_it_is(student):
    before = copy.deepcopy(student.state_dict())
    quantized(student)
    assert all(torch.equal(tensor, before[name]) for name, tensor in student.state_dict().items())
    assert isinstance(student.layers[0], rbm.FusedRbMLayer)


def test_rows_of_every_kind(student, monkeypatch):
    """Sparse rows are converted to dense in chunks; a single row keeps its shape."""
    x, small = torch.randn(50, F) * (torch.rand(50, F) < 0.1), quantized(student)
    monkeypatch.setattr("rbm.nn.int8._DENSE_NUMBERS", 7 * F)
    with torch.inference_mode():
        expected = small(x)
        for rows in (x.to_sparse_csr(), SparseRows(x[:, :150].to_sparse_csr(), x[:, 150:])):
            assert torch.equal(small(rows), expected)
            logits, trace = small(rows, return_trace=True)
            assert torch.equal(logits, expected)
            assert torch.equal(trace.routings[0].experts, student(x, return_trace=True)[1].routings[0].experts)
        assert torch.equal(small.layers[0](x[3]), small.layers[0](x)[3])
        assert small.layers[0](x.view(5, 10, F)).shape == (5, 10, 64)
        with pytest.raises(ValueError, match="rows of x hold 3 numbers"):
            small(x[:, :3])
        with pytest.raises(TypeError, match=r"rows of x have dtype torch\.float64, expected torch\.float32"):
            small(x.double())
        with pytest.raises(TypeError, match="features are a nested tensor, expected a dense one"):
            small.layers[0](torch.nested.nested_tensor([x[0], x[1]]))
        with pytest.raises(ValueError, match=rf"input has shape \[\], expected \[\.\.\., {F}\]"):
            small.layers[0](torch.tensor(1.0))


def test_it_can_be_copied_and_pickled(student):
    x, small = torch.randn(5, F), quantized(student)
    with torch.inference_mode():
        for other in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
            assert torch.equal(other(x), small(x))
    assert "int8" in repr(small)


@pytest.mark.parametrize("convert", [torch.nn.Module.half, torch.nn.Module.double, lambda m: m.to(torch.bfloat16)])
def test_a_conversion_leaves_the_memory_as_it_is(convert):
    """A memory in float16 was refused at the next call, and had lost its precision for good."""
    small, x = quantized(rbm.RbMStudent(F, 16, C, num_experts=6, top_k=2)), torch.randn(5, F)
    with torch.inference_mode():
        expected = small(x)
        assert torch.equal(convert(small)(x), expected)
    assert small.layers[0].to("meta").memory.is_meta


def test_what_cannot_be_quantised():
    with pytest.raises(ValueError, match=r"quantize is 'int8', but a MoEStudent has no layer that 8 bits serve"):
        quantized(MoEStudent(4, 5, 3))
    with pytest.raises(TypeError, match="weight has dtype float64, expected float32"):
        quantized(rbm.MLPStudent(4, 5, 3).double())
    broken = rbm.MLPStudent(4, 5, 3)
    broken.layers[1].bias.data[2] = float("nan")
    with pytest.raises(ValueError, match="bias holds numbers that are not finite"):
        quantized(broken)


def test_a_shared_layer_is_quantised_once():
    """Two copies took twice the memory, and were two modules where the model has one."""
    shared, block = torch.nn.Linear(8, 8), torch.nn.Sequential(rbm.FusedRbMLayer(8, 8))
    small = quantized(torch.nn.Sequential(shared, block, shared, block))
    assert (small[0] is small[2], small[1] is small[3]) == (True, True)
    assert sum(isinstance(layer, Int8Layer) for layer in small.modules()) == 2


class Doubled(torch.nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("other", [Doubled(8, 8), torch.nn.MultiheadAttention(8, 2)], ids=lambda other: type(other))
def test_linear_layers_that_are_not_called_as_such_stay_float32(other):
    class Student(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.other = torch.nn.Linear(4, 8), other

        def forward(self, x):
            h = self.first(x)
            return self.other(h, h, h)[0] if isinstance(other, torch.nn.MultiheadAttention) else self.other(h)

    student, x = Student().eval(), torch.randn(6, 4)
    torch.testing.assert_close(quantized(student)(x), student(x), rtol=0.05, atol=0.05)


def _hook(layer):
    layer.register_forward_hook(lambda module, inputs, output: 3 * output)


def _pre_hook(layer):
    layer.register_forward_pre_hook(lambda module, inputs: (3 * inputs[0],))


def _own_forward(layer):
    layer.forward = lambda rows: 3 * torch.nn.functional.linear(rows, layer.weight, layer.bias)


@pytest.mark.parametrize("change", [_hook, _pre_hook, _own_forward])
def test_a_linear_layer_with_hooks_or_a_forward_of_its_own_stays_float32(change):
    student, x = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 8)).eval(), torch.randn(6, 4)
    change(student[1])
    small = quantized(student)
    assert isinstance(small[0], Int8Layer)
    torch.testing.assert_close(small(x), student(x), rtol=0.05, atol=0.1)


def test_it_is_saved_nowhere(student, tmp_path):
    pytest.importorskip("huggingface_hub")
    with pytest.raises(TypeError, match="was made from modules, or quantised"):
        quantized(student).save_pretrained(tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_every_way_to_serve_a_run(tmp_path, command):
    run = save_run(tmp_path / "run", F)
    small, x = rbm.load(run, quantize="int8"), torch.randn(40, F)
    assert isinstance(small.layers[0], Int8Layer)
    with torch.inference_mode():
        expected = small(x).softmax(-1)
        assert not torch.equal(expected, rbm.load(run)(x).softmax(-1))
    np.save(tmp_path / "x.npy", x.numpy())
    predict_file(run, tmp_path / "x.npy", tmp_path / "y.npy", quantize="int8")
    torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / "y.npy")), expected, rtol=0, atol=1e-6)
    for served in (open_student(run, quantize="int8"), open_student(rbm.load(run), quantize="int8")):
        torch.testing.assert_close(served.probabilities(x.double()), expected, rtol=0, atol=1e-6)
    assert isinstance(Predictor(run, quantize="int8").student.layers[1], Int8Layer)
    status, out, _ = command("export", run, "--format", "torch-export", "--quantize", "int8")
    assert status == 0
    assert "student-int8.pt2" in out.replace("\n", "")
    program = torch.export.load(run / "student-int8.pt2").module()
    assert_near(program(x).softmax(-1), expected, tolerance=1e-3)
    mlp = rbm.MLPStudent(1000, 256, C)
    path = export_student(mlp, "torch-export", tmp_path / "mlp.pt2", quantize="int8")
    assert path.stat().st_size < 0.35 * bytes_of(mlp)


@pytest.mark.parametrize("arguments", [("predict", "{run}", "x.npy"), ("export", "{run}", "--format", "onnx")])
def test_another_kind_is_refused(tmp_path, command, arguments):
    save_run(tmp_path / "run", 4)
    np.save(tmp_path / "x.npy", np.zeros((2, 4), np.float32))
    here = {"{run}": tmp_path / "run", "x.npy": tmp_path / "x.npy"}
    status, _, err = command(*(here.get(part, part) for part in arguments), "--quantize", "int4")
    assert status != 0
    assert "quantize is 'int4', expected int8; leave it out for float32" in err
    with pytest.raises(ValueError, match="quantize is 'int4', expected int8"):
        rbm.load(tmp_path / "run", quantize="int4")


@pytest.mark.parametrize(
    "layer", [rbm.FusedRbMLayer(16, 8, num_experts=4, top_k=2), torch.nn.Linear(16, 8)], ids=["rbm", "linear"]
)
def test_a_layer_alone(layer):
    """Regression test: it was refused with the words that it has no such layer, by its own name."""
    alone, within, x = quantized(layer), quantized(torch.nn.Sequential(layer)), torch.randn(5, 16)
    assert isinstance(alone, Int8Layer)
    assert not alone.training
    assert torch.equal(alone(x), within(x))
    assert not isinstance(layer, Int8Layer)
