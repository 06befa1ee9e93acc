"""Figures of publications of newer students next to ours under the same protocol."""

import csv
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.report.medians import RUNS, markdown

# The rows of ours for each publication: the same graphs, the same kind of split.
OURS = {"VQGraph": "newer_cpf.csv", "SimMLP": "simmlp_labels.csv"}
NODES = {"transductive": "seen", "inductive": "unseen"}


def table() -> str:
    """One line per publication, graph and setting of ``results/published.csv`` that ours has rows of: test accuracies
    of the teacher, GLNN and the method.

    Ours are those at the epoch with the best validation accuracy. The last column is the method's accuracy at the epoch
    with the best test accuracy, by which the released code of both selects.
    """
    from rbm.experiments.results import read_rows

    theirs: dict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    for row in csv.DictReader((RUNS / "published.csv").read_text(encoding="utf-8").splitlines()):
        cell = row["publication"], row["dataset"], row["setting"]
        theirs[cell][row["method"]] = f"{float(row['mean']):.2f} ± {float(row['deviation']):.2f}"
    ours: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    for publication, file in OURS.items():
        for row in read_rows(RUNS / file):
            graph = Path(row["dataset"]).stem.removesuffix("-tenth")
            ours[publication, graph, row["setting"], row["method"]].append(row)
    lines = []
    for cell, figures in theirs.items():
        methods = ("teacher", "glnn", cell[0].lower())
        rows = [ours[(*cell, method)] for method in methods]
        if not rows[2]:
            continue
        lines.append(
            [
                *(cell[0], cell[1], NODES[cell[2]], *(figures.get(method, "") for method in methods)),
                *(str(len(rows[2])), *(_mean(found, "test_at_best_val") for found in rows)),
                _mean(rows[2], "test_max"),
            ]
        )
    header = ["", "graph", "nodes", "teacher, published", "GLNN, published", "published"]
    return markdown([*header, "our seeds", "teacher, ours", "GLNN, ours", "ours", "ours, best test epoch"], lines, 3)


def _mean(rows: list[dict[str, str]], column: str) -> str:
    values = [100 * float(row[column]) for row in rows]
    return f"{fmean(values):.2f} ± {stdev(values):.2f}" if len(values) > 1 else f"{values[0]:.2f}"
