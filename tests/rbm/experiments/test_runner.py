"""Several runs in one file: complete and resumable, and each row has its provenance."""

import csv
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rbm.config import PROTOCOLS, Config
from rbm.datasets.load import graph_settings
from rbm.distillation.registry import METHODS
from rbm.experiments import runner as experiments
from rbm.experiments.experiment import Experiment, parse_seeds
from rbm.experiments.paper_tables import read_table, table_names
from rbm.experiments.results import config_fingerprint, read_rows, row_key
from rbm.experiments.runner import check_rows, run_experiment
from rbm.nn.saved_student import STUDENTS
from rbm.teachers import prepare
from rbm.utils.locks import only_process
from rbm.utils.plugins import load_plugin

ROOT = Path(__file__).resolve().parents[3]
QUICK = {
    "teacher": {"max_epochs": 4, "hidden_channels": 8},
    "mlp": {"max_epochs": 3},
    "rbm": {"max_epochs": 3, "pretrain_epochs": 1},
    "moe": {"max_epochs": 3, "pretrain_epochs": 1},
    "glnn": {"max_epochs": 3},
    "krd": {"max_epochs": 3, "hidden_channels": 16},
    "encoding": {"walks_per_node": 1, "walk_length": 5, "embedding_dim": 4},
}


def quick(**options) -> Experiment:
    return Experiment(**{"datasets": ("digits",), "seeds": (0, 1), "changes": QUICK, **options})


def test_one_row_a_model_and_nothing_twice(tmp_path):
    experiment = quick(
        settings=("transductive", "inductive"), variants={"": {}, "alone": {"distill": {"neighbors": False}}}
    )
    rows = run_experiment(experiment, tmp_path / "r.csv", cache=tmp_path / "cache")
    assert len(rows) == 2 * 2 * (1 + 2 * 2), "settings x seeds x (teacher and variants x students)"
    before = (tmp_path / "r.csv").read_bytes()
    assert run_experiment(experiment, tmp_path / "r.csv") == rows
    assert (tmp_path / "r.csv").read_bytes() == before
    assert len(list((tmp_path / "cache").glob("teacher-*"))) == 4, "variants share a teacher"

    more = run_experiment(quick(settings=("transductive",), seeds=(0, 1, 2)), tmp_path / "r.csv")
    assert {row["seed"] for row in more} == {"0", "1", "2"}
    assert {row["variant"] for row in more} == {""}
    assert (tmp_path / "r.csv").read_bytes().startswith(before)


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_row_of_a_teacher_that_was_removed_comes_back(tmp_path, jobs):
    """Regression test: it was missing for ever, because every student had its row."""
    experiment = quick(methods=("mlp",), variants={"": {}, "alone": {"distill": {"neighbors": False}}})
    rows = run_experiment(experiment, tmp_path / "r.csv", cache=tmp_path / "cache")
    lines = (tmp_path / "r.csv").read_text().splitlines(keepends=True)
    kept = [line for line in lines if ",teacher,1," not in line]
    assert len(kept) == len(lines) - 1
    (tmp_path / "r.csv").write_text("".join(kept))
    again = run_experiment(experiment, tmp_path / "r.csv", jobs=jobs)
    shown, found = ({row_key(row): (row["val"], row["config"]) for row in given} for given in (rows, again))
    assert found == shown
    assert len((tmp_path / "r.csv").read_text().splitlines()) == len(lines)


def test_a_graph_file_that_has_changed_is_read_again(tmp_path, small_graph):
    path = tmp_path / "mine.pt"
    changes = {**QUICK, "distill": {"source": "teacher"}}
    seen = []
    for shift in (0.0, 1.0):
        small_graph.x += shift
        torch.save(small_graph, path)
        mine = quick(datasets=(str(path),), seeds=(0,), methods=("glnn",), changes=changes)
        run_experiment(mine, tmp_path / f"{shift}.csv", cache=None)
        seen.append(experiments.remembered_dataset(graph_settings(mine.config(next(mine.tasks()))), "cpu").x.mean())
    assert seen[1] - seen[0] > 0.9


