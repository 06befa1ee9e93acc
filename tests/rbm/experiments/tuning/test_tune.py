"""A search: its starting point, the nodes that it reads, the files that it writes, and resuming after a kill."""

import csv
import os
import signal
import sys
import time
from dataclasses import replace

import pytest
import torch
import yaml
from rbm_process import RbmProcess
from torch_geometric import typing

from rbm.config import Config
from rbm.datasets import load_dataset
from rbm.distillation.distill import distill
from rbm.experiments.tuning import folder, search
from rbm.experiments.tuning.run import tune
from rbm.experiments.tuning.search import Search

pytest.importorskip("optuna")

SPACE = {"rbm.lr": [0.1, 0.01, 0.001], "rbm.dropout": {"low": 0.0, "high": 0.6}}
# The fastest method, for tests in which the method does not matter.
MLP = {"method": "mlp", "space": {"mlp.lr": [0.1, 0.01, 0.001], "mlp.dropout": {"low": 0.0, "high": 0.6}}}


def apart_from(rows, *names):
    return [{name: value for name, value in row.items() if name not in names} for row in rows]


def test_starts_from_the_preset_and_ends_no_worse(start, tmp_path):
    found = tune(start, tmp_path / "out", space=SPACE, trials=6, cache=tmp_path / "cache")
    first, accuracies = found.rows[0], [float(row["accuracy"]) for row in found.rows if row["state"] == "complete"]
    assert found.start_values == {"rbm.lr": 0.01, "rbm.dropout": 0.3} == {name: first[name] for name in SPACE}
    assert f"{found.accuracy:.5f}" == f"{max(accuracies):.5f}"
    assert found.accuracy >= found.start_accuracy
    assert len({row["rbm.dropout"] for row in found.rows}) > 3, "other values are tried"
    assert len(list((tmp_path / "cache").glob("teacher-*"))) == 2, "trials share a teacher for each seed"
    with open(tmp_path / "out" / "trials.csv", newline="") as file:
        assert [row["accuracy"] for row in csv.DictReader(file)] == [row["accuracy"] for row in found.rows]


def test_accuracy_is_that_of_distillations_without_the_test_set(start, tmp_path):
    found = tune(start, tmp_path / "out", space=SPACE, seeds=(3, 5), trials=2)
    for row in found.rows:
        config = start.updated(
            {"evaluate_on": "validation", "rbm": {"lr": row["rbm.lr"], "dropout": row["rbm.dropout"]}}
        )
        for seed in (3, 5):
            graph = load_dataset(config.dataset, seed=seed)
            result = distill(graph, config=replace(config, seed=seed), methods=["rbm"], measure_latency=False)
            assert row[f"seed {seed}"] == f"{result.summary['rbm']['test_accuracy']:.5f}"
        assert float(row["accuracy"]) == pytest.approx((float(row["seed 3"]) + float(row["seed 5"])) / 2, abs=1e-5)


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_never_looks_at_the_test_set(setting, start, small_graph, graph_file, tmp_path):
    start = replace(start, setting=setting)
    before = tune(start, tmp_path / "before", **MLP, trials=4)
    small_graph.y[small_graph.test_mask] = torch.randint(0, 3, (30,), generator=torch.Generator().manual_seed(1))
    torch.save(small_graph, graph_file)
    search.remembered_dataset.cache_clear()
    after = tune(start, tmp_path / "after", **MLP, trials=4)
    assert apart_from(after.rows, "seconds") == apart_from(before.rows, "seconds")
    assert after.config == before.config
    assert len({row["accuracy"] for row in before.rows}) > 1, "or equal rows would mean little"


def test_best_settings_are_a_configuration_of_distill(start, tmp_path):
    from rbm.cli.options import configuration

    found = tune(start, tmp_path / "out", **MLP, trials=4)
    file = tmp_path / "out" / "best.yaml"
    assert configuration(None, None, None, {}, file, None) == found.config
    assert found.config.evaluate_on == "test"
    assert (found.config.mlp.lr, found.config.mlp.dropout) == (found.values["mlp.lr"], found.values["mlp.dropout"])
    told = yaml.safe_load(file.read_text())
    assert "rbm" in told, "what was changed beside the space belongs to it"
    assert "distill" not in told, "what is as the preset has it need not be told"


