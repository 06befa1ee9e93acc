"""The run folder keeps all students; loading, prediction, export and latency can select each by its method."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import rbm
from rbm.config import Config
from rbm.distillation.registry import METHODS
from rbm.nn.saved_student import read_description
from rbm.training.run_folder import RunFolder, load_encodings

RUNS = Path(__file__).parent.parent / "runs_of_0_1_0"
FEW = {"max_epochs": 3}
CONFIG = Config().updated(
    {
        **dict.fromkeys(
            ("teacher", "mlp", "rbm", "glnn", "nosmog", "cohop", "moe", "krd", "hgmd", "sign", "tined"), FEW
        ),
        "trees": {**FEW, "leaves": 4},
        "encoding": {"walk_length": 5, "walks_per_node": 1, "embedding_dim": 3},
        "nosmog": {**FEW, "encoding": {"walk_length": 5, "walks_per_node": 1, "embedding_dim": 2}},
        "tined_plus": {**FEW, "encoding": {"walk_length": 5, "walks_per_node": 1, "embedding_dim": 2}},
        "ensemble": {"members": 2},
        "vqgraph": {**FEW, "tokenizer": {**FEW, "codebook_size": 20}},
        "simmlp": {**FEW, "hidden_channels": 16, "head_epochs": 2},
        "cohop": {**FEW, "rounds": 1},
        "distill": {"source": "teacher"},  # TINED copies the teacher's layers, and this teacher has few epochs
    }
)
DISTILL = {"config": CONFIG, "measure_latency": False}
ENCODED = {
    "mlp": 3,
    "rbm": 3,
    "moe": 3,
    "ensemble": 3,
    "nosmog": 2,
    "cohop": 10,
    "sign": 192,
    "trees": 3,
    "tined_plus": 2,
}


@pytest.fixture(scope="module")
def digits():
    return rbm.load_dataset("digits")


@pytest.fixture(scope="module")
def whole(digits, tmp_path_factory):
    """A run of every method that keeps a student on features alone."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    return rbm.distill(digits, methods=list(METHODS), keep="glnn", folder=folder, **DISTILL), folder


@pytest.fixture
def run(whole, tmp_path):
    """A copy that tests may change."""
    shutil.copytree(whole[1], tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("method", METHODS)
def test_each_is_loaded_again(whole, method):
    result, folder = whole
    student, known = rbm.load(folder, method=method), load_encodings(folder, method)
    with torch.no_grad():
        assert torch.equal(
            student(result.student_inputs(method)), result.students[method](result.student_inputs(method))
        )
    assert (known is None) == (method not in ENCODED)
    if known is not None:
        assert torch.equal(known, result.encodings[method].full)
        assert known.shape[1] == ENCODED[method]


def test_the_kept_one_needs_no_name(whole):
    result, folder = whole
    assert result.method == "glnn"
    assert torch.equal(rbm.load(folder).layers[0].weight, result.student.layers[0].weight)
    assert load_encodings(folder) is None, "though encodings of others are there"


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_student_loaded_in_inference_mode_runs_as_one_operator(whole, quantize):
    """Its separate layers, with experts folded at each call, took much longer for one row."""
    with torch.inference_mode():
        student = rbm.load(whole[1], method="rbm", quantize=quantize, quiet=True)
        student(torch.zeros(1, student.in_channels))
    assert student._packed.network is not None


def test_one_file_for_methods_that_share_encodings(whole):
    names = {read_description(whole[1] / "student.json", method)["encodings"] for method in METHODS}
    assert names == {None, "encodings", "encodings-nosmog", "encodings-cohop", "encodings-sign"}


def test_the_list_knows_all_files_and_overwriting_removes_them(run):
    listed = set(json.loads((run / "run.json").read_text())["files"])
    assert {path.name for path in run.glob("[!.]*")} - {"run.json"} <= listed
    assert {f"{method}.safetensors" for method in METHODS} <= listed
    RunFolder(run, CONFIG, overwrite=True)
    assert {path.name for path in run.glob("[!.]*")} == {"run.json", "config.yaml"}


def test_resuming_may_keep_another(digits, run):
    methods = ["mlp", "glnn", "nosmog"]
    before = {path.name: path.read_bytes() for path in run.glob("*.safetensors")}
    resumed = rbm.distill(digits, methods=methods, keep="nosmog", folder=run, resume=True, **DISTILL)
    assert torch.equal(rbm.load(run).layers[0].weight, resumed.student.layers[0].weight)
    assert load_encodings(run).shape[1] == 2
    assert load_encodings(run, "mlp").shape[1] == 3
    after = {path.name: path.read_bytes() for path in run.glob("*.safetensors")}
    assert all(after[name] == content for name, content in before.items()), "nothing was trained again"


def test_faults(run):
    with pytest.raises(
        ValueError, match=r"^method is 'gnn', but .*run describes the students glnn, mlp, rbm, moe, .*lab"
    ):
        rbm.load(run, method="gnn")
    with pytest.raises(ValueError, match=r"method is '\.\./mlp', but"):
        rbm.load(run, method="../mlp")
    (run / "encodings.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"encodings\.safetensors does not exist, and the student of .* needs it"
    ):
        load_encodings(run, "mlp")
    (run / "mlp.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no mlp\.safetensors"):
        rbm.load(run, method="mlp")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content["students"]["mlp"].pop("encodings"), "nothing is known of 'encodings'"),
        (lambda content: content["students"]["mlp"].update(encodings="../encodings"), "names the encodings"),
        (lambda content: content["students"]["mlp"]["arguments"].update(num_layers=3), "checksum differs"),
        (lambda content: content.update(students={"../mlp": {}}), "does not describe a student of this package"),
        (lambda content: content.update(students=3), "does not describe a student of this package"),
        (lambda content: content["students"].update(mlp=3), "does not describe a student of this package"),
    ],
)
def test_a_damaged_description(run, change, message):
    content = json.loads((run / "student.json").read_text())
    change(content)
    (run / "student.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        (load_encodings(run, "mlp"), rbm.load(run, method="mlp"))


def test_a_run_of_an_earlier_version_has_one():
    folder = RUNS / "finished"
    assert torch.equal(rbm.load(folder, method="rbm").layers[0].weight, rbm.load(folder).layers[0].weight)
    assert load_encodings(folder, "rbm") is None, "it has no file of encodings"
    with pytest.raises(
        ValueError, match=r"method is 'mlp', but .*finished describes the students rbm; name one of them"
    ):
        rbm.load(folder, method="mlp")


def test_a_folder_of_the_hub_has_one(whole, tmp_path):
    pytest.importorskip("huggingface_hub")
    whole[0].student.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"method is 'glnn', but .* is no run folder and holds one student; leave it out"
    ):
        rbm.load(tmp_path, method="glnn")