def test_rows_of_a_graph_file_that_has_changed_are_not_taken_for_new_ones(tmp_path, small_graph):
    """Regression test: the rows of the former file were printed as the results of the new one."""
    path, rows = tmp_path / "mine.pt", tmp_path / "r.csv"
    changes = {**QUICK, "distill": {"source": "teacher"}}
    mine = quick(datasets=(str(path),), seeds=(0,), methods=("glnn",), changes=changes)
    torch.save(small_graph, path)
    first = run_experiment(mine, rows)
    written = path.read_bytes()
    path.write_bytes(written)  # the same graph, written later
    assert run_experiment(mine, rows) == first
    small_graph.x += 1
    torch.save(small_graph, path)
    for seeds in ((0,), (1,)):  # a row of another seed would stand beside the former ones
        with pytest.raises(ValueError, match=r"rows of another graph: .*mine\.pt has changed since"):
            run_experiment(replace(mine, seeds=seeds), rows)
    rows.write_text(re.sub(r"(,[0-9a-f]{16})-[0-9a-f]{16},", r"\1,", rows.read_text()))  # of an earlier version
    assert [row["val"] for row in run_experiment(mine, rows)] == [row["val"] for row in first]
    path.unlink()
    assert len(run_experiment(mine, rows)) == len(first), "nothing is left to run"


def test_rows_of_other_methods(tmp_path):
    (tmp_path / "e.yaml").write_text("methods: [glnn, moe]\nseeds: 0-1\n")
    experiment = replace(Experiment.from_yaml(tmp_path / "e.yaml"), changes=QUICK)
    rows = run_experiment(experiment, tmp_path / "r.csv")
    assert [(row["method"], row["seed"]) for row in rows] == [
        (method, seed) for seed in ("0", "1") for method in ("teacher", "glnn", "moe")
    ]
    glnn, moe = rows[1:3]
    assert glnn["parameters"] == glnn["active_parameters"]
    assert int(moe["parameters"]) > int(moe["active_parameters"])
    wider = replace(experiment, methods=("glnn", "moe", "krd"))
    assert [row["method"] for row in run_experiment(wider, tmp_path / "r.csv")][6:] == ["krd", "krd"]


