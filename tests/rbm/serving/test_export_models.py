"""Export of arbitrary models with our layers, by rbm.export and by torch.onnx.export."""

import dataclasses
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import rbm
from rbm.serving.export import FORMATS, export, export_student
from rbm.serving.standard_ops import plain
from rbm_kernels import cosine_topk, expert_matmul, routed_matmul


class Tokens(nn.Module):
    """A model from token ids and their weights to two outputs, with a layer used at two places."""

    def __init__(self, activation="relu", top_k=1):
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.ffn = rbm.RbMFeedForward(6, 8, 4, top_k, activation=activation)
        self.again = self.ffn

    def forward(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embedding(ids) * weights[..., None]
        return self.again(self.ffn(h)).mean(1), h


def example(rows=5):
    return torch.randint(10, (rows, 7)), torch.rand(rows, 7)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "swiglu"])
def test_plain_models_answer_as_they_do_with_operators(activation):
    model, inputs = Tokens(activation, top_k=3).train(), example()
    twin = plain(model)
    assert model.training
    assert twin.ffn is twin.again
    assert not [module for module in twin.modules() if isinstance(module, rbm.nn.memory_router.MemoryRouter)]
    for got, expected in zip(twin(*inputs), model.eval()(*inputs), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    alone, x = rbm.RbMFeedForward(6, 8, 4, 2, bias=False).eval(), torch.randn(3, 6)
    torch.testing.assert_close(plain(alone)(x), alone(x), atol=1e-6, rtol=1e-5)


@pytest.fixture
def names(monkeypatch):
    """A list of the input and output names that files were written with."""
    named, kind = [], FORMATS["torch-export"]
    content = lambda program, *names: named.append(names) or kind.content(program)  # noqa: E731
    monkeypatch.setitem(FORMATS, "torch-export", dataclasses.replace(kind, content=content))
    return named


def test_two_inputs_and_outputs_from_an_example_of_one_row(tmp_path, names):
    model = Tokens().train()
    path = rbm.export(model, example(1), "torch-export", tmp_path / "model.pt2")
    assert model.training
    assert names == [(["ids", "weights"], ["output_0", "output_1"])]
    answer, inputs = FORMATS["torch-export"].open(path), example(9)
    for got, expected in zip(answer(*inputs), model.eval()(*inputs), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_a_layer_alone_with_fixed_shapes(tmp_path, names):
    layer, x = rbm.FusedRbMLayer(6, 3, 4, 2), torch.randn(4, 2, 6)
    path = export(layer, x, "torch-export", tmp_path / "a.pt2", dynamic_shapes=({},))
    assert names == [(["h"], ["output"])]
    torch.testing.assert_close(FORMATS["torch-export"].open(path)(x), layer.eval()(x))


def test_under_another_default_device(tmp_path):
    layer, student, x = rbm.FusedRbMLayer(6, 3, 4, 2).eval(), rbm.RbMStudent(6, 8, 3).eval(), torch.randn(4, 6)
    with torch.device("meta"):
        paths = (
            export(layer, x, "torch-export", tmp_path / "layer.pt2"),
            export_student(student, "torch-export", tmp_path / "student.pt2"),
        )
    for path, model in zip(paths, (layer, student), strict=True):
        torch.testing.assert_close(FORMATS["torch-export"].open(path)(x), model(x), atol=1e-5, rtol=0)


def test_rows_whose_squares_overflow_and_rows_of_zeros(tmp_path):
    layer, x = rbm.FusedRbMLayer(6, 3, 4, 2).eval(), torch.randn(9, 6)
    x = x * torch.tensor([1e30, 1e19, 1.0, 1e-20, 0.0] * 2)[:9, None]
    path = export(layer, x[:2], "torch-export", tmp_path / "a.pt2")
    torch.testing.assert_close(FORMATS["torch-export"].open(path)(x), layer(x))


def test_torch_onnx_export_writes_the_operators_in_standard_ones():
    """The exporter itself, for one of our layers. (tests/test_examples.py serves a file of rbm.export.)"""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    layer, x = rbm.RbMFeedForward(6, 8, 4, 1, activation="relu").eval(), torch.randn(3, 6)
    shapes = ({0: torch.export.Dim("batch")},)
    program = torch.onnx.export(layer, (x,), dynamo=True, dynamic_shapes=shapes, verbose=False, optimize=False)
    assert {node.domain for node in program.model.graph} <= {"", "pkg.onnxscript.torch_lib"}
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for rows in (1, 3, 30):
        x = torch.randn(rows, 6)
        (got,) = session.run(None, {"h": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(got), layer(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layer", [rbm.FusedRbMLayer(6, 4, 3, 2), rbm.RbMFeedForward(6, 8, 4, 1)])
@pytest.mark.filterwarnings("ignore")
def test_the_deprecated_onnx_exporter_is_refused(layer, tmp_path):
    pytest.importorskip("onnx")
    with pytest.raises(RuntimeError, match="cannot export operators of rbm, expected dynamo=True"):
        torch.onnx.export(nn.Sequential(layer).eval(), (torch.randn(3, 6),), tmp_path / "model.onnx", dynamo=False)


@pytest.mark.filterwarnings("ignore")
def test_half_precision_in_onnx(tmp_path):
    pytest.importorskip("onnxruntime")
    student = rbm.MLPStudent(8, 16, 3).half()
    assert rbm.export_student(student, "onnx", tmp_path / "half.onnx").is_file()
    with pytest.raises(ValueError, match=r"model is in torch\.bfloat16, expected float32, .*; export a copy in"):
        rbm.export_student(student.bfloat16(), "onnx", tmp_path / "bfloat16.onnx")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_stands_for_an_operator_answers_as_it_does(dtype, monkeypatch):
    """The functions that the public ones call while torch.onnx.export traces."""
    x, memory = torch.randn(20, 6, dtype=dtype), torch.randn(4, 6, dtype=dtype)
    weight, bias = torch.randn(4, 3, 6, dtype=dtype), torch.randn(4, 3, dtype=dtype)
    gates, experts, _ = cosine_topk(x, memory, 2, temperature=0.5)
    calls = (
        partial(cosine_topk, x, memory, 2, temperature=0.5),
        partial(expert_matmul, x, weight, bias, gates, experts),
        partial(expert_matmul, x, weight, None, gates, experts),
        partial(routed_matmul, x, memory, weight, bias, 2, temperature=0.5),
    )
    expected = [call() for call in calls]
    monkeypatch.setattr("rbm_kernels._onnx.is_exporting", lambda: True)
    with RefuseOperators():
        got = [call() for call in calls]
    torch.testing.assert_close(got, expected)
    with pytest.raises(ValueError, match=r"rbm::expert_matmul: weight has shape \[4, 3, 6\], expected"):
        expert_matmul(x[:, :5], weight, bias, gates, experts)


class RefuseOperators(TorchDispatchMode):
    """A mode in which our operators raise an error."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.namespace != "rbm", f"{func} was called"
        return func(*args, **kwargs or {})


def test_pytorchs_table_of_decompositions_knows_none_of_ours():
    """If the environment variable CI is set, torch.compile refuses operators that are in its table."""
    assert not [op for op in torch._decomp.decomposition_table if getattr(op, "namespace", "") == "rbm"]


def test_mistakes_are_told_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr("rbm.serving.export.plain", None)
    model, path = Tokens(), tmp_path / "model.pt2"
    for arguments, message in {
        (example(), "jit", path): "format is 'jit', expected one of",
        (example(), "torch-export", tmp_path / "model.so"): "ends in '.so', expected one of .pt2",
        ((torch.ones(2, 7), 3.0), "torch-export", path): "example holds a float, expected tensors",
        ((torch.ones(2, 7), torch.ones(3, 7)), "torch-export", path): r"example has tensors of shapes \[\[2, 7\], \[3",
        (torch.tensor(1.0), "torch-export", path): "expected one batch of at least one row",
    }.items():
        with pytest.raises(ValueError, match=message):
            export(model, *arguments)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        export(model, example(), "torch-export", tmp_path / "nowhere" / "model.pt2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixtures_in_half_precision_are_refused(tmp_path, dtype):
    """Rounded otherwise, some rows would go to other experts."""
    student = rbm.RbMStudent(6, 8, 3).to(dtype)
    with pytest.raises(ValueError, match=rf"has a \w+ in {dtype}, expected float32 or float64: .*\(model.float\(\)\)"):
        export_student(student, path=tmp_path / "student.pt2")
    with pytest.raises(ValueError, match="expected float32 or float64"):
        export(torch.nn.Sequential(student), torch.zeros(2, 6, dtype=dtype), "torch-export", tmp_path / "model.pt2")
    assert not any(tmp_path.iterdir())


class Sum(nn.Module):
    """A model of several tensors, with -inf in its second column, as masked logits have."""

    def __init__(self):
        super().__init__()
        self.layer = rbm.FusedRbMLayer(6, 3, 4, 2)

    def forward(self, *xs):
        return self.layer(sum(xs)).masked_fill(torch.arange(3) == 1, -torch.inf)


@pytest.mark.parametrize("count", [1, 3])
def test_a_forward_of_any_number_of_arguments_and_logits_of_minus_infinity(tmp_path, names, count):
    model, xs = Sum().eval(), tuple(torch.randn(count, 5, 6))
    path = rbm.export(model, xs, "torch-export", tmp_path / "model.pt2")
    assert names[0][0] == (["xs"] if count == 1 else ["input_0", "input_1", "input_2"])
    torch.testing.assert_close(FORMATS["torch-export"].open(path)(*xs), model(*xs), atol=1e-5, rtol=0)


def test_an_argument_that_has_the_name_of_the_output(tmp_path, names):
    class Head(nn.Module):
        def forward(self, output):
            return 2 * output

    rbm.export(Head(), torch.randn(2, 3), "torch-export", tmp_path / "model.pt2")
    assert names == [(["input_0"], ["output"])]


def test_a_model_that_returns_something_else(tmp_path):
    class Named(nn.Module):
        def forward(self, x):
            return {"y": x}

    with pytest.raises(ValueError, match="model returns a dict, expected a tensor"):
        export(Named(), torch.randn(2, 3), "torch-export", tmp_path / "a.pt2")