def test_killed_and_continued_gives_the_same_trials(start, tmp_path):
    whole = tune(start, tmp_path / "whole", **MLP, trials=9)
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(MLP["space"], sort_keys=False))
    (tmp_path / "start.yaml").write_text(start.to_yaml())
    command = ["tune", "--method", "mlp", "--config", "start.yaml"]
    command += ["--space", "space.yaml", "--trials", "1000", "--out", "killed"]
    process = RbmProcess(*command, cwd=tmp_path)
    try:
        end, table = time.monotonic() + 120, tmp_path / "killed" / "trials.csv"
        while (not table.exists() or table.read_text().count("\n") < 4) and time.monotonic() < end:
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.finish()
    done = table.read_text().count("\n") - 1
    assert 3 <= done < 9, "killed in the middle"
    continued = tune(start, tmp_path / "killed", **MLP, trials=9)
    assert apart_from(continued.rows, "trial", "seconds") == apart_from(whole.rows, "trial", "seconds")
    assert continued.config == whole.config


def test_killed_between_two_values_of_a_trial(start, tmp_path):
    whole, out = tune(start, tmp_path / "whole", **MLP, trials=5), tmp_path / "out"
    tune(start, out, **MLP, trials=3)
    cut = Search(start, "mlp", (0, 1), MLP["space"])
    with folder.open_study(out, cut) as (study, _):
        study.ask({"mlp.lr": cut.space()["mlp.lr"]})  # mlp.dropout would have come next
    continued = tune(start, out, **MLP, trials=5)
    assert apart_from(continued.rows, "trial", "seconds") == apart_from(whole.rows, "trial", "seconds")


@pytest.mark.parametrize("at", [0, 1, 5])
def test_what_an_error_cut_short_is_run_again(start, tmp_path, monkeypatch, at):
    whole, real, runs = tune(start, tmp_path / "whole", **MLP, trials=4), Search.accuracy, []

    def accuracy(self, *arguments):
        runs.append(arguments)
        if len(runs) == at + 1:
            raise OSError("the disk is full")
        return real(self, *arguments)

    monkeypatch.setattr(Search, "accuracy", accuracy)
    with pytest.raises(OSError, match="the disk is full"):
        tune(start, tmp_path / "out", **MLP, trials=4)
    found = tune(start, tmp_path / "out", **MLP, trials=4)
    assert apart_from(found.rows, "trial", "seconds") == apart_from(whole.rows, "trial", "seconds")


def test_more_trials_go_on_and_fewer_do_nothing(start, tmp_path, monkeypatch):
    first = tune(start, tmp_path / "out", **MLP, trials=3)
    second = tune(start, tmp_path / "out", **MLP, trials=5)
    assert second.rows[:3] == first.rows
    assert len(second.rows) == 5
    monkeypatch.setattr(Search, "accuracy", lambda *_: pytest.fail("nothing is left to do"))
    assert tune(start, tmp_path / "out", **MLP, trials=2).rows == second.rows


@pytest.mark.usefixtures("forked_workers")
def test_processes_side_by_side(start, tmp_path):
    found = tune(start, tmp_path / "out", **MLP, seeds=(0,), trials=4, jobs=2, cache=tmp_path / "cache")
    alone = tune(start, tmp_path / "alone", **MLP, seeds=(0,), trials=1)
    assert len(found.rows) == 4
    assert found.start_accuracy == alone.start_accuracy
    assert len({row["mlp.dropout"] for row in found.rows}) == 4, "what runs side by side differs"


def test_what_begins_badly_is_given_up(start, tmp_path, monkeypatch):
    judged = []

    def accuracy(self, values, seed, cache, device):
        judged.append(seed)
        return 0.9 - abs(values["rbm.dropout"] - 0.3) + seed / 100

    monkeypatch.setattr(Search, "accuracy", accuracy)
    found = tune(start, tmp_path / "out", space={"rbm.dropout": SPACE["rbm.dropout"]}, seeds=(0, 1, 2), trials=20)
    pruned = [row for row in found.rows if row["state"] == "pruned"]
    assert pruned, "of 20 trials some begin below the median"
    assert not [row for row in found.rows[: folder.BEFORE_PRUNING] if row["state"] == "pruned"]
    assert len(judged) < 60
    for row in pruned:
        assert float(row["seed 0"]) < 0.9
        assert row["seed 2"] == "", "it is spared the last seed"
    assert found.accuracy == pytest.approx(0.91), "the start is the best, and none that was given up counts"