def test_a_run_folder_that_a_student_was_saved_into_stays_one(whole, run):
    pytest.importorskip("huggingface_hub")
    whole[0].students["mlp"].save_pretrained(run)
    assert torch.equal(rbm.load(run).layers[0].weight, whole[0].student.layers[0].weight)
    assert type(rbm.load(run, method="rbm")) is type(whole[0].students["rbm"])


def test_predict(command, whole, run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    result, predict = whole[0], partial(command, "predict", run)
    np.save("x.npy", result.split.graph.x[:4].numpy())
    np.save("rows.npy", result.student_inputs("rbm")[:4].numpy())
    assert predict("x.npy", "--out", "kept.npy")[0] == 0
    assert predict("rows.npy", "--out", "rbm.npy", "--method", "rbm")[0] == 0
    with torch.no_grad():
        for method in ("glnn", "rbm"):
            expected = result.students[method](result.student_inputs(method)[:4]).softmax(-1).numpy()
            np.testing.assert_allclose(np.load("kept.npy" if method == "glnn" else "rbm.npy"), expected, atol=1e-6)
    status, _, err = predict("x.npy", "--method", "rbm")
    assert (status, "64 features and 3 encodings; or pass the 64 features alone" in err) == (2, True)
    status, _, err = predict("x.npy", "--method", "gnn")
    assert (status, "describes the students glnn, mlp" in err) == (2, True)


def test_export(command, whole, run):
    result = whole[0]
    status, out, _ = command("export", run, "--format", "torch-export", "--method", "mlp")
    assert status == 0
    assert "student-mlp.pt2" in out.replace("\n", "")
    rows = result.student_inputs("mlp")[:5]
    exported = torch.export.load(run / "student-mlp.pt2").module()
    with torch.no_grad():
        torch.testing.assert_close(exported(rows), result.students["mlp"](rows), atol=1e-4, rtol=1e-4)
    assert "student-mlp.pt2" in json.loads((run / "run.json").read_text())["files"]


def test_latency(command, run):
    quick = ["--batch-sizes", "2", "--repeats", "2"]
    assert command("latency", run, *quick, "--method", "rbm")[0] == 0
    assert command("latency", run, *quick)[0] == 0
    of_rbm, of_kept = (json.loads((run / name).read_text()) for name in ("latency-rbm.json", "latency.json"))
    assert (of_rbm["student"], of_kept["student"]) == ("rbm", "glnn")
    listed = json.loads((run / "run.json").read_text())["files"]
    assert {"latency-rbm.json", "latency-rbm.png", "latency.json", "latency.png"} <= set(listed)
