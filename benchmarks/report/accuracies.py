"""Tables of accuracies, from the rows of ``results/``: what :mod:`benchmarks.report.tables` writes into pages.

The package's own tables are imported where they are made: a summary of timings is read also where no graph library is.
"""

import json
from collections import defaultdict
from collections.abc import Sequence

from benchmarks.report.medians import RUNS, human, markdown

# Seeds that took no part in choosing these variants (docs/experts.md).
JOINT, SHORTLIST = ("experts_shortlist", "experts_seen"), ("today", "pull 1", "shared, routed lr 0.1")


def experiment(name: str) -> str:
    """What ``results/NAME.csv`` comes to, beside the paper's figures."""
    from rbm.experiments.results import read_rows
    from rbm.experiments.tables import main_table

    rows = [row for row in read_rows(RUNS / f"{name}.csv") if (row["teacher"], row["variant"]) == ("sage", "")]
    return main_table(rows) if rows else ""


def accuracy() -> str:
    """The rows of ``paper`` under the paper's protocol, without the columns of the paper's figures."""
    rows = [line.strip("| ").split(" | ") for line in experiment("paper").replace("*", "").splitlines()]
    kept = [cells[:3] + cells[5:] for cells in rows[2:] if not cells[0].endswith(")")]
    return markdown(["dataset", "setting", "seeds", "RbM", "MLP", "teacher", "RbM - MLP", "p"], kept, 2)


def gains(against: str, *names: str, variants: Sequence[str] = ()) -> str:
    """What each kind of student of ``results/searches/NAME.csv`` gains over one of them; of all variants by default."""
    from rbm.experiments.comparisons import gains_table
    from rbm.experiments.results import read_rows

    rows = [row for name in names for row in read_rows(RUNS / "searches" / f"{name}.csv")]
    return gains_table([row for row in rows if not variants or row["variant"] in ("", *variants)], against)


def bar() -> str:
    """How near each student of the searches comes to the bar of docs/experts.md."""
    from benchmarks.report.bars import HEADER, against_the_mlp
    from rbm.experiments.results import read_rows

    return markdown(HEADER, against_the_mlp(lambda name: read_rows(RUNS / "searches" / f"{name}.csv")), 2)


def experts_used() -> str:
    """``results/experts_used.csv``: what routing is worth, and what teachers leave to learn; means over its seeds."""
    from rbm.utils.files import read_csv

    found = defaultdict(list)
    for row in read_csv(RUNS / "experts_used.csv"):
        found[row["dataset"], row["setting"], row["method"]].append(row)
    columns = {
        "teacher": "teacher",
        "held_out": "student",
        "mean_expert": "mean expert",
        "other_expert": "wrong experts",
        "agreement_observed": "agrees with the teacher",
        "agreement_held_out": "agrees, held out",
        "where_teacher_is_right": "right where the teacher is",
        "where_teacher_is_wrong": "right where it is not",
    }
    table = []
    for (dataset, setting, method), rows in found.items():
        cells = [
            f"{sum(float(row[name]) for row in rows) / len(rows):.1f}" if rows[0][name] else "" for name in columns
        ]
        table.append([f"{dataset} {setting}", method, str(len(rows)), *cells])
    return markdown(["", "", "seeds", *columns.values()], table, 2)


def routing_start() -> str:
    """``results/experts_start.csv``: validation accuracies where routing begins, means over its graphs and seeds."""
    from rbm.utils.files import read_csv

    found = defaultdict(list)
    for row in read_csv(RUNS / "experts_start.csv"):
        found[row["variant"]].append(row)
    columns = ("val_last_pretraining", "val_first_routed", "val_tenth_routed", "val_best")
    table = []
    for variant, rows in found.items():
        means = [100 * sum(float(row[name]) for row in rows) / len(rows) for name in columns]
        epochs = sorted(int(row["best_epoch"]) for row in rows)
        cells = [f"{mean:.2f}" for mean in means]
        table.append([variant, str(len(rows)), *cells, f"{epochs[0]} to {epochs[-1]}"])
    header = ["", "runs", "last of pretraining", "first routed", "tenth routed", "best", "best epoch"]
    return markdown(header, table)


def students() -> str:
    """The paper's main table on the graphs where every student has run, over the seeds that all of them have."""
    from rbm.experiments.paper_tables import read_table, render
    from rbm.experiments.results import read_rows

    table, runs = read_table("main"), defaultdict(dict)
    for row in read_rows(RUNS / "paper.csv"):
        if (row["teacher"], row["protocol"], row["variant"]) == ("sage", "rbm", ""):
            runs[row["dataset"], row["setting"], row["seed"]][row["method"]] = row
    methods = {column.method for column in table.columns.values()}
    return render(table, [row for run in runs.values() if methods <= run.keys() for row in run.values()])


def newer() -> str:
    """Students and alternatives since 2024 beside ours, on the graphs and seeds that have run."""
    from rbm.experiments.paper_tables import read_table, render
    from rbm.experiments.results import read_rows

    return render(read_table("newer"), read_rows(RUNS / "newer.csv"))


def newer_serving() -> str:
    """What each needs to answer for an unseen node of Cora, how many numbers it holds, and the time of one answer."""
    from rbm.experiments.paper_tables import read_table

    found = json.loads((RUNS / "newer_latency.json").read_text())
    taken = {row["model"]: human(row["p50_ms"] / 1e3) for row in found["rows"]}
    table = []
    for title, column in read_table("newer").columns.items():
        if not column.variant and column.method in taken:
            size = f"{found['parameters'][column.method]:,}"
            table.append([title, column.sees, size, taken[column.method]])
            if column.method == "sign":
                table.append(
                    [f"{title}, new node", "features, and what its neighbours have stored", size, taken["new_nodes"]]
                )
    return markdown(["", "sees when it answers", "parameters", "one node"], table, 2)
