"""Sizes, times and specialisation of students."""

import csv

import numpy as np
import pytest
import torch

from rbm.config.presets import preset_config
from rbm.experiments import analysis as studies
from rbm.experiments.analysis import study
from rbm.training.metrics import purity

QUICK = {
    "teacher": {"max_epochs": 2, "hidden_channels": 8},
    "rbm": {"max_epochs": 2, "pretrain_epochs": 1},
    "moe": {"max_epochs": 2, "pretrain_epochs": 1, "hidden_channels": 8, "num_experts": 6},
    "encoding": {"deepwalk": False},
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(studies, "preset_config", lambda *given: preset_config(*given).updated(QUICK))


def test_complexity_counts_what_the_formulas_say(tmp_path):
    page = study("complexity", ["digits"], tmp_path, command="rbm reproduce complexity")
    with open(tmp_path / "complexity.csv") as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    layers = [(64, 8), (8, 10)]

    def counted(of_layer) -> str:
        return str(sum(of_layer(f, n) for f, n in layers))

    e, k, h = 8, 3, 8
    assert rows["mlp"]["parameters"] == counted(lambda f, n: n * (f + 1))
    assert rows["ensemble"]["parameters"] == counted(lambda f, n: 3 * n * (f + 1))
    assert rows["rbm"]["parameters"] == counted(lambda f, n: e * n * (f + 1) + 2 * e * f + 1)
    assert rows["rbm"]["active_parameters"] == counted(lambda f, n: k * (n * (f + 1) + f) + e * f + 1)
    e = 6
    assert rows["moe"]["parameters"] == counted(lambda f, n: e * n * (f + 1) + h * (f + 1) + e * h + 2)
    assert rows["moe"]["active_parameters"] == counted(lambda f, n: k * n * (f + 1) + h * (f + 1) + e * h + 2)
    assert all(float(row["one_node_ms"]) > 0 for row in rows.values())
    assert "| digits | RbM student | 6,034 |" in page.read_text()
    assert "`rbm reproduce complexity`" in page.read_text()


def test_representation_says_how_well_experts_tell_classes(tmp_path):
    page = study("representation", ["digits"], tmp_path, command="rbm reproduce representation")
    text = page.read_text()
    assert "The top expert alone tells the class of" in text
    for method in ("moe", "rbm"):
        file = f"representation-digits-{method}.png"
        assert (tmp_path / file).stat().st_size > 10_000
        assert f"]({file})" in text


def test_pictures_of_a_file_are_beside_the_page(small_graph, tmp_path):
    """Regression test: they were in folders named after the file's path, and the page linked to its path as a whole."""
    file = tmp_path / "my graph.npz"
    parts = ("x", "edge_index", "y", "train_mask", "val_mask", "test_mask")
    np.savez(file, **{name: small_graph[name].numpy() for name in parts})
    page = study("representation", [str(file)], tmp_path / "out", command="rbm reproduce representation")
    pictures = [f"representation-my_graph-{method}.png" for method in ("moe", "rbm")]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [*pictures, "representation.md"]
    assert "## RbM student, my graph\n" in page.read_text()
    assert all(f"]({picture})" in page.read_text() for picture in pictures)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--seeds", "0-4", "seeds is '0-4', expected one: the study complexity is made of one run a graph"),
        ("--protocol", "cpf", "protocol is 'cpf', expected rbm: the study complexity knows no other"),
    ],
)
def test_what_a_study_would_ignore_is_refused(command, monkeypatch, tmp_path, option, value, message):
    """Regression test: of several seeds it used the first one, and of protocols always the same."""
    monkeypatch.setattr("rbm.experiments.analysis.study", lambda *_, **__: pytest.fail("a study was begun"))
    status, _, err = command("reproduce", "complexity", option, value, "--out", tmp_path / "r.csv")
    assert (status, message in err) == (2, True)


@pytest.mark.parametrize(("dataset", "message"), [("coraa", "did you mean 'cora'"), ("cora", "root: got None")])
def test_a_graph_that_is_missing_is_noticed_before_anything_is_trained(tmp_path, monkeypatch, dataset, message):
    """Regression test: the second graph's name was looked at when the first one was trained, which was then lost."""
    monkeypatch.setattr("rbm.experiments.analysis.distill", lambda *_, **__: pytest.fail("a run was begun"))
    with pytest.raises(ValueError, match=message):
        study("complexity", ["digits", dataset], tmp_path / "out", command="rbm")
    assert not (tmp_path / "out").exists()


def test_unknown_study(tmp_path):
    with pytest.raises(ValueError, match="study is 'beauty', expected one of complexity, representation"):
        study("beauty", ["digits"], tmp_path, command="rbm")


def test_share_of_classes_that_groups_tell():
    labels = torch.tensor([0, 0, 1, 1, 2, -1])
    assert purity(torch.tensor([0, 0, 1, 1, 2, 2]), labels) == 1.0
    assert purity(torch.tensor([0, 1, 0, 1, 0, 0]), labels) == 2 / 5
    assert purity(torch.zeros(6, dtype=torch.int32), labels) == 2 / 5