def test_values_that_do_not_go_together_are_bad_not_fatal(start, monkeypatch):
    space = {"rbm.num_experts": {"low": 3, "high": 4}, "rbm.top_k": {"low": 1, "high": 4}}
    judge = Search(start, "rbm", (0,), space)
    reason = "rbm.top_k is 4, expected between 1 and num_experts=3"
    assert judge.attempt({"rbm.num_experts": 3, "rbm.top_k": 4}, 0, None, "cpu") == (0.0, reason)
    accuracy, reason = judge.attempt({"rbm.num_experts": 4, "rbm.top_k": 4}, 0, None, "cpu")
    assert (accuracy > 0.0, reason) == (True, "")

    def diverges(*_, **__):
        raise FloatingPointError("the loss became nan")

    monkeypatch.setattr(search, "distill", diverges)
    for values in ({"rbm.num_experts": 4, "rbm.top_k": 4}, judge.starting_values()):
        assert judge.attempt(values, 0, None, "cpu") == (0.0, "the loss became nan")


def test_a_trial_that_fails_counts_as_0_with_its_reason(start, tmp_path):
    """Regression test: more experts than nodes, which only the run itself can know, ended the whole search."""
    space = {"rbm.num_experts": [4, 5000]}
    found = tune(start, tmp_path / "out", space=space, seeds=(0,), trials=6)
    with open(tmp_path / "out" / "trials.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found.rows) == 6
    assert {row["rbm.num_experts"] for row in rows} == {"4", "5000"}
    for row in rows:
        fails = row["rbm.num_experts"] == "5000"
        assert (float(row["accuracy"]) == 0, "use at most as many experts as nodes" in row["failed"]) == (fails, fails)


def test_an_error_of_the_starting_point_ends_the_search(start, tmp_path):
    impossible = start.updated({"rbm": {"num_experts": 5000}})
    with pytest.raises(ValueError, match=r"rbm\.num_experts is 5000 but the observed graph has 60 nodes"):
        tune(impossible, tmp_path / "out", space={"rbm.lr": [0.1]}, seeds=(0,), trials=3)


@pytest.mark.parametrize(
    ("method", "source", "asked"),
    [("rbm", "auto", True), ("glnn", "auto", True), ("rbm", "teacher", False), ("cohop", "auto", False)],
)
def test_students_learn_from_the_source_that_a_run_takes(start, monkeypatch, method, source, asked):
    """Regression test: trials never trained the MLP on labels, from which students of ``auto`` learn if it is ahead."""
    seen = []

    def train(*_, labels_alone, **__):
        seen.append(labels_alone)
        raise FloatingPointError

    monkeypatch.setattr(search, "distill", train)
    judge = Search(start.updated({"distill": {"source": source}}), method, (0,), {f"{method}.lr": [0.1]})
    judge.attempt({f"{method}.lr": 0.1}, 0, None, "cpu")
    assert seen == [asked]


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"rbm": {"lr": 0.5}}, {}, r"other settings: config.rbm.lr \(was 0.01, now 0.5\)"),
        ({}, {"seeds": (0, 2)}, r"other settings: seeds \(was \[0, 1\], now \[0, 2\]\)"),
        ({}, {"space": {"mlp.lr": [0.1, 0.01]}}, r"other settings: space.mlp.lr"),
        ({}, {"method": "glnn", "space": {"glnn.lr": [0.1]}}, r"other settings: method \(was mlp, now glnn\)"),
    ],
)
def test_a_folder_holds_one_search(start, tmp_path, changes, options, message):
    tune(start, tmp_path / "out", **MLP, trials=1)
    before = (tmp_path / "out" / "trials.csv").read_bytes()
    with pytest.raises(ValueError, match=message):
        tune(start.updated(changes), tmp_path / "out", **{**MLP, "trials": 2, **options})
    assert (tmp_path / "out" / "trials.csv").read_bytes() == before


