"""``rbm.distill(auto=True)``: the nodes that it reads, the files that it writes, and resuming after a kill."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from torch import nn

import rbm
from rbm.config import Config
from rbm.config.presets import features_only
from rbm.datasets import encodings
from rbm.datasets.splits import split_graph
from rbm.distillation.auto import run, search
from rbm.training.time_limit import OutOfTimeError, time_limit

pytest.importorskip("optuna")

BUDGET = 9  # trainings, by the clock of these tests


def distilled(graph, start, **options):
    options = {"auto": True, "budget": BUDGET, "measure_latency": False, "cache": None} | options
    return rbm.distill(graph, config=start, **options)


def apart_from_time(found):
    return {name: value for name, value in found.summary.items() if name != "seconds"}


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_never_looks_at_the_test_set(setting, small_graph, start):
    start = replace(start, setting=setting)
    before = distilled(small_graph, start)
    planted, test = small_graph.clone(), small_graph.test_mask
    planted.y[test] = (planted.y[test] + 1 + torch.arange(int(test.sum())) % 2) % 3  # all of them wrong
    assert (planted.y != small_graph.y).equal(test)
    after = distilled(planted, start)
    assert after.trials == before.trials
    assert after.config == before.config
    assert after.summary["verdict"] == before.summary["verdict"]
    assert len({row["accuracy"] for row in before.trials}) > 1, "or equal rows would mean little"


@pytest.mark.usefixtures("clock")
def test_unseen_nodes_are_not_in_any_trial(small_graph, start, monkeypatch):
    seen, real = [], run.Judge.__call__

    def call(self, point, half):
        seen.append(self.observed)
        return real(self, point, half)

    monkeypatch.setattr(run.Judge, "__call__", call)
    distilled(small_graph, replace(start, setting="inductive", seed=3), budget=4)
    split = split_graph(small_graph, "inductive", seed=3)
    for graph in seen:
        assert torch.equal(graph.x, split.observed.x)
        assert (graph.y[graph.test_mask] == -1).all()


@pytest.mark.usefixtures("clock")
def test_accuracies_are_those_of_distillations_on_halves(small_graph, start):
    found = distilled(small_graph, start)
    complete, outcome = [row for row in found.trials if row["state"] == "complete"], found.summary["verdict"]["search"]
    assert complete
    best = max(complete, key=lambda row: (float(row["accuracy"]), -row["trial"]))
    if outcome["corrected"] <= 0:  # the first two have the given settings
        best = max(complete[:2], key=lambda row: (float(row["accuracy"]), -row["trial"]))
    assert f"{outcome['accuracy']:.5f}" == best["accuracy"]
    assert outcome["choice"]["teacher"] == best["teacher"] == found.config.teacher.name
    assert outcome["accuracy"] >= outcome["given_accuracy"]
    config = replace(found.config, evaluate_on="validation")  # its half is the first one of the same seed
    again = rbm.distill(small_graph, config=config, methods=[best["method"]], measure_latency=False)
    assert f"{again.summary[best['method']]['test_accuracy']:.5f}" == best["half 0"]


@pytest.mark.usefixtures("clock")
def test_the_run_is_that_of_the_choice(small_graph, start, tmp_path):
    found = distilled(small_graph, start, folder=tmp_path / "run")
    config = Config.from_yaml(tmp_path / "run" / "config.yaml")
    assert config == found.config
    alone = rbm.distill(small_graph, config=config, measure_latency=False)
    for method in ("teacher", "mlp", "rbm", "labels"):
        assert alone.summary[method] == found.summary[method]
    with open(tmp_path / "run" / "auto.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [{name: str(value) for name, value in row.items()} for row in found.trials]
    assert list(rows[0])[:7] == ["trial", "state", "accuracy", "start", "method", "teacher", "encoding"]
    assert {"distill.label_weight", "mlp.lr", "rbm.num_experts", "half 0", "seconds"} <= set(rows[0])
    outcome = json.loads((tmp_path / "run" / "summary.json").read_text())["verdict"]["search"]
    assert outcome == yaml.safe_load((tmp_path / "run" / "auto.yaml").read_text())["chosen"]
    assert found.verdict[0].startswith("Search: ")
    assert found.verdict[0] in (tmp_path / "run" / "results.md").read_text()
    assert json.loads((tmp_path / "run" / "timings.json").read_text())["search"]["seconds"] == sum(
        float(row["seconds"]) for row in rows
    )


@pytest.mark.usefixtures("clock")
def test_a_run_after_a_search_is_continued_as_any_other(small_graph, start, tmp_path):
    found = distilled(small_graph, start, folder=tmp_path)
    other = next(method for method in ("mlp", "rbm") if method != found.method)
    kept = rbm.distill(
        small_graph, config=found.config, folder=tmp_path, resume=True, keep=other, measure_latency=False
    )
    assert kept.method == other
    assert kept.verdict[0] == found.verdict[0], "it still says what was searched"
    again = distilled(small_graph, start, folder=tmp_path, resume=True)
    assert again.config == found.config
    assert apart_from_time(again) == apart_from_time(found)
    assert again.trials is None
    replaced = distilled(small_graph, start, folder=tmp_path, overwrite=True, budget=1)
    assert len(replaced.trials) == 1


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("budget", [0.5, "1s"])
def test_a_budget_below_one_trial_leaves_the_settings(budget, small_graph, start):
    found = distilled(small_graph, start, budget=budget)
    assert found.config == replace(start, dataset="own graph")
    assert "is too small for this graph" in found.verdict[0]
    assert "at least 2 s, judging by the epochs so far; the run uses the settings that" in found.verdict[0]
    assert len(found.trials) == 1


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("at", [0, 6])
def test_what_an_error_cut_short_goes_on(at, small_graph, start, tmp_path, monkeypatch):
    whole, real, judged = distilled(small_graph, start), run.Judge.__call__, []

    def call(self, point, half):
        judged.append(point)
        if len(judged) == at + 1:
            raise OSError("the disk is full")
        return real(self, point, half)

    monkeypatch.setattr(run.Judge, "__call__", call)
    with pytest.raises(OSError, match="the disk is full"):
        distilled(small_graph, start, folder=tmp_path / "run")
    found = distilled(small_graph, start, folder=tmp_path / "run", resume=True)
    assert found.trials == whole.trials
    assert found.config == whole.config
    assert apart_from_time(found) == apart_from_time(whole)


KILLED = """
import contextlib, itertools, sys, types, torch, rbm
from rbm.config import Config
from rbm.distillation.auto import search
search._clock = itertools.count().__next__
search.time_limit = lambda *_, **__: contextlib.nullcontext(types.SimpleNamespace(reused=0.0))
torch.set_num_threads(1)
graph = torch.load(sys.argv[1], weights_only=False)
rbm.distill(graph, config=Config.from_yaml(sys.argv[2]), auto=True, budget=int(sys.argv[4]), measure_latency=False,
            folder=sys.argv[3])
