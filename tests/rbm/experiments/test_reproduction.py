"""The paper's tables: what they run, resuming after a kill, and what they show."""

import csv
from dataclasses import replace

import pytest

from rbm.distillation.registry import METHODS
from rbm.experiments import runner as experiments
from rbm.experiments.paper_tables import lines_of, read_table, render, table_names, table_of, write_outputs
from rbm.experiments.results import append_rows, read_rows
from rbm.experiments.runner import run_experiment
from rbm.experiments.tables import paper_tables

QUICK = {
    "teacher": {"max_epochs": 3, "hidden_channels": 8},
    **{name: {"max_epochs": 2, "hidden_channels": 8} for name in ("rbm", "glnn", "krd", "nosmog", "cohop")},
    "mlp": {"max_epochs": 2},
    "moe": {"max_epochs": 2, "hidden_channels": 8, "pretrain_epochs": 1},
    "encoding": {"walks_per_node": 1, "walk_length": 5, "embedding_dim": 4},
}


def quick(name: str, settings: tuple[str, ...] = ("inductive",), **more) -> list[experiments.Experiment]:
    table = replace(read_table(name), settings=settings)
    return table.experiments(**{"datasets": ("digits",), "seeds": (0,), "changes": QUICK, **more})


@pytest.mark.parametrize("name", table_names())
def test_every_table_is_sound(name):
    table = read_table(name)
    assert table.about.endswith(".") or table.about.endswith("?") or ":" in table.about
    assert {column.method for column in table.columns.values()} <= {"teacher", *METHODS}
    assert all((column.changes == {}) == (column.variant == "") for column in table.columns.values())
    if table.paper:
        printed = next(iter(next(iter(paper_tables()[table.paper].values())).values()))
        assert set(printed) - {"Teacher"} <= set(table.columns), "no column of the paper is missing"
    for experiment in table.experiments(datasets=("cora", "amazon-photo")):
        assert list(experiment.tasks())


def test_unknown_tables_are_listed():
    with pytest.raises(ValueError, match="table is 'mian', expected one of ablation, advanced, annealing,"):
        read_table("mian")


def figures(path) -> list[tuple]:
    """The values that equal runs share: everything except times."""
    rows = read_rows(path)
    return sorted(tuple(row[name] for name in row if name != "seconds") for row in rows)


def test_a_table_survives_a_kill_and_shares_its_rows(tmp_path, monkeypatch):
    whole, killed = tmp_path / "whole.csv", tmp_path / "killed.csv"
    run_experiment(quick("ensemble"), whole, cache=tmp_path / "cache")
    run, calls = experiments._run_task, []

    def dying(*given):
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run(*given)

    monkeypatch.setattr(experiments, "_run_task", dying)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(quick("ensemble"), killed, cache=tmp_path / "cache")
    assert 0 < len(figures(killed)) < len(figures(whole))
    run_experiment(quick("ensemble"), killed, cache=tmp_path / "cache")
    assert figures(killed) == figures(whole)

    before, done = len(calls), len(figures(killed))
    run_experiment(quick("annealing"), killed, cache=tmp_path / "cache")
    assert len(calls) - before == 4, "its first column is the RbM student that is there"
    assert len(figures(killed)) == done + 4


def test_several_experiments_take_turns_by_seed(tmp_path):
    out = tmp_path / "rows.csv"
    run_experiment(quick("ablation", seeds=(1, 0)), out, cache=tmp_path / "cache")
    with open(out) as file:
        seeds = [row["seed"] for row in csv.DictReader(file) if row["method"] == "rbm"]
    assert seeds == ["1"] * 5 + ["0"] * 5


def row(method: str, seed: int, accuracy: float, **changed) -> dict[str, str]:
    key = {
        "dataset": "cora",
        "setting": "inductive",
        "protocol": "rbm",
        "teacher": "sage",
        "preset": "clean",
        "variant": "",
    }
    found = {"test_at_best_val": str(accuracy), "test_max": str(accuracy + 0.01)}
    return {**key, **changed, "method": method, "seed": str(seed), **found}


ROWS = [
    *(
        row(method, seed, accuracy + seed / 100)
        for method, accuracy in (("teacher", 0.9), ("glnn", 0.7))
        for seed in (0, 1)
    ),
    *(
        row("rbm", 0, 0.8),
        row("rbm", 1, 0.8),
        row("krd", 0, 0.95),
        row("rbm", 0, 0.6, dataset="citeseer"),
        row("krd", 0, 0.7, dataset="citeseer"),
    ),
    *(row("rbm", 0, 0.3, protocol="cpf"), row("rbm", 0, 0.3, variant="w/o SS"), row("rbm", 0, 0.1, teacher="gcn")),
]


