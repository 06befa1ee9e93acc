"""Comparisons of versions by whole runs and by epochs: what tables take from rows, and the page from the table."""

import csv
import json
from pathlib import Path

import rbm
from benchmarks import epoch_seconds, patience, whole_run
from rbm.config import Config


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


def test_the_page_shows_the_rows_that_are_kept():
    here = Path(epoch_seconds.__file__).parent
    with (here / "results" / "epoch_seconds.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert epoch_seconds.markdown(rows) in (here / "NOTES.md").read_text()
    # A phase that one version has alone is left out.
    kept = [row for row in rows if row["phase"] == "mlp" or row["version"] == "now"]
    assert all(", mlp |" in line for line in epoch_seconds.markdown(kept).splitlines()[2:])


def test_the_page_shows_the_narrow_teacher():
    here, tables = Path(whole_run.__file__).parent, {}
    for name, path in {"runs": "whole_run.csv", "patience": "patience.csv", "paper": "../../results/paper.csv"}.items():
        with (here / "results" / path).open(newline="") as file:
            tables[name] = list(csv.DictReader(file))
    page = (here / "NOTES.md").read_text()
    assert whole_run.against(tables["runs"], tables["paper"], "quarter") in page
    assert patience.markdown(tables["patience"]) in page


def test_a_replay_at_the_patience_of_a_run_is_the_run(small_graph, tmp_path):
    """Its epochs, its choice among equal ones, and the epochs that cannot be chosen."""
    config = Config().updated({name: {"max_epochs": 80, "patience": 10} for name in patience.PHASES})
    config = config.updated({"rbm": {"pretrain_epochs": 4, "hidden_channels": 8}, "mlp": {"hidden_channels": 8}})
    small_graph.y = small_graph.y.roll(1)  # nothing tells these classes: accuracy goes up and down
    found = rbm.distill(small_graph, config=config, folder=tmp_path, measure_latency=False, plots=False)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for phase in patience.PHASES:
        result = patience.replay(records, phase, config, 10).result
        summary = found.summary[phase]
        assert result.epochs < 80
        assert (result.epochs, result.best_epoch) == (summary["epochs"], summary["best_epoch"])
        assert result.test_accuracy == summary["test_accuracy"]
        assert patience.replay(records, phase, config, 2).result.epochs < result.epochs
