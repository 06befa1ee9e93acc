"""Markdown tables of an experiment's CSV file, with our figures next to the paper's."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from importlib import resources
from typing import NamedTuple

from rbm.datasets.registry import short_name
from rbm.distillation.registry import title_of
from rbm.experiments.statistics import Paired, Summary, p_text, paired_test

Runs = dict[int, dict[str, str]]  # seed -> row


@cache
def paper_tables() -> dict[str, dict]:
    """The paper's tables as data: accuracies in per cent as ``[mean, standard deviation]``."""
    return json.loads(
        (resources.files("rbm") / "config" / "configs" / "paper" / "tables.json").read_text(encoding="utf-8")
    )


class Group(NamedTuple):
    """The values that rows must share to be compared or averaged over seeds."""

    dataset: str
    setting: str
    protocol: str
    teacher: str
    preset: str
    variant: str

    def graph(self, name: str = "") -> str:
        """The dataset's ``name``, by default the short one, with unusual protocol, preset and teacher in brackets."""
        usual = {"protocol": "rbm", "preset": "clean"}
        unlike = [getattr(self, name) for name in usual if getattr(self, name) != usual[name]]
        if self.teacher != "sage":
            unlike.append(f"{self.teacher} teacher")
        name = name or short_name(self.dataset)
        return f"{name} ({', '.join(unlike)})" if unlike else name