def test_a_table_marks_the_best_and_leaves_open_what_was_not_run():
    """KRD has one of two seeds on Cora, so its figure there is neither the best one nor part of the statistics."""
    lines = render(read_table("main"), ROWS).splitlines()
    assert lines[0] == "| | seeds | GraphSAGE | GLNN | KRD | NOSMOG | CoHOp | MLP | RbM |"
    assert lines[2] == (
        "| cora, inductive | 2 | 90.50 ± 0.71 (82.13) | *70.50 ± 0.71* (73.28) | 95.00, 1 seed (65.44) | (81.03) |"
        " (80.38) |  | **80.00 ± 0.00** (77.44) |"
    )
    assert lines[3].startswith("| citeseer, inductive | 1 | (70.24) |")
    assert "**70.00** (71.74)" in lines[3]
    assert lines[4] == "| median Score, inductive | | 1.00 | 0.00 | 1.00 |  |  |  | 0.24 |"
    assert "Skillings-Mack over 2 graphs, inductive: " in lines[6]
    assert lines[6].endswith("the paper prints <0.003, over nine graphs.")
    assert "81.00" in render(read_table("main"), ROWS, "test_max")


def test_the_student_with_most_seeds_is_not_the_best_for_want_of_others():
    """Regression test: RbM, which other tables run too, was bold in each table of the ablation."""
    variants = {"": (0.7, 5), "w/o VQ": (0.8, 3), "w/o SS": (0.75, 3), "w/o LB": (0.9, 1)}
    rows = [row("rbm", seed, a, variant=name) for name, (a, seeds) in variants.items() for seed in range(seeds)]
    line = render(read_table("ablation"), rows).splitlines()[2]
    assert "| cora, inductive | 3 | 70.00 ± 0.00, 5 seeds (" in line
    assert "**80.00 ± 0.00**" in line
    assert "*75.00 ± 0.00*" in line
    assert "| 90.00, 1 seed (" in line, "one seed is no mean"


def test_a_small_p_value_is_not_printed_as_zero():
    order = {"teacher": 0.9, "glnn": 0.7, "krd": 0.5, "nosmog": 0.3, "cohop": 0.1}
    rows = [row(method, 0, accuracy, dataset=f"graph{i}") for method, accuracy in order.items() for i in range(9)]
    [sentence] = [line for line in render(read_table("main"), rows).splitlines() if line.startswith("Skillings")]
    assert "36.00, 4 degrees of freedom, p < 0.0001 (chi-square), < 0.0001 (permutations)" in sentence


def test_lines_keep_protocols_and_teachers_apart():
    assert [line[:3] for line in lines_of(read_table("gcn"), ROWS)] == []
    under_gcn = [row(method, 0, 0.8, teacher="gcn", setting="transductive") for method in ("rbm", "mlp")]
    of_gcn = lines_of(read_table("gcn"), under_gcn)
    assert of_gcn[0].ours["RbM"].mean == 80.0
    assert of_gcn[0].paper["RbM"].mean == 85.02


def test_a_graph_that_another_table_has_run_is_no_line():
    ablation = read_table("ablation")
    assert lines_of(ablation, [row("rbm", 0, 0.8)]) == []
    (line,) = lines_of(ablation, [row("rbm", 0, 0.8), row("rbm", 0, 0.7, variant="w/o SS")])
    assert set(line.ours) == {"RbM", "w/o SS"}
    alone = table_of([row("rbm", 0, 0.8), row("teacher", 0, 0.9)])
    assert len(lines_of(alone, [row("rbm", 0, 0.8)])) == 1, "a table of one student has nothing to wait for"


def test_a_table_of_whatever_there_is():
    rows = [row("rbm", 0, 0.8), row("moe", 0, 0.7), row("teacher", 0, 0.9), row("rbm", 0, 0.6, variant="w/o SS")]
    lines = render(table_of([*rows, row("mine", 0, 0.5)]), [*rows, row("mine", 0, 0.5)]).splitlines()
    assert lines[0] == "| | seeds | GraphSAGE | RbM | RbM w/o SS | MoE | mine |"
    assert lines[2].startswith("| cora, inductive | 1 | 90.00 (82.13) | **80.00** (77.44) |")
    assert render(table_of([]), []).startswith("| | seeds |")


