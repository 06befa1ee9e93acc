"""Exported students: standard operators only, and the same outputs."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rbm_process import RbmProcess

import rbm
from rbm.config import Config
from rbm.config.presets import preset_config
from rbm.datasets import unseen_fraction
from rbm.distillation.registry import METHODS
from rbm.nn.moe import MoEStudent
from rbm.serving.export import FORMATS, export_student, trace
from rbm.serving.standard_ops import plain
from rbm.training.run_folder import RunFolder, SavedStudent, save_students

SHORT = {"max_epochs": 3, "min_epochs": 0}
QUICK = dict.fromkeys(
    ("teacher", "mlp", "glnn", "krd", "nosmog", "cohop", "hgmd", "tined", "tined_plus", "sign", "trees"), SHORT
)
QUICK |= {name: {**SHORT, "pretrain_epochs": 1} for name in ("rbm", "moe")}
QUICK |= {"simmlp": {**SHORT, "hidden_channels": 16, "head_epochs": 3}}
QUICK |= {"vqgraph": {**SHORT, "tokenizer": {**SHORT, "codebook_size": 20}}}
QUICK |= {"encoding": {"deepwalk": False}, "ensemble": {"members": 2}}
BATCHES = (1, 2, 3, 64, 1001)


def need(name: str) -> None:
    for package in FORMATS[name].needs:
        pytest.importorskip(package)


def distilled(dataset: str, root, folder, **changes):
    config = preset_config("clean", dataset).updated({**QUICK, **changes})
    data = rbm.load_dataset(dataset, root)
    return rbm.distill(
        data,
        config=config,
        methods=["rbm"],
        folder=folder,
        unseen_fraction=unseen_fraction(dataset),
        measure_latency=False,
    )


def assert_equal_answers(student, answer, rows: torch.Tensor) -> None:
    rows = torch.cat([rows, torch.zeros(1, rows.shape[1])])  # an empty row has equal cosines with all experts
    with torch.inference_mode():
        for batch in (*BATCHES, len(rows)):
            torch.testing.assert_close(answer(rows[-batch:]), student(rows[-batch:]), atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A run on the embedded graph, and rows for its student."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    result = distilled("digits", None, folder, rbm={**QUICK["rbm"], "norm": "batch", "hidden_channels": 32})
    return folder, result.student_inputs()


@pytest.fixture(scope="module")
def cora(data_root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "cora"
    return folder, distilled("cora", data_root, folder).split.graph.x


@pytest.mark.parametrize("method", METHODS)
def test_the_student_of_every_method_is_loaded_and_traced(small_graph, tmp_path, method):
    config = Config().updated({**QUICK, "cohop": {**SHORT, "num_layers": 2, "rounds": 2}})
    result = rbm.distill(small_graph, config=config, methods=[method], folder=tmp_path / "run", measure_latency=False)
    student, rows = rbm.load(tmp_path / "run"), result.student_inputs()
    assert not student.training
    assert torch.equal(student(rows), result.student(rows))
    program = trace(student)
    assert_equal_answers(student, program.module(), rows)
    operators = {str(node.target).split(".")[0] for node in program.graph.nodes if node.op == "call_function"}
    assert "rbm" not in operators


@pytest.mark.parametrize(
    "student",
    [
        rbm.RbMStudent(12, 8, 3, num_layers=3, norm="layer", gate_temperature=0.3, input_attention=False),
        rbm.RbMStudent(12, 8, 3, num_experts=2, top_k=2, bias=False, norm="batch"),
        rbm.RbMStudent(12, 8, 3, num_experts=5, top_k=1).double(),
        MoEStudent(12, 8, 3, gates_over="all", num_experts=5, top_k=2),
        torch.nn.Sequential(torch.nn.Linear(12, 6), torch.nn.ReLU(), rbm.FusedRbMLayer(6, 3)),
    ],
    ids=["three layers", "all experts", "float64", "gates over all", "layer in another model"],
)
def test_plain_answers_are_those_of_the_operators(student):
    student.eval()
    rows = torch.randn(40, 12, dtype=next(student.parameters()).dtype)
    rows[7] = 0
    kept = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    module = plain(student)
    with torch.no_grad():
        torch.testing.assert_close(module(rows), student(rows), atol=1e-6, rtol=1e-5)
    assert not [p for p in module.parameters() if p.requires_grad]
    assert not [m for m in module.modules() if isinstance(m, rbm.FusedRbMLayer)]
    assert all(torch.equal(tensor, kept[name]) for name, tensor in student.state_dict().items())


@pytest.mark.parametrize("name", ["torch-export", "onnx"])  # AOTInductor takes a minute; docs/serving.md tests it
def test_digits(digits, tmp_path, name):
    need(name)
    folder, rows = digits
    path = export_student(folder, name, tmp_path / f"it{FORMATS[name].file[-5:]}")
    assert [path] == list(tmp_path.iterdir())
    assert_equal_answers(rbm.load(folder), FORMATS[name].open(path), rows)


@pytest.mark.datasets
@pytest.mark.parametrize("name", ["torch-export", "onnx", pytest.param("aoti", marks=pytest.mark.slow)])
def test_cora(cora, name):
    need(name)
    folder, rows = cora
    if name == "aoti":  # with rbm.export, which takes any model; docs/serving.md compiles with export_student
        path = rbm.export(rbm.load(folder), rows[:3], name, folder / FORMATS[name].file)
    else:
        path = export_student(folder, name)
    assert path == folder / FORMATS[name].file
    assert_equal_answers(rbm.load(folder), FORMATS[name].open(path), rows)


def test_a_file_opens_where_this_package_is_not(digits, tmp_path):
    folder, rows = digits
    path = export_student(folder, "torch-export", tmp_path / "student.pt2")
    np.save(tmp_path / "x.npy", rows[:9].numpy())
    script = (
        "import sys, numpy, torch\n"
        "sys.modules['rbm'] = sys.modules['rbm_kernels'] = None\n"
        "logits = torch.export.load('student.pt2').module()(torch.from_numpy(numpy.load('x.npy')))\n"
        "numpy.save('logits.npy', logits.numpy())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert path.is_file()
    expected = rbm.load(folder)(rows[:9]).detach().numpy()
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), expected, atol=1e-5)


def test_onnx_has_standard_operators_alone(digits, tmp_path):
    need("onnx")
    import onnx

    model = onnx.load(export_student(digits[0], "onnx", tmp_path / "student.onnx"))
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
    assert not model.functions
    assert [known.version for known in model.opset_import] == [18]
    (x,), (logits,) = model.graph.input, model.graph.output
    assert (x.name, logits.name) == ("x", "logits")
    for value, width in ((x, digits[1].shape[1]), (logits, 10)):
        batch, columns = value.type.tensor_type.shape.dim
        assert batch.dim_param
        assert columns.dim_value == width


def test_a_file_that_answers_otherwise_is_not_kept(digits, tmp_path, monkeypatch):
    path = tmp_path / "student.pt2"
    path.write_text("the one before")

    def wrong(student):
        module = plain(student)
        module.layers[0].experts.bias += 0.1
        return module

    monkeypatch.setattr("rbm.serving.export.plain", wrong)
    with pytest.raises(ValueError, match=r"answers \d+ rows with numbers that are off by .* it was not kept"):
        export_student(digits[0], "torch-export", path)
    assert path.read_text() == "the one before"
    assert [path] == list(tmp_path.iterdir())


def test_mistakes_are_told_before_any_work(digits, tmp_path, monkeypatch):
    folder, _ = digits
    monkeypatch.setattr("rbm.serving.export.trace", None)
    for arguments, message in {
        (folder, "jit"): "format is 'jit', expected one of torch-export, aoti, onnx",
        (folder, "aoti", tmp_path / "x.so"): r"x\.so ends in '\.so', expected one of \.pt2",
        (rbm.MLPStudent(3, 4, 2), "torch-export"): "path is None, expected a file",
    }.items():
        with pytest.raises(ValueError, match=message):
            export_student(*arguments)
    with pytest.raises(FileNotFoundError, match=r"folder .*nowhere does not exist"):
        export_student(folder, "torch-export", tmp_path / "nowhere" / "x.pt2")
    with pytest.raises(FileNotFoundError, match=r"holds no student\.json"):
        export_student(tmp_path, "torch-export")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    monkeypatch.setitem(sys.modules, "onnx", sys)
    with pytest.raises(ModuleNotFoundError, match=r"needs onnxscript, .*: pip install 'rbm-kernels\[export\]'"):
        export_student(folder, "onnx", tmp_path / "x.onnx")


def test_a_new_run_takes_the_old_ones_files_away(tmp_path):
    run = RunFolder(tmp_path / "run", Config())
    student = rbm.MLPStudent(3, 4, 2)
    run.save_phase("mlp", student, {})
    save_students(run.path, "mlp", {"mlp": SavedStudent(student, None)})
    export_student(run.path, "torch-export")
    (run.path / "notes.txt").write_text("mine")
    RunFolder(run.path, Config(), overwrite=True)
    assert sorted(path.name for path in run.path.glob("[!.]*")) == ["config.yaml", "notes.txt", "run.json"]


def test_command(digits, command, tmp_path):
    status, out, _ = command("export", digits[0], "--out", tmp_path / "s.pt2")  # torch-export is the default
    assert status == 0
    assert "s.pt2" in out.replace("\n", "")
    assert (tmp_path / "s.pt2").is_file()


@pytest.mark.parametrize("name", ["torch-export", "onnx"])
def test_a_full_disk_is_told(digits, tmp_path, name):
    """PyTorch's own writer would abort the process."""
    need(name)
    out = tmp_path / "out" / Path(FORMATS[name].file).name
    out.parent.mkdir()
    command = ("export", digits[0], "--format", name, "--out", out)
    run = RbmProcess(*command, cwd=tmp_path, largest_file=10_000)
    _, err = run.finish()
    assert run.returncode == 2, err
    told = err.strip().splitlines()[-1]
    assert re.fullmatch(
        rf"Error: {out} could not be written: .*; [\d,]+ bytes are to be written; .* are free in .*", told
    )
    assert list(out.parent.iterdir()) == []
