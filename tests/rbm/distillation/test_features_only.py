"""Students on features alone, and messages of students with encodings about their rows."""

import json
import logging

import pytest
import torch

import rbm
from rbm.config import Config
from rbm.config.presets import features_only
from rbm.distillation.registry import METHODS

FEW = {"max_epochs": 2}
WALKS = {"walk_length": 5, "walks_per_node": 1, "embedding_dim": 3}
CONFIG = Config().updated(
    {
        **dict.fromkeys(
            ("teacher", "mlp", "rbm", "glnn", "cohop", "moe", "krd", "hgmd", "tined", "sign", "trees"), FEW
        ),
        "encoding": {**WALKS, "label_propagation": True},
        "nosmog": {**FEW, "encoding": WALKS},
        "tined_plus": {**FEW, "encoding": WALKS},
        "ensemble": {"members": 2},
        "vqgraph": {**FEW, "tokenizer": {**FEW, "codebook_size": 20}},
        "simmlp": {**FEW, "hidden_channels": 16, "head_epochs": 2},
        "cohop": {**FEW, "rounds": 1},
    }
)


def test_no_student_of_any_method_sees_more(small_graph):
    result = rbm.distill(small_graph, config=CONFIG, methods=list(METHODS), features_only=True, measure_latency=False)
    assert result.encodings == dict.fromkeys(METHODS)
    assert {student.in_channels for student in result.students.values()} == {small_graph.num_features}
    assert {student.encodings for student in result.students.values()} == {0}
    assert result.config == features_only(CONFIG).updated({"dataset": "own graph"})
    assert result.verdict[-1].endswith(": features alone.")


def test_encodings_of_ones_own_are_refused_beside_it(small_graph):
    own = [torch.zeros(small_graph.num_nodes, 2)]
    with pytest.raises(ValueError, match="features_only is True and encodings holds 1; expected one of them"):
        rbm.distill(small_graph, config=CONFIG, encodings=own, features_only=True)


def test_the_command(command, tmp_path):
    quick = [f"--set={section}.max_epochs=2" for section in ("teacher", "mlp", "rbm")]
    run = ("distill", "--no-plots", "--cache", tmp_path / "cache", "--features-only", *quick)
    status, out, _ = command(*run, "--out", tmp_path / "run")
    assert (status, "MLP student, RbM student and MLP on labels: features alone" in " ".join(out.split())) == (0, True)
    assert not list((tmp_path / "run").glob("encodings*"))
    assert rbm.load(tmp_path / "run").in_channels == 64
    status, _, err = command("distill", "--resume", "--no-plots", "--out", tmp_path / "run")
    assert (status, "mlp: finished before" in err) == (0, True)
    status, out, _ = command(*run, "--seeds", "0", "--out", tmp_path / "rows.csv")
    assert (status, "digits" in out) == (0, True)
    status, _, err = command(*run[:-3], "--seeds", "0", "--out", tmp_path / "rows.csv")
    assert (status, "from other settings" in err) == (2, True)


@pytest.fixture(scope="module")
def encoded(tmp_path_factory):
    """A run on digits in which the MLP student takes 3 encodings and GLNN takes none."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    config = CONFIG.updated({"encoding": {"label_propagation": False}})
    rbm.distill(
        rbm.load_dataset("digits"), config=config, methods=["mlp", "glnn"], folder=folder, measure_latency=False
    )
    return folder


def test_a_student_with_encodings_says_so_at_load(encoded, caplog):
    student = rbm.load(encoded, "mlp")
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("rbm", logging.WARNING)
    assert "rows of this MLPStudent are 64 features, then 3 encodings of the node's place" in record.getMessage()
    assert f"rbm.load_encodings('{encoded}', 'mlp') has those" in record.getMessage()
    assert rbm.load_encodings(encoded, "mlp").shape == (1797, student.encodings)
    assert student.row == "64 features, then 3 encodings of the node's place in the graph"
    caplog.clear()
    assert rbm.load(encoded, "glnn").row == "64 features"
    rbm.load(encoded, "mlp", quiet=True)
    assert not caplog.records


@pytest.mark.parametrize("method", ["mlp", "glnn"])
def test_rows_of_another_width_are_told_what_a_row_is(encoded, method):
    student = rbm.load(encoded, method, quiet=True)
    for width in (60, 64, 67):
        if width == student.in_channels:
            continue
        with pytest.raises(ValueError, match=rf"hold {width} numbers .*expected {student.in_channels}: {student.row}"):
            student(torch.zeros(2, width))


@pytest.mark.parametrize("columns", [-1, "3", 67, 3.0])
def test_a_damaged_number_of_encodings(encoded, tmp_path, columns):
    for file in encoded.iterdir():
        if file.suffix in (".json", ".safetensors"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    content = json.loads((tmp_path / "student.json").read_text())
    described = content if content["method"] == "mlp" else content["students"]["mlp"]
    assert described["encoding_columns"] == 3
    described["encoding_columns"] = columns
    (tmp_path / "student.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="does not describe a student of this package: its encoding_columns are"):
        rbm.load(tmp_path, "mlp")


def test_on_the_hub_it_is_said_as_well(encoded, tmp_path, caplog):
    pytest.importorskip("huggingface_hub")
    rbm.load(encoded, "mlp", quiet=True).save_pretrained(tmp_path)
    assert "64 features, then 3 encodings" in (tmp_path / "README.md").read_text()
    assert rbm.hub.load(tmp_path).encodings == 3
    assert "64 features, then 3 encodings" in caplog.text