@pytest.mark.parametrize(
    ("accuracies", "marked"),
    [
        ({"a": 0.8}, ["**80.00**"]),
        ({"a": 0.7, "b": 0.8, "c": 0.6}, ["*70.00*", "**80.00**", "60.00"]),
        ({"a": 0.8, "b": 0.8, "c": 0.7}, ["**80.00**", "**80.00**", "70.00"]),
        ({"a": 0.8, "b": 0.8, "c": 0.8}, ["**80.00**", "**80.00**", "**80.00**"]),
        ({"a": 0.7, "b": 0.8, "c": 0.7}, ["*70.00*", "**80.00**", "*70.00*"]),
    ],
)
def test_equal_students_have_the_same_mark(accuracies, marked):
    """Regression test: of two that were equal, one was bold and the other italic."""
    rows = [row(method, 0, accuracy) for method, accuracy in accuracies.items()]
    assert render(table_of(rows), rows).splitlines()[2] == f"| cora, inductive | 1 | {' | '.join(marked)} |"


def test_pairs_of_graph_and_teacher_are_not_counted_as_graphs():
    """Regression test: two graphs with two teachers were four graphs."""
    pairs = [(graph, teacher) for graph in ("cora", "citeseer") for teacher in ("sage", "gcn")]
    rows = [row(m, 0, a, dataset=g, teacher=t) for g, t in pairs for m, a in (("a", 0.8), ("b", 0.7))]
    assert "Skillings-Mack over 4 pairs of graph and teacher, inductive: " in render(table_of(rows), rows)
    of_one = [given for given in rows if given["teacher"] == "gcn"]
    assert "Skillings-Mack over 2 graphs, inductive: " in render(table_of(of_one), of_one)


def test_the_rounding_of_a_mean_is_no_lead():
    rows = [row("a", seed, value) for seed, value in enumerate((0.8, 0.70011))]
    rows += [row("b", seed, value) for seed, value in enumerate((0.799, 0.70111))]
    assert render(table_of(rows), rows).splitlines()[2].count("**") == 4


def test_the_papers_figures_are_those_of_the_same_teacher():
    """Regression test: students of GCN, of an MLP and so on stood beside the paper's students of GraphSAGE."""
    rows = [row(m, 0, 0.8, teacher=t, setting="transductive") for t in ("sage", "gcn", "mlp") for m in ("mlp", "rbm")]
    found = {line.teacher: line.paper for line in lines_of(table_of(rows), rows)}
    assert found["sage"]["RbM"].mean == 84.86
    assert (found["gcn"], found["mlp"]) == ({}, {})
    of_gcn = [given for given in rows if given["teacher"] == "gcn"]
    assert lines_of(table_of(of_gcn), of_gcn)[0].paper["RbM"].mean == 85.02


def test_outputs(tmp_path):
    page, picture = write_outputs(read_table("main"), ROWS, tmp_path / "results", "rbm reproduce main")
    text = page.read_text()
    assert text.startswith("# The main table: every method with the same GraphSAGE teacher.\n\n`rbm reproduce main`\n")
    assert text.count("| cora, inductive |") == 2, "at the best validation, and the maximum over epochs"
    assert picture.stat().st_size > 10_000
    assert write_outputs(read_table("main"), [], tmp_path / "empty", "rbm")[0].is_file()


def test_a_page_names_its_command_as_the_shell_takes_it(command, tmp_path):
    append_rows(tmp_path / "my rows.csv", [])
    assert command("reproduce", "main", "--no-run", "--out", tmp_path / "my rows.csv")[0] == 0
    page = (tmp_path / "my rows" / "main.md").read_text()
    assert f"`rbm reproduce main --no-run --out '{tmp_path}/my rows.csv'`" in page


def test_files_are_named_as_they_are(command, tmp_path):
    """Regression test: brackets in a path were taken for markup and left out, and long paths broken into lines."""
    rows = tmp_path / ("a" * 100) / "rows [old].csv"
    rows.parent.mkdir()
    append_rows(rows, [])
    status, out, _ = command("reproduce", "main", "--no-run", "--out", rows)
    assert (status, f"rows: {rows}; {rows.with_suffix('')}/main.md" in out) == (0, True)
