"""Damaged results in a run folder are told by the name of the file, with what writes it anew."""

import json
import re
import shutil

import pytest
import torch

import rbm
from rbm.config import Config
from rbm.distillation.report.write import write_observed, write_page
from rbm.distillation.result_files import read_results

FEW = {"max_epochs": 2, "min_epochs": 0}
QUICK = {"teacher": FEW, "rbm": {**FEW, "pretrain_epochs": 1}, "encoding": {"deepwalk": False}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run with a report."""
    from torch_geometric.data import Data

    y = torch.arange(60) % 3
    edges = torch.stack([torch.arange(60), torch.arange(60).roll(3)])
    data = Data(x=torch.randn(60, 4) + y[:, None], edge_index=torch.cat([edges, edges.flip(0)], dim=1), y=y)
    for name, start in (("train_mask", 0), ("val_mask", 20), ("test_mask", 40)):
        data[name] = (torch.arange(60) >= start) & (torch.arange(60) < start + 20)
    folder = tmp_path_factory.mktemp("runs") / "finished"
    write_observed(rbm.distill(data, config=Config().updated(QUICK), methods=["rbm"], folder=folder), folder)
    return folder


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("summary.json", None, "is not valid JSON: .*; restore it, or remove it: rbm distill --resume writes it anew"),
        ("summary.json", {"verdict": ...}, "lacks 'verdict', .*; restore it, or remove it: rbm distill --resume"),
        ("summary.json", {"rbm": {}}, "lacks 'test_accuracy'"),
        ("timings.json", None, "is not valid JSON: .*; restore it, or remove it: rbm distill --resume writes it anew"),
        ("report.json", {"models": ...}, "lacks 'models', .*; restore it, or remove it: rbm report writes it anew"),
        ("summary.json", {"teacher": "sage"}, "has 'sage' as 'teacher', expected values by name, .*; restore it, or"),
        ("summary.json", {"nodes": "many"}, "has 'many' as 'nodes', expected a whole number, .*rbm distill --resume"),
        ("summary.json", {"rbm": {"test_accuracy": None}}, "has None as 'test_accuracy', expected a number"),
        ("timings.json", {"rbm": 3.5}, "has 3.5 as 'rbm', expected values by name"),
        ("report.json", {"models": 3}, "has 3 as 'models', expected values by name, .*rbm report writes it anew"),
        ("metrics.jsonl", {"loss": None}, "line 1 has no number as loss, expected an epoch .*; remove the line"),
    ],
)
def test_a_damaged_file_of_a_run_is_told(finished, tmp_path, name, change, message):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    first, *others = [(run / name).read_text()] if name.endswith(".json") else (run / name).read_text().splitlines()
    if change is None:
        first = first[:100]
    else:
        content = {key: value for key, value in {**json.loads(first), **change}.items() if value is not ...}
        first = json.dumps(content)
    (run / name).write_text("\n".join([first, *others]) + "\n")
    with pytest.raises(ValueError, match=f"{re.escape(str(run))}.*{name}.*{message}"):
        write_page([run], tmp_path / "page.html")


def test_a_defect_of_a_chart_is_not_blamed_on_the_files(finished, tmp_path, monkeypatch):
    """Its traceback is for who mends it; a sentence about damaged files hid it."""
    monkeypatch.setattr("rbm.distillation.report.page.headline", lambda run, absent: "")
    with pytest.raises(TypeError, match="absent"):
        write_page([finished], tmp_path / "page.html")


def test_a_lacking_file_is_told_with_what_writes_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"latency.json does not exist; .*, or rbm latency writes it anew"):
        read_results(tmp_path / "latency.json")


def test_results_are_values_as_they_were_written(finished):
    found = read_results(finished / "summary.json")
    assert found == json.loads((finished / "summary.json").read_text())
    assert found.get("spam") is None
    with pytest.raises(ValueError, match=r"summary\.json lacks 'spam'"):
        found["rbm"]["spam"]