def test_killed_and_continued_gives_the_same_figures(tmp_path, monkeypatch):
    whole = run_experiment(quick(), tmp_path / "whole.csv")
    ran = []
    real = experiments._run_task

    def dies(*arguments):
        if ran:
            raise KeyboardInterrupt
        ran.append(arguments[2])
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(experiments, "_run_task", dies)
        with pytest.raises(KeyboardInterrupt):
            run_experiment(quick(), tmp_path / "killed.csv")
    assert [row["method"] for row in read_rows(tmp_path / "killed.csv")] == ["teacher", *ran], "written once trained"
    with open(tmp_path / "killed.csv", "a") as file:
        file.write("digits,transductive,rbm,sage,clean,,mlp,1,0.9")  # a line truncated by a kill
    resumed = run_experiment(quick(), tmp_path / "killed.csv")
    strip = lambda rows: [{k: v for k, v in row.items() if k != "seconds"} for row in rows]  # noqa: E731
    assert strip(resumed) == strip(whole)
    with open(tmp_path / "killed.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == len(whole)


def test_a_link_leads_to_one_file_with_one_lock(tmp_path):
    """Regression test: two processes, one of them with a link, wrote every row twice."""
    file, link = tmp_path / "rows.csv", tmp_path / "links" / "rows.csv"
    link.parent.mkdir()
    link.symlink_to(file)
    with only_process(tmp_path / ".rows.csv.lock", "it", "wait"), pytest.raises(BlockingIOError, match="in use"):
        run_experiment(quick(), link)
    rows = run_experiment(quick(seeds=(0,), methods=("mlp",)), link)
    file.write_text(file.read_text()[:-30])  # as a kill leaves it
    assert len(run_experiment(quick(seeds=(0,), methods=("mlp",)), link)) == len(rows)
    assert link.is_symlink(), "the file that it leads to was repaired"
    assert len(read_rows(file)) == len(rows)


def test_a_teacher_from_the_cache_has_no_seconds_of_training(tmp_path):
    for name, trained in (("first.csv", True), ("second.csv", False)):
        rows = run_experiment(quick(), tmp_path / name, cache=tmp_path / "cache")
        assert [bool(row["seconds"]) for row in rows] == [row["method"] != "teacher" or trained for row in rows]


def test_models_share_a_teacher_even_without_a_cache(tmp_path, monkeypatch):
    trained = []
    real = prepare.build_teacher_trainer
    monkeypatch.setattr(prepare, "build_teacher_trainer", lambda *given: trained.append(given) or real(*given))
    run_experiment(quick(seeds=(0,)), tmp_path / "r.csv")
    assert len(trained) == 1


@pytest.mark.usefixtures("forked_workers")
def test_processes_side_by_side_give_the_same_figures(tmp_path, monkeypatch, one_thread):
    monkeypatch.setattr("rbm.utils.parallel.os.cpu_count", lambda: 2)  # one thread each, as in this process
    figures = lambda rows: {(row["method"], row["seed"]): row["test_at_best_val"] for row in rows}  # noqa: E731
    alone = run_experiment(quick(), tmp_path / "one.csv")
    both = run_experiment(quick(), tmp_path / "two.csv", jobs=2, cache=tmp_path / "cache")
    assert figures(alone) == figures(both)


def test_protocols_are_told_apart(tmp_path):
    rows = [*run_experiment(quick(seeds=(0,)), tmp_path / "r.csv")]
    rows += run_experiment(quick(seeds=(0,), protocol="cpf"), tmp_path / "r.csv")
    assert [row["protocol"] for row in rows] == ["rbm"] * 3 + ["cpf"] * 3
    assert rows[0]["test_at_best_val"] != rows[3]["test_at_best_val"], "the teacher of another split"


def test_rows_of_other_settings_are_not_taken_for_ours(tmp_path):
    run_experiment(quick(seeds=(0,)), tmp_path / "r.csv")
    other = quick(seeds=(0,), changes={**QUICK, "distill": {"label_weight": 0.9}})
    with pytest.raises(ValueError, match=r"from other settings .* or its variant another name$"):
        run_experiment(other, tmp_path / "r.csv")
    (tmp_path / "foreign.csv").write_text("a,b\n1,2\n")
    with pytest.raises(
        ValueError, match=r"foreign\.csv: line 1 lacks .* and has the columns 'a', 'b', which no result has; exp"
    ):
        run_experiment(quick(), tmp_path / "foreign.csv")


def test_the_teacher_of_other_settings_is_not_taken_for_ours(tmp_path):
    """The row of a method without a teacher is the same whatever the teacher's settings are."""
    one = quick(seeds=(0,), methods=("cohop",), changes={**QUICK, "cohop": {"max_epochs": 2}})
    run_experiment(one, tmp_path / "r.csv")
    longer = replace(one, methods=("cohop", "glnn"), changes={**one.changes, "teacher": {"max_epochs": 5}})
    with pytest.raises(ValueError, match=r"teacher 0 from other settings \(.*a file of its own$"):
        run_experiment(longer, tmp_path / "r.csv")
    wider = replace(one, methods=("cohop", "glnn"), variants={"wide": {"inflate": 2}})
    assert len(run_experiment(wider, tmp_path / "r.csv")) == 3, "inflate widens students, not the teacher"


ORPHANS = """
import sys
from rbm.experiments.runner import Experiment, run_experiment
if __name__ == "__main__":
    quick = {name: {"max_epochs": 1} for name in ("teacher", "mlp", "rbm")}
    changes = {**quick, "encoding": {"deepwalk": False}}
    run_experiment(Experiment(seeds=tuple(range(1000)), changes=changes), sys.argv[1], jobs=2)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc for the children of a process")
def test_workers_end_with_the_process_that_they_work_for(tmp_path):
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    run = subprocess.Popen([sys.executable, str(script), str(tmp_path / "rows.csv")])

    def workers() -> list[int]:
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        return [pid for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]

    def within(seconds: float, what) -> bool:
        end = time.monotonic() + seconds
        while not (found := what()) and time.monotonic() < end:
            time.sleep(0.1)
        return found

    try:
        assert within(600, lambda: len(workers()) == 2 and (tmp_path / "rows.csv").exists())
        left = workers()
    finally:
        run.kill()
        run.wait()
    assert within(120, lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))


def test_fingerprints_differ_with_the_settings_not_with_the_folder():
    config = quick().config(next(quick().tasks()))
    assert config_fingerprint(config, "rbm") == config_fingerprint(config.updated({"root": "/elsewhere"}), "rbm")
    changed = config.updated({"rbm": {"lr": 0.02}})
    assert config_fingerprint(config, "rbm") != config_fingerprint(changed, "rbm")
    assert config_fingerprint(config, "glnn") == config_fingerprint(changed, "glnn"), "it reads no such section"
    wide = config.updated({"inflate": 4})
    assert config_fingerprint(config, "teacher") == config_fingerprint(wide, "teacher"), "students alone are wider"
    assert config_fingerprint(config, "glnn") != config_fingerprint(wide, "glnn")


@pytest.mark.parametrize("method", sorted(METHODS))
def test_fingerprints_differ_with_whose_soft_labels_are_learned(method):
    found = [config_fingerprint(Config().updated({"distill": {"source": s}}), method) for s in ("auto", "teacher")]
    alike = method in ("cohop", "labels", "simmlp", "tined", "tined_plus", "vqgraph")
    assert (found[0] == found[1]) == alike


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("0-3", (0, 1, 2, 3)), ("0,3,7-9", (0, 3, 7, 8, 9)), (5, (5,)), ([2, 1], (2, 1)), ("1,1", (1,))],
)
def test_seeds(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "3-1", "0-"])
def test_wrong_seeds(text):
    with pytest.raises(ValueError, match="seeds is"):
        parse_seeds(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("datasets: [digits]\nseeds: 0-1\nfoo: 1", "expected the keys"),
        ("- 1", "expected the keys"),
        ("a: [", "is not valid YAML"),
        ("methods: [gnn]", "methods holds 'gnn'"),
        ("methods: [mlp, glnn, mlp]", "methods holds 'mlp' twice, which would be trained twice; expected each once"),
        ("datasets: [digits, digits]", "datasets holds 'digits' twice"),
        ("settings: [both]", "settings holds 'both'"),
        ("preset: best", "preset is 'best'"),
        ("protocol: gnn", "protocol is 'gnn', expected one of rbm, cpf"),
        ("datasets: [coral]", "did you mean 'cora'"),
        ("changes: {rbm: {lrr: 1}}", "unknown setting rbm.lrr"),
        ("variants: {wide: {rbm: {hidden_channels: 0}}}", "rbm.hidden_channels is 0"),
        ("datasets: 3", "datasets is 3, expected a list of names"),
        ("datasets: [[cora]]", r"datasets is \(\['cora'\],\), expected a list of names"),
        ("preset: [clean]", r"preset is \['clean'\], expected a name"),
        ("changes: 3", "changes is 3, expected sections with settings"),
        ("changes: {teacher: {name: gcn}}", "changes set teacher.name to 'gcn', but .*'sage'; set the key teacher of"),
        (
            "changes: {setting: inductive}",
            "changes set setting to 'inductive', but .*'transductive'; set the key",
        ),
        ("dataset_changes: {digits: {seed: 3}}", "changes set seed to 3, but .*'?0'?; set the key seeds"),
        ("variants: {a: {preset: paper}}", "changes set preset to 'paper', but .*'clean'; set the key preset"),
        ("teacher: gnn", "teacher: got 'gnn', expected one of sage, gcn"),
        ("teacher: gat\nmethods: [glnn, tined]", "tined and tined_plus copy the layers of a teacher sage, gcn"),
        ("dataset_changes: [cora]", r"dataset_changes is \['cora'\], expected sections with settings by dataset"),
        ("dataset_changes: {cora: {rbm: {num_experts: 4}}}", "dataset_changes holds 'cora', expected some of digits"),
        ("dataset_changes: {digits: {rbm: {hidden_channels: 0}}}", "rbm.hidden_channels is 0"),
        ("null: 1\n2: 3", r"e.yaml holds \[2, None\], expected the keys changes"),  # which Python cannot sort
        ("changes: {rbm.lr: 0.1}", "unknown setting rbm.lr; .*; write rbm: {lr: VALUE}, as sections are nested"),
        ("variants: [wide]", r"variants is \['wide'\], expected sections with settings by name"),
        ("variants: {wide: 3}", "variants is .*, expected sections with settings by name"),
        ('variants: {"two\\nlines": {}}', "expected sections with settings by name, each name in one line"),
        ("seeds: 0-1000000000000", "seeds is '0-1000000000000', expected numbers below"),
        ("seeds:", "experiment file .*e.yaml: seeds is None, expected numbers and ranges"),
        ("seeds: [0, 1.5]", r"seeds is \[0, 1\.5\], expected numbers and ranges"),
        ("seeds: []", r"seeds is \[\], which names 0 seeds"),
        ("variants: {deep: {teacher: {num_layers: 4}}}", "variant 'deep' changes the teacher"),
        ("variants: {a: {}, b: {evaluate_on: validation}}", "variant 'b' changes evaluate_on, on which the teacher"),
        ("variants: {a: {}, b: {sampling: {batch_size: 64}}}", "variant 'b' changes sampling, on which the teacher"),
    ],
)
def test_wrong_files_are_refused_before_anything_runs(tmp_path, content, message):
    (tmp_path / "e.yaml").write_text(content)
    with pytest.raises(ValueError, match=message):
        Experiment.from_yaml(tmp_path / "e.yaml")


def test_changes_of_one_dataset_come_after_those_of_all_and_before_a_variant(tmp_path):
    (tmp_path / "e.yaml").write_text(
        "datasets: [digits, cora]\nchanges: {rbm: {num_experts: 5, lr: 0.1}}\n"
        "dataset_changes: {Cora: {rbm: {num_experts: 6, dropout: 0.1}}}\nvariants: {a: {}, b: {rbm: {dropout: 0.2}}}\n"
    )
    experiment = Experiment.from_yaml(tmp_path / "e.yaml")
    made = {(task.dataset, task.variant): experiment.config(task).rbm for task in experiment.tasks()}
    assert [made["cora", name].num_experts for name in "ab"] == [6, 6]
    assert [made["cora", name].dropout for name in "ab"] == [0.1, 0.2]
    assert made["digits", "a"].num_experts == 5
    assert made["cora", "a"].lr == 0.1


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        Experiment.from_yaml(tmp_path / "no.yaml")


def test_missing_graphs_are_noticed_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "distill", lambda *_, **__: pytest.fail("a run was begun"))
    out = tmp_path / "rows.csv"
    with pytest.raises(FileNotFoundError, match=r"Planetoid/Cora/raw lacks ind\.cora\.x"):
        run_experiment(quick(datasets=("digits", "cora")), out, root=str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"AttributedGraphDataset/citeseer/raw lacks attrs\.npz"):
        run_experiment(quick(datasets=("digits", "citeseer"), protocol="cpf"), out, root=str(tmp_path))
    assert not out.exists()


@pytest.fixture
def _registries(monkeypatch):
    """Undo what a plugin registers."""
    registries = (METHODS, STUDENTS)
    before = [dict(registry) for registry in registries]
    monkeypatch.setattr("rbm.utils.plugins._loaded", [])
    yield
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)


@pytest.mark.usefixtures("_registries")
@pytest.mark.parametrize("file", sorted((ROOT / "experiments" / "searches").glob("*.yaml")), ids=lambda file: file.stem)
def test_committed_rows_are_those_of_their_file(file):
    """Running the file again, with the plugin that it names, continues from these rows."""
    for plugin in re.findall(r"--plugin (\S+)", file.read_text()):
        load_plugin(ROOT / plugin)
    rows = read_rows(ROOT / "results" / "searches" / f"{file.stem}.csv")
    assert len(check_rows(rows, Experiment.from_yaml(file))) == len(rows)


@pytest.mark.parametrize("name", table_names())
def test_committed_rows_are_those_of_the_papers_tables(name):
    rows = read_rows(ROOT / "results" / "paper.csv")
    for protocol in PROTOCOLS:
        of_protocol = [row for row in rows if row["protocol"] == protocol]
        datasets = tuple(dict.fromkeys(row["dataset"] for row in of_protocol)) or ("cora",)
        table = replace(read_table(name), protocol=protocol)
        for experiment in table.experiments(datasets=datasets, seeds=tuple(range(10))):
            assert len(check_rows(of_protocol, experiment)) == len(of_protocol)
