"""Tables of an experiment's CSV file, ours beside the paper's."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from importlib import resources

from rbm.experiments.statistics import Summary, paired_test

Runs = dict[int, dict[str, str]]  # rows by seed


@cache
def paper_tables() -> dict[str, dict]:
    """The paper's tables as data: accuracies in per cent as ``[mean, standard deviation]``."""
    return json.loads((resources.files("rbm") / "config" / "configs" / "paper" / "tables.json").read_text())


def group_rows(rows: list[dict[str, str]]) -> dict[tuple[str, str, str], dict[str, Runs]]:
    """``(graph, setting, variant) -> method -> seed -> row``; a teacher stands under the variant ``""``.

    A graph is a dataset's name, with the protocol where it is not the paper's.
    """
    groups: dict[tuple[str, str, str], dict[str, Runs]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        graph = row["dataset"] if row["protocol"] == "rbm" else f"{row['dataset']} ({row['protocol']})"
        groups[graph, row["setting"], row["variant"]][row["method"]][int(row["seed"])] = row
    return groups


def percent(runs: Runs, column: str) -> Summary | None:
    """A column over seeds in per cent; None where there is no run."""
    return Summary.of([100 * float(row[column]) for row in runs.values()]) if runs else None


def main_table(rows: list[dict[str, str]], *, teacher: str = "sage") -> str:
    """Markdown: for every dataset and setting the paper's RbM, ours, the MLP student's and the teacher's accuracy.

    *Test* is at the epoch with the best validation accuracy. *Best test*, the maximum over epochs, is the protocol of
    the paper's code, which looks at test labels, and stands beside the paper's figure for that reason alone.
    """
    printed = {"sage": "sage_distillation", "gcn": "gcn_distillation"}.get(teacher)
    paper = paper_tables()[printed] if printed else {}
    lines = [
        "| dataset | setting | seeds | paper's RbM | RbM, best test | **RbM, test** | MLP, test | teacher, test |"
        " RbM - MLP | p |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    groups = group_rows(rows)
    for dataset, setting, variant in sorted(groups, key=_in_order(groups)):
        methods = groups[dataset, setting, variant]
        rbm, mlp = methods.get("rbm", {}), methods.get("mlp", {})
        if not rbm:
            continue
        teachers = {seed: row for seed, row in groups[dataset, setting, ""].get("teacher", {}).items() if seed in rbm}
        published = paper.get(dataset, {}).get(setting, {}).get("RbM")
        cells = [
            f"{dataset} {variant}".strip(),
            setting,
            str(len(rbm)),
            "" if published is None else f"{published[0]:.2f} ± {published[1]:.2f}",
            _cell(percent(rbm, "test_max")),
            f"**{_cell(percent(rbm, 'test_at_best_val'))}**",
            _cell(percent(mlp, "test_at_best_val")),
            _cell(percent(teachers, "test_at_best_val")),
            *_difference(rbm, mlp),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def variants(rows: list[dict[str, str]], method: str = "rbm", column: str = "test_at_best_val") -> dict[str, dict]:
    """``"dataset, setting" -> variant -> Summary`` of a column in per cent; graphs and variants in order of rows."""
    found: dict[str, dict[str, Summary]] = {}
    for (dataset, setting, variant), methods in group_rows(rows).items():
        summary = percent(methods.get(method, {}), column)
        if summary is not None:
            found.setdefault(f"{dataset}, {setting}", {})[variant or "default"] = summary
    return found


def variants_table(rows: list[dict[str, str]], method: str = "rbm", column: str = "test_at_best_val") -> str:
    """Markdown: a row for each dataset and setting, a column for each variant; test at best validation, per cent.

    Whoever chooses between variants looks at the ``column`` ``val``.
    """
    found = variants(rows, method, column)
    names = list(dict.fromkeys(name for of_graph in found.values() for name in of_graph))
    lines = [f"| | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for graph, of_graph in found.items():
        lines.append(f"| {graph} | {' | '.join(_cell(of_graph.get(name)) for name in names)} |")
    return "\n".join(lines) + "\n"


def _in_order(groups: Iterable[tuple[str, str, str]]) -> Callable[[tuple[str, str, str]], tuple[int, str, int]]:
    """Graphs and variants as they first came, whichever process was done first; transductive last."""
    graphs, variants = (list(dict.fromkeys(group[part] for group in groups)) for part in (0, 2))
    return lambda group: (graphs.index(group[0]), group[1], variants.index(group[2]))


def _cell(summary: Summary | None) -> str:
    return "" if summary is None else str(summary)


def _accuracies(runs: Runs) -> dict[int, float]:
    return {seed: 100 * float(row["test_at_best_val"]) for seed, row in runs.items()}


def _difference(first: Runs, second: Runs) -> tuple[str, str]:
    if not first.keys() & second.keys():
        return "", ""
    one, other = (
        {seed: 100 * float(row["test_at_best_val"]) for seed, row in runs.items()} for runs in (first, second)
    )
    test = paired_test(one, other)
    p = "" if math.isnan(test.p) else f"{test.p:.3f}" if test.p >= 0.001 else "< 0.001"
    return f"{test.difference:+.2f}", p