"""


@pytest.mark.usefixtures("clock")
def test_killed_and_resumed_ends_with_the_same_choice(small_graph, start, tmp_path, threads):
    threads(1)  # as in the process that is killed: sums are then in one order
    whole = distilled(small_graph, start, budget=12)
    torch.save(small_graph, tmp_path / "graph.pt")
    (tmp_path / "start.yaml").write_text(start.to_yaml())
    arguments = ["graph.pt", "start.yaml", "run", "12"]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(rbm.__file__).parent.parent)},
        start_new_session=True,
    )
    table, deadline = tmp_path / "run" / "auto.csv", time.monotonic() + 300
    try:
        while not table.is_file() or table.read_text().count("\n") < 4:
            assert process.poll() is None, "it ended before it was killed"
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "run" / "config.yaml").exists(), "killed in its search"
    found = distilled(small_graph, start, budget=12, folder=tmp_path / "run", resume=True)
    assert found.trials == whole.trials
    assert found.config == whole.config
    assert apart_from_time(found) == apart_from_time(whole)


@pytest.mark.usefixtures("clock")
def test_what_is_given_restricts(small_graph, start):
    named = distilled(small_graph, start, teacher="gcn", methods=["glnn"])
    assert {(row["teacher"], row["method"]) for row in named.trials} == {("gcn", "glnn")}
    kept = distilled(small_graph, start, keep="rbm", budget=6)
    assert {row["method"] for row in kept.trials} == {"rbm"}
    assert kept.method == "rbm"
    assert "mlp" in kept.students

    class Own(nn.Module):
        def forward(self, x, edge_index):
            return x[:, :3]

    module = distilled(small_graph, start, teacher=Own(), budget=6)
    assert {row["teacher"] for row in module.trials} == {"module"}
    assert module.teacher is not None
    logits = distilled(small_graph, replace(start, setting="inductive"), teacher=small_graph.x[:, :3], budget=6)
    assert {row["teacher"] for row in logits.trials} == {"logits"}


@pytest.mark.usefixtures("clock")
def test_features_only_leaves_encodings_out_of_the_search(small_graph, start, tmp_path):
    start = start.updated({"encoding": {"deepwalk": True}})
    options = {"methods": ["mlp", "nosmog"], "features_only": True, "folder": tmp_path}
    found = distilled(small_graph, start, budget=12, **options)
    assert len(found.trials) > 4, "starts and openings"
    assert {row["encoding"] for row in found.trials if row["method"] == "mlp"} == {"none"}
    assert len({row["teacher"] for row in found.trials}) > 2
    assert found.config == features_only(found.config)
    assert set(found.encodings.values()) == {None}
    assert distilled(small_graph, start, budget=12, resume=True, **options).config == found.config
    with pytest.raises(ValueError, match=r"features_only \(was True, now absent\)"):
        distilled(small_graph, features_only(start), folder=tmp_path, methods=["mlp", "nosmog"], resume=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"auto": False, "budget": "5m"}, "budget is '5m', which only a search has"),
        ({"budget": "soon"}, "budget is 'soon', expected a time such as 90s, 10m or 1.5h"),
        ({"budget": 0}, "budget is 0, expected a time"),
        ({"budget": -3}, "budget is -3, expected a time"),
        ({"encodings": [torch.zeros(60, 2)]}, "auto and encodings do not go together"),
        ({"teacher": "gin"}, "teacher: got 'gin', expected one of sage"),
        ({"methods": ["gnn"]}, "methods is"),
    ],
)
def test_mistakes_leave_nothing(options, message, small_graph, start, tmp_path):
    with pytest.raises(ValueError, match=message):
        distilled(small_graph, start, folder=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_without_optuna(small_graph, start, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match=r"needs Optuna, which is not installed: pip install 'rbm-kernels\[tune\]'"):
        distilled(small_graph, start, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_training_beyond_the_budget_is_cut_short(small_graph, start):
    endless = start.updated({"teacher": {"max_epochs": 10**6, "patience": 10**6, "hidden_channels": 9}})
    began = time.monotonic()
    with pytest.raises(OutOfTimeError, match="phase 'teacher' was cut short"), time_limit(0.2):
        rbm.distill(small_graph, config=endless, measure_latency=False)
    space, observed = run.Space(endless, ("mlp",)), run._observed(small_graph, endless, None)
    judge = run.Judge(rbm.distill, observed, 3, space, None)
    cut = search.Search(space, judge, run.new_study(), budget=0.2, seed=0, note=lambda *_: None)
    cut.run()
    assert time.monotonic() - began < 60
    assert cut.best() is None
    assert search.rows(cut) == []
    assert run.outcome_of(cut)["trials"] == 0


def test_a_budget_below_one_training_is_told_before_the_run(small_graph, start, tmp_path):
    """The first epoch shows that the teacher takes longer. The run then keeps the settings, and the folder is whole."""
    start = start.updated({"teacher": {"max_epochs": 2000, "patience": 2000, "hidden_channels": 8}})
    console = Console(file=io.StringIO(), width=500)
    began = time.monotonic()
    found = distilled(small_graph, start, budget=0.2, folder=tmp_path / "run", console=console)
    searched = found.timings["search"]["seconds"]
    assert searched < (time.monotonic() - began) / 2, "the search stops at once"
    told = console.file.getvalue()
    assert found.verdict[0] in told
    assert told.index("the budget of 0.2 s is too small for this graph") < told.index("teacher  2000/2000")
    assert found.config == replace(start, dataset="own graph")
    assert found.trials == []
    assert not (tmp_path / "run" / "auto.csv").exists()
    assert yaml.safe_load((tmp_path / "run" / "auto.yaml").read_text())["chosen"]["needed"] > 0.2
    again = distilled(small_graph, start, folder=tmp_path / "run", resume=True)
    assert again.verdict == found.verdict


@pytest.mark.usefixtures("clock")
def test_without_a_cache_the_run_reuses_encodings_of_the_search(small_graph, start, monkeypatch):
    computed, real = [], encodings.deepwalk
    monkeypatch.setattr(encodings, "deepwalk", lambda *args, **options: computed.append(1) or real(*args, **options))
    start = start.updated({"encoding": {"deepwalk": True}})
    distilled(small_graph, start, budget=3, cache=None)
    assert len(computed) == 1


@pytest.mark.usefixtures("clock")
def test_a_folder_holds_one_search(small_graph, start, tmp_path):
    def dies(search, trial):
        if search.spent() > 2:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run, "_status", dies)
        with pytest.raises(KeyboardInterrupt):
            distilled(small_graph, start, folder=tmp_path / "run")
    with pytest.raises(FileExistsError, match="is not empty"):
        distilled(small_graph, start, folder=tmp_path / "run")
    with pytest.raises(ValueError, match=r"other settings: mlp.max_epochs \(was 6, now 7\)"):
        distilled(small_graph, start.updated({"mlp": {"max_epochs": 7}}), folder=tmp_path / "run", resume=True)
    file = tmp_path / "run" / "auto.yaml"
    before = file.read_text()
    file.write_text(before.replace("  halves: paired\n", ""))
    with pytest.raises(ValueError, match="holds a search that a former version began"):
        distilled(small_graph, start, folder=tmp_path / "run", resume=True)
    file.write_text(before)
    other = small_graph.clone()
    other.x[0, 0] += 1
    with pytest.raises(ValueError, match=r"other settings: graph"):
        distilled(other, start, folder=tmp_path / "run", resume=True)
    with pytest.raises(FileNotFoundError, match="its search is not over: resume with auto"):
        rbm.distill(small_graph, config=start, folder=tmp_path / "run", resume=True)
    rbm.distill(small_graph, config=start, folder=tmp_path / "plain", measure_latency=False)
    with pytest.raises(FileNotFoundError, match="started without a search: leave auto out"):
        distilled(small_graph, start, folder=tmp_path / "plain", resume=True)
    with pytest.raises(FileNotFoundError, match=r"has no auto\.yaml: there is no run to resume"):
        distilled(small_graph, start, folder=tmp_path / "nothing", resume=True)


def test_several_processes_are_refused(small_graph, start, monkeypatch):
    monkeypatch.setattr(run, "world_size", lambda: 2)
    with pytest.raises(ValueError, match="auto is asked for in 2 processes"):
        distilled(small_graph, start)


SET = [
    *("--set", "teacher.max_epochs=4", "--set", "mlp.max_epochs=6", "--set", "rbm.max_epochs=6"),
    *("--set", "rbm.hidden_channels=8", "--set", "encoding.deepwalk=false", "--no-plots", "--out", "run"),
]


@pytest.mark.usefixtures("clock")
def test_command(small_graph, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    torch.save(small_graph, "graph.pt")
    real = search.Search._train

    def interrupted(self, *arguments):
        if self.spent() > 3:
            raise KeyboardInterrupt
        return real(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(search.Search, "_train", interrupted)
        status, _, err = command("distill", "--dataset", "graph.pt", "--auto", "--budget", "12s", "--seed", "1", *SET)
    assert status == 130
    assert "continue by rbm distill --out run --resume --auto" in err
    assert "trial 1: mlp, sage" in err
    status, out, err = command("distill", "--out", "run", "--resume", "--auto", "--no-plots")
    assert status == 0, err
    assert "Search: " in " ".join(out.split())
    config = Config.from_yaml(tmp_path / "run" / "config.yaml")
    assert (config.dataset, config.seed, config.mlp.max_epochs) == (str(tmp_path / "graph.pt"), 1, 6)
    assert yaml.safe_load((tmp_path / "run" / "auto.yaml").read_text())["search"]["budget"] == 12
    assert command("distill", "--resume", "--out", "run", "--keep", "rbm", "--no-plots")[0] == 0
    assert rbm.load("run").layers[0].num_experts
    assert command("distill", "--config", "run/config.yaml", "--seeds", "0-1", "--out", "seeds.csv")[0] == 0


def test_seeds_leave_no_folder(command):
    status, _, err = command("distill", "--auto", "--seeds", "0-1")
    assert status == 2
    assert "--auto is about a run folder, and --seeds leaves none" in err
    assert "rbm distill --config RUN/config.yaml --seeds 0-9" in err
