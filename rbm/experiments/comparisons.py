"""Paired differences between methods over many graphs.

A cell is a graph in one setting. Differences are taken per seed, for which both sides had the same split and teacher. A
single cell is noisy; to choose a default, the mean over cells matters.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from scipy.stats import t as student_t

from rbm.experiments.results import ACCURACIES
from rbm.experiments.statistics import p_text, without_rounding
from rbm.experiments.tables import graph_names, group_rows, table_line

Cells = dict[tuple[str, ...], dict[int, float]]  # cell -> seed -> per cent


class Gain(NamedTuple):
    """The gain of one kind of row over another.

    Attributes:
        difference: in points, the mean over cells of each cell's mean over seeds.
        error: its standard error, with fixed cells and random seeds within them.
        p: two-sided p-value of Student's t with Welch-Satterthwaite degrees of freedom; NaN if a cell has one seed.
        cells: differences by cell.
        pairs: the number of runs compared on each side.
    """

    difference: float
    error: float
    p: float
    cells: dict[tuple[str, ...], float]
    pairs: int


def gain(first: Cells, second: Cells) -> Gain:
    """``first - second`` over the cells and seeds that both have.

    Raises:
        ValueError: they have none in common.
    """
    found = {}
    for cell in first.keys() & second.keys():
        seeds = first[cell].keys() & second[cell].keys()
        if seeds:
            found[cell] = [without_rounding(first[cell][seed] - second[cell][seed]) for seed in sorted(seeds)]
    if not found:
        raise ValueError("no graph, setting and seed that both have; a comparison needs the same runs of both")
    means = {cell: without_rounding(statistics.fmean(values)) for cell, values in sorted(found.items())}
    difference, pairs = without_rounding(statistics.fmean(means.values())), sum(map(len, found.values()))
    if min(map(len, found.values())) < 2:
        return Gain(difference, float("nan"), float("nan"), means, pairs)
    # Variances of the cells' means; the joint mean is their average.
    parts = [(statistics.variance(values) / len(values), len(values) - 1) for values in found.values()]
    total = sum(part for part, _ in parts)
    error = math.sqrt(total) / len(parts)
    if total == 0:
        return Gain(difference, 0.0, 1.0 if difference == 0 else float("nan"), means, pairs)
    freedom = total**2 / sum(part**2 / free for part, free in parts)
    return Gain(difference, error, float(2 * student_t.sf(abs(difference / error), freedom)), means, pairs)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for their number (Holm, 1979), in the given order; NaN stays NaN and does not count."""
    order = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    corrected, largest = [float("nan")] * len(p_values), 0.0
    for rank, (p, i) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p))
        corrected[i] = largest
    return corrected


def kind_of(method: str, variant: str) -> str:
    """The kind of a row: ``rbm``, or with a variant ``rbm, NAME``."""
    return f"{method}, {variant}" if variant else method


def kinds(rows: list[dict[str, str]], column: str = "test_at_best_val") -> dict[str, Cells]:
    """A column in per cent by kind of row (:func:`kind_of`), in row order.

    Raises:
        ValueError: the column is not one of accuracies.
    """
    if column not in ACCURACIES:
        raise ValueError(f"column is {column!r}, expected one of {', '.join(ACCURACIES)}")
    found: dict[str, Cells] = defaultdict(dict)
    groups = group_rows(rows)
    names = graph_names(groups)
    for group, methods in groups.items():
        for method, runs in methods.items():
            cell = (names[group], group.setting)
            found[kind_of(method, group.variant)][cell] = {seed: 100 * float(row[column]) for seed, row in runs.items()}
    return dict(found)


def _share_runs(first: Cells, second: Cells) -> bool:
    """Whether both have a cell with a seed in common."""
    return any(first[cell].keys() & second[cell].keys() for cell in first.keys() & second.keys())


def gains_table(rows: list[dict[str, str]], against: str, column: str = "test_at_best_val") -> str:
    """A Markdown table with the gain of each kind of student over the kind ``against``, in points over all cells.

    ``p`` has Holm's correction for the number of lines.

    Raises:
        ValueError: an unknown kind of row, one that no other student can be compared with, or a column that is not one
            of accuracies.
    """
    found = kinds(rows, column)
    if against not in found:
        raise ValueError(f"against is {against!r}, expected one of these kinds of row: {'; '.join(found)}")
    others = [kind for kind in found if kind not in (against, "teacher") and _share_runs(found[kind], found[against])]
    if not others:
        raise ValueError(f"against is {against!r}, but no other student has rows of its graphs, settings and seeds")
    gains = [gain(found[kind], found[against]) for kind in others]
    cells = list(dict.fromkeys(cell for result in gains for cell in result.cells))
    header = ["", "runs", *(" ".join(cell) for cell in cells), "mean", "standard error", "p (Holm)"]
    lines = [table_line(header), f"|---|{'---:|' * (len(header) - 1)}"]
    for kind, result, p in zip(others, gains, holm([result.p for result in gains]), strict=True):
        points = [f"{result.cells[cell]:+.2f}" if cell in result.cells else "" for cell in cells]
        error = "" if math.isnan(result.error) else f"{result.error:.2f}"
        difference = f"{result.difference:+.2f}"
        lines.append(table_line([kind, str(result.pairs), *points, difference, error, p_text(p)]))
    return "\n".join(lines) + "\n"