def group_rows(rows: list[dict[str, str]]) -> dict[Group, dict[str, Runs]]:
    """``group -> method -> seed -> row``; teachers have the variant ``""``."""
    groups: dict[Group, dict[str, Runs]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        groups[Group(*(row[name] for name in Group._fields))][row["method"]][int(row["seed"])] = row
    return groups


def dataset_names(datasets: Iterable[str]) -> dict[str, str]:
    """The short name of each dataset, or its path if another dataset has the same short name."""
    short = {dataset: short_name(dataset) for dataset in datasets}
    count = Counter(short.values())
    return {dataset: name if count[name] == 1 else dataset for dataset, name in short.items()}


def graph_names(groups: Iterable[Group]) -> dict[Group, str]:
    """The name of each group's graph (:meth:`Group.graph`), the same only for the same graph."""
    groups = list(groups)
    names = dataset_names(group.dataset for group in groups)
    return {group: group.graph(names[group.dataset]) for group in groups}


def table_line(cells: Iterable[str]) -> str:
    """A line of a Markdown table. Cells may contain ``|``, as names of variants and files do."""
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def percent(runs: Runs, column: str) -> Summary | None:
    """A column over seeds in per cent; None if there are no runs."""
    return Summary.of([100 * float(row[column]) for row in runs.values()]) if runs else None


def main_table(rows: list[dict[str, str]], methods: Iterable[str] = ("mlp",)) -> str:
    """Markdown: for each dataset and setting, the accuracies of the paper's RbM, ours, other methods and the teacher.

    Cells are means ± sample standard deviations over the seeds of RbM; a model that lacks some of them says how many
    it has. *Test* is at the epoch with the best validation accuracy.
    *Best test*, the maximum over epochs, is the protocol of the paper's code. It looks at test labels, and is shown
    only for comparison with the paper's figure.

    Args:
        rows: the rows of an experiment.
        methods: the students in addition to RbM. Empty columns are omitted.
    """
    groups = group_rows(rows)
    names, lines = graph_names(groups), []
    for group in sorted(groups, key=_in_order(names)):
        rbm, mlp = groups[group].get("rbm", {}), groups[group].get("mlp", {})
        if not rbm:
            continue
        teachers = groups.get(group._replace(variant=""), {}).get("teacher", {})
        paper = published(group)
        others = {method: groups[group].get(method, {}) for method in methods if method != "rbm"}
        difference, p = _difference(rbm, mlp)
        lines.append(
            {
                "dataset": f"{names[group]} {group.variant}".strip(),
                "setting": group.setting,
                "seeds": str(len(rbm)),
                "paper's RbM": "" if paper is None else f"{paper[0]:.2f} ± {paper[1]:.2f}",
                "RbM, best test": _cell(percent(rbm, "test_max")),
                "**RbM, test**": f"**{_cell(percent(rbm, 'test_at_best_val'))}**",
                **{
                    f"{title_of(name).removesuffix(' student')}, test": _cell_beside(rbm, runs)
                    for name, runs in others.items()
                },
                "teacher, test": _cell_beside(rbm, teachers),
                "RbM - MLP": difference,
                "p": p,
            }
        )
    columns = [name for name in (lines[0] if lines else ()) if any(line[name] for line in lines)]
    header = [table_line(columns), f"|---|---|{'---:|' * (len(columns) - 2)}"] if columns else []
    return "".join(f"{line}\n" for line in [*header, *(table_line(map(line.get, columns)) for line in lines)])


def variants(rows: list[dict[str, str]], column: str = "test_at_best_val") -> dict[str, dict[str, Summary]]:
    """``"dataset, setting" -> variant -> Summary`` of a column of the RbM student in per cent; graphs and variants in
    order of rows. The variant without a name is called ``default``, or ``(no name)`` if another one is called so.
    """
    found: dict[str, dict[str, Summary]] = {}
    groups = group_rows(rows)
    names = graph_names(groups)
    unnamed = "(no name)" if any(group.variant == "default" for group in groups) else "default"
    for group, methods in groups.items():
        summary = percent(methods.get("rbm", {}), column)
        if summary is not None:
            found.setdefault(f"{names[group]}, {group.setting}", {})[group.variant or unnamed] = summary
    return found


def variants_table(rows: list[dict[str, str]], column: str = "test_at_best_val") -> str:
    """Markdown: a column of the RbM student in per cent, one row per dataset and setting, one column per variant.

    The default column is the test accuracy at the best validation epoch. To choose between variants, use ``val``.
    """
    found = variants(rows, column)
    names = list(dict.fromkeys(name for of_graph in found.values() for name in of_graph))
    lines = [f"| {table_line(names)}", "|---|" + "---:|" * len(names)]
    for graph, of_graph in found.items():
        lines.append(table_line([graph, *(_cell(of_graph.get(name)) for name in names)]))
    return "\n".join(lines) + "\n"


def published(group: Group) -> list[float] | None:
    """Mean and standard deviation of the paper's RbM with the same teacher and protocol."""
    printed = {"sage": "sage_distillation", "gcn": "gcn_distillation"}.get(group.teacher)
    if printed is None or group.protocol != "rbm":
        return None
    return paper_tables()[printed].get(group.dataset, {}).get(group.setting, {}).get("RbM")


def _in_order(names: dict[Group, str]) -> Callable[[Group], tuple[int, str, int]]:
    """A sort key for groups with these names: graphs and variants in order of their first rows; transductive last."""
    graphs = list(dict.fromkeys(names.values()))
    variants = list(dict.fromkeys(group.variant for group in names))
    return lambda group: (graphs.index(names[group]), group.setting, variants.index(group.variant))


def _cell(summary: Summary | None) -> str:
    return "" if summary is None else str(summary)


def _cell_beside(rbm: Runs, runs: Runs) -> str:
    """The test accuracy of another model over the seeds of RbM, with their number if it has fewer."""
    shared = {seed: row for seed, row in runs.items() if seed in rbm}
    cell = _cell(percent(shared, "test_at_best_val"))
    return cell if len(shared) in (0, len(rbm)) else f"{cell}, {len(shared)} seed{'s' * (len(shared) > 1)}"


def _difference(first: Runs, second: Runs) -> tuple[str, str]:
    if not first.keys() & second.keys():
        return "", ""
    test = compare_runs(first, second)
    return f"{test.difference:+.2f}", p_text(test.p)


def compare_runs(first: Runs, second: Runs) -> Paired:
    """Paired test of the test accuracies of two models, in points."""
    one, other = (
        {seed: 100 * float(row["test_at_best_val"]) for seed, row in runs.items()} for runs in (first, second)
    )
    return paired_test(one, other)
