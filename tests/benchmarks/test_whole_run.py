"""Comparisons of versions by whole runs and by epochs: tables from rows, and the page from the tables."""

import csv
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from benchmarks import denormals, epoch_seconds, in_turn, patience, whole_run
from benchmarks.measure import versions
from rbm.config import Config
from rbm.training.loop import Trainer, fit_phase
from rbm.training.selection import Accuracies
from rbm.utils.progress import Progress


def test_versions_are_compared_on_the_seeds_that_both_have():
    zeros = dict.fromkeys(whole_run.COLUMNS, "0")
    rows = [
        zeros
        | {"dataset": "digits", "setting": "inductive", "version": version, "seed": seed}
        | {"processor_seconds": seconds, "rbm_val": "0.5"}
        for version, seed, seconds in (("before", "0", "40"), ("before", "1", "60"), ("now", "0", "10"))
    ]
    table = whole_run.markdown(rows).splitlines()[2:]
    assert table == [
        "| digits, inductive | before | 1 | 40.0 | 1.00 | 0.00% | 0.00% | 0.00% | 0.00% | 50.00% | 0.00% |",
        "| digits, inductive | now | 1 | 10.0 | 0.25 | 0.00% | 0.00% | 0.00% | 0.00% | 50.00% | 0.00% |",
    ]
    assert not whole_run.markdown(rows[1:]).splitlines()[2:]


@pytest.mark.parametrize("arguments", [["now=."], ["--out", "rows.csv"]])
def test_epochs_are_not_measured_without_a_version_and_a_file(arguments, monkeypatch, capsys, tmp_path):
    """A version runs for minutes, and its rows had nowhere to go."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["epoch_seconds", "--root", ".", *arguments])
    monkeypatch.setattr(versions.subprocess, "run", lambda *_, **__: pytest.fail("it started"))
    with pytest.raises(SystemExit, match="2"):
        epoch_seconds.main()
    assert "expected at least one NAME=FOLDER, and --out FILE" in capsys.readouterr().err


def note(name: str) -> str:
    return (Path(epoch_seconds.__file__).parent / "notes" / f"{name}.md").read_text(encoding="utf-8")


def test_the_page_shows_the_rows_that_are_kept():
    here = Path(epoch_seconds.__file__).parent
    with (here / "results" / "epoch_seconds.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    training = note("training")
    assert epoch_seconds.markdown(rows) in training
    pages = {"in_turn.csv": "feed_forward", "in_turn_sums.csv": "feed_forward", "in_turn_routing.csv": "routing"}
    pages["in_turn_zeros.csv"] = "layer"
    for name, page in pages.items():
        with (here / "results" / name).open(newline="") as file:
            assert in_turn.markdown([*csv.DictReader(file)]) in note(page)
    with (here / "results" / "denormals.csv").open(newline="") as file:
        assert denormals.markdown([*csv.DictReader(file)]) in training
    with (here / "results" / "epoch_seconds_precision.csv").open(newline="") as file:
        assert epoch_seconds.markdown([*csv.DictReader(file)]) in (here.parent / "docs" / "scale.md").read_text()
    with (here / "results" / "transposes.csv").open(newline="") as file:
        teachers = [row for row in csv.DictReader(file) if row["phase"] == "teacher"]
    for name in ("appnp", "sage"):
        table = epoch_seconds.markdown([row for row in teachers if row["version"].startswith(name)])
        assert table in training
    # A phase that only one version has is omitted.
    kept = [row for row in rows if row["phase"] == "mlp" or row["version"] == "now"]
    assert all(", mlp |" in line for line in epoch_seconds.markdown(kept).splitlines()[2:])


def test_the_page_shows_the_narrow_teacher():
    here, tables = Path(whole_run.__file__).parent, {}
    for name, path in {"runs": "whole_run.csv", "patience": "patience.csv", "paper": "../../results/paper.csv"}.items():
        with (here / "results" / path).open(newline="") as file:
            tables[name] = list(csv.DictReader(file))
    page = note("training")
    assert whole_run.against(tables["runs"], tables["paper"], "quarter") in page
    assert patience.markdown(tables["patience"]) in page


class Scripted(Trainer):
    """A training with given accuracies."""

    def __init__(self, accuracies: list[Accuracies]) -> None:
        self.model, self.accuracies = torch.nn.Linear(1, 1), iter(accuracies)

    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train_epoch(self, epoch: int) -> float:
        return 0.0

    def evaluate(self) -> Accuracies:
        return next(self.accuracies)


@pytest.mark.parametrize("phase", patience.PHASES)
@pytest.mark.parametrize("select_pretraining", [False, True])
def test_a_replay_is_what_a_training_selects(phase, select_pretraining):
    """Its epochs, its choice among equal ones, and the epochs that cannot be chosen."""
    config = Config().updated({name: {"max_epochs": 90, "min_epochs": 3} for name in patience.PHASES})
    config = config.updated({"rbm": {"pretrain_epochs": 5, "select_pretraining": select_pretraining}})
    values = torch.rand(95, generator=torch.Generator().manual_seed(0)).tolist()
    values[3], values[20], values[23] = 3.0, 2.0, 2.0
    accuracies = [Accuracies(0.5, value, value / 2) for value in values]
    names = ("train_accuracy", "val_accuracy", "test_accuracy")
    records = [
        {"phase": phase, "epoch": epoch, **dict(zip(names, each, strict=True))} for epoch, each in enumerate(accuracies)
    ]
    records += [{**record, "phase": "other", "val_accuracy": 9.0} for record in records]
    warmup = {"warmup": 5, "select_warmup": select_pretraining} if phase == "rbm" else {}
    ends = []
    for most in (4, 10):
        network = replace(getattr(config, phase), patience=most)
        wanted = fit_phase(phase, Scripted(accuracies), network, None, Progress(None), **warmup)
        assert asdict(patience.replay(records, phase, config, most).result) == wanted
        ends.append(wanted["epochs"])
    assert ends[0] < ends[1] < 90


def test_two_versions_take_turns(tmp_path, monkeypatch, capsys):
    """Both are this checkout."""
    here, out = Path(in_turn.__file__).parent.parent, tmp_path / "rows.csv"
    arguments = [f"a={here}", f"b={here}", "--rounds", "1", "--seconds", "0.001", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["in_turn", *arguments])
    in_turn.main()
    with out.open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert {row["version"] for row in rows} == {"a", "b"}
    assert {row["dtype"] for row in rows} == set(in_turn.DTYPES)
    assert all(float(row["milliseconds"]) > 0 for row in rows)
    assert in_turn.markdown(rows) in capsys.readouterr().out