def test_a_search_is_not_continued_on_a_graph_file_that_has_changed(start, tmp_path, small_graph):
    """Regression test: its trials on the former graph were compared with those on the new one."""
    path = tmp_path / "mine.pt"
    torch.save(small_graph, path)
    mine = replace(start, dataset=str(path))
    tune(mine, tmp_path / "out", **MLP, trials=1)
    small_graph.x += 1
    torch.save(small_graph, path)
    with pytest.raises(ValueError, match="other settings: graph"):
        tune(mine, tmp_path / "out", **{**MLP, "trials": 2})
    search = yaml.safe_load((tmp_path / "out" / "search.yaml").read_text())
    del search["graph"]  # as an earlier version wrote it
    (tmp_path / "out" / "search.yaml").write_text(yaml.safe_dump(search, sort_keys=False))
    assert len(tune(mine, tmp_path / "out", **{**MLP, "trials": 2}).rows) == 2


def test_a_folder_of_something_else_is_left_alone(start, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"holds no search \(no search.yaml\)"):
        tune(start, tmp_path, **MLP)


@pytest.mark.parametrize(
    ("changes", "options", "error", "message"),
    [
        ({}, {"trials": 0}, ValueError, "trials is 0, expected at least 1"),
        ({}, {"jobs": 0}, ValueError, "jobs is 0, expected at least 1"),
        ({}, {"device": "tpu"}, ValueError, "device is 'tpu', expected cpu, cuda"),
        ({}, {"seeds": ()}, ValueError, "seeds is empty"),
        ({}, {"seeds": 3}, TypeError, r"seeds is 3, expected several numbers; use seeds=\(3,\)"),
        ({}, {"method": "gnn", "space": SPACE}, ValueError, "method is 'gnn', expected one of mlp"),
        ({"teacher": {"name": "gin"}}, {}, ValueError, "teacher: got 'gin'"),
        ({"sampling": {"batch_size": 8}}, {}, ValueError, "^sampling.batch_size is 8, but PyTorch Geometric's sampler"),
        ({"dataset": "cora", "root": "nowhere"}, {}, FileNotFoundError, "nowhere"),
    ],
)
def test_mistakes_leave_nothing(start, tmp_path, monkeypatch, changes, options, error, message):
    monkeypatch.setattr(typing, "WITH_PYG_LIB", False)
    monkeypatch.setattr(typing, "WITH_TORCH_SPARSE", False)
    with pytest.raises(error, match=message):
        tune(start.updated(changes), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("absent", "ray", "extra"), [("optuna", False, "tune"), ("ray", True, "ray")])
def test_what_is_not_installed_is_named(start, tmp_path, monkeypatch, absent, ray, extra):
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(ValueError, match=rf"not installed: pip install 'rbm-kernels\[{extra}\]'"):
        tune(start, tmp_path / "out", space=SPACE, ray=ray)
    assert not (tmp_path / "out").exists()


def test_command(start, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "start.yaml").write_text(yaml.safe_dump({"dataset": start.dataset, "mlp": {"max_epochs": 6}}))
    few = ["--config", "start.yaml", "--set", "teacher.max_epochs=4", "--set", "encoding.deepwalk=false"]
    few += ["--undirected", "--precision", "bfloat16"]
    status, out, err = command("tune", *few, "--method", "mlp", "--seeds", "0", "--trials", 3)
    assert status == 0, err
    best = "runs/tune-small-transductive-clean-mlp/best.yaml"
    for text in ("3 trials", "mlp.dropout", "start", "best", f"rbm distill --config {best}"):
        assert text in out
    assert command("distill", "--config", best, "--method", "mlp", "--no-plots", "--out", "run")[0] == 0
    config = Config.from_yaml(tmp_path / "run" / "config.yaml")
    assert config.teacher.max_epochs == 4
    assert (config.undirected, config.precision) == (True, "bfloat16")
    assert config.evaluate_on == "test"
    (tmp_path / "runs" / "tune-small-transductive-clean-mlp").rename(tmp_path / "my search")
    status, out, _ = command("tune", *few, "--method", "mlp", "--seeds", "0", "--trials", 3, "--out", "my search")
    told = "rbm distill --config 'my search/best.yaml'"
    assert (status, told in out, told in (tmp_path / "my search" / "best.yaml").read_text()) == (0, True, True)
    (tmp_path / "space.yaml").write_text("rbm.num_experts: [8, 5000]")
    few += ["--set", "rbm.max_epochs=2"]
    status, out, _ = command("tune", *few, "--space", "space.yaml", "--seeds", "0", "--trials", 5, "--out", "fails")
    assert (status, "failed" in out, "the first: rbm.num_experts is 5000 but" in out) == (0, True, True)
    assert command("tune", "--space", "no.yaml") == (2, "", "Error: search space no.yaml does not exist")
