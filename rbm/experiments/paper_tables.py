"""The paper's tables as experiments: the runs of each, and our figures next to the paper's.

A table is a file in ``configs/tables`` with its columns (a method and its changes), its teachers and settings, and the
name of the paper's table. All tables share one CSV file, so that a run needed by two tables is made once.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from rbm.config import SETTINGS
from rbm.experiments.experiment import Experiment
from rbm.experiments.statistics import Summary, median_scores, skillings_mack, without_rounding
from rbm.experiments.tables import Group, dataset_names, group_rows, paper_tables, percent, table_line
from rbm.utils.files import parse_own_yaml, write_text

PERMUTATIONS = 20_000
_TABLES = resources.files("rbm") / "config" / "configs" / "tables"
_GCN = "gcn_distillation"
_TEACHERS = {"sage": "GraphSAGE", "gcn": "GCN", "revgat": "RevGNN", "drgat": "DRGAT"}


class Column(NamedTuple):
    """A method with changes. ``variant`` is their name in the rows, and ``sees`` the inputs of a prediction."""

    method: str
    variant: str = ""
    changes: dict[str, Any] = {}  # noqa: RUF012
    sees: str = ""


@dataclass(frozen=True)
class Table:
    """One table of the paper.

    Attributes:
        name: name of its file.
        about: what it shows.
        columns: title -> :class:`Column`.
        paper: the table of ``configs/paper/tables.json`` with the paper's figures; empty if there are none.
        teachers, settings: each combination is a block of rows.
        protocol: protocol of graphs and splits, see :func:`rbm.datasets.load_dataset`; the paper's is ``rbm``.
    """

    name: str
    about: str
    columns: dict[str, Column]
    paper: str = ""
    teachers: tuple[str, ...] = ("sage",)
    settings: tuple[str, ...] = SETTINGS
    protocol: str = "rbm"

    @property
    def file_name(self) -> str:
        return self.name if self.protocol == "rbm" else f"{self.name}-{self.protocol}"

    def experiments(self, **common: Any) -> list[Experiment]:
        """The experiments of the table; ``common`` are arguments of :class:`~rbm.experiments.experiment.Experiment`."""
        same_changes: dict[str, list[Column]] = {}
        for column in self.columns.values():
            if column.method != "teacher":
                same_changes.setdefault(f"{column.variant}: {column.changes}", []).append(column)
        return [
            Experiment(
                methods=tuple(column.method for column in columns),
                variants={columns[0].variant: columns[0].changes},
                teacher=teacher,
                settings=self.settings,
                protocol=self.protocol,
                **common,
            )
            for teacher in self.teachers
            for columns in same_changes.values()
        ]

    def only(self, methods: Iterable[str]) -> "Table":
        """The table with only the columns of these methods and of the teacher.

        Raises:
            ValueError: it has no column for one of the methods.
        """
        known, wanted = {column.method for column in self.columns.values()}, set(methods)
        if unknown := sorted(wanted - known):
            raise ValueError(
                f"methods holds {unknown[0]!r}, expected some of {', '.join(sorted(known - {'teacher'}))}, which the"
                f" table {self.name} has columns of"
            )
        wanted.add("teacher")
        kept = {title: column for title, column in self.columns.items() if column.method in wanted}
        return replace(self, columns=kept)


def table_names() -> list[str]:
    """The names of all tables."""
    return sorted(file.name.removesuffix(".yaml") for file in _TABLES.iterdir() if file.name.endswith(".yaml"))


def read_table(name: str) -> Table:
    """Read a table by its name.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in table_names():
        raise ValueError(
            f"table is {name!r}, expected one of {', '.join(table_names())}, or a study: complexity, representation"
        )
    text = (_TABLES / f"{name}.yaml").read_text(encoding="utf-8")
    content = parse_own_yaml(text)
    columns = {title: Column(**column) for title, column in content.pop("columns").items()}
    lists = {key: tuple(content.pop(key)) for key in ("teachers", "settings") if key in content}
    about = text.split("\n", 1)[0].removeprefix("# ")
    return Table(name, about, columns, **content, **lists)


def table_of(rows: list[dict[str, str]]) -> Table:
    """A table of any experiment, with a column for each method and variant in ``rows``, which share a protocol."""
    teachers, settings = (tuple(dict.fromkeys(row[name] for row in rows)) for name in ("teacher", "setting"))
    titles = {column.method: title for title, column in read_table("main").columns.items()}
    titles |= {"moe": "MoE", "ensemble": "ensemble"} | ({} if teachers == ("sage",) else {"teacher": "teacher"})
    found = dict.fromkeys((row["method"], row["variant"]) for row in rows)
    order = sorted(found, key=lambda cell: list(titles).index(cell[0]) if cell[0] in titles else len(titles))
    columns = {f"{titles.get(method, method)} {variant}".strip(): Column(method, variant) for method, variant in order}
    protocol = rows[0]["protocol"] if rows else "rbm"
    paper = _GCN if teachers == ("gcn",) else "sage_distillation"
    return Table("", "", columns, paper, teachers, settings, protocol)


class Line(NamedTuple):
    """A graph in a setting with a teacher: our results by column title, and the paper's."""

    dataset: str
    setting: str
    teacher: str
    ours: dict[str, Summary]
    paper: dict[str, Summary]


def lines_of(table: Table, rows: list[dict[str, str]], column: str = "test_at_best_val") -> list[Line]:
    """The table's lines, with graphs in the paper's order, for which ``rows`` has at least two students to compare.

    For a table with a single student, one is enough. Two are required because tables share rows: a graph may be there
    only because another table ran one of the columns. The paper prints no validation accuracies, so with the column
    ``val`` there are none of its figures.
    """
    known = list(paper_tables()["dataset_statistics"])
    students = {title for title, cell in table.columns.items() if cell.method != "teacher"}
    found = []
    groups = group_rows(rows)
    names = dataset_names(group.dataset for group in groups)
    for teacher in table.teachers:
        mine = [group for group in groups if (group.teacher, group.protocol) == (teacher, table.protocol)]
        graphs = {(group.dataset, group.preset) for group in mine}
        order = sorted(graphs, key=lambda graph: (known.index(graph[0]) if graph[0] in known else 99, graph))
        for setting in sorted(table.settings):
            for dataset, preset in order:
                ours = {}
                for title, cell in table.columns.items():
                    group = Group(dataset, setting, table.protocol, teacher, preset, cell.variant)
                    if summary := percent(groups.get(group, {}).get(cell.method, {}), column):
                        ours[title] = summary
                if len(students & set(ours)) >= min(2, len(students)):
                    name = names[dataset] if preset == "clean" else f"{names[dataset]} ({preset})"
                    paper = {} if column == "val" else _published(table, dataset, setting, teacher)
                    found.append(Line(name, setting, teacher, ours, paper))
    return found


def _published(table: Table, dataset: str, setting: str, teacher: str) -> dict[str, Summary]:
    """The paper's figures with the same teacher."""
    printed = paper_tables().get(table.paper, {}).get(dataset, {})
    figures = printed.get(f"{setting}/teacher={_TEACHERS.get(teacher, teacher)}", {})
    if teacher == ("gcn" if table.paper == _GCN else "sage"):
        figures = printed.get(setting, figures)
    return {title: Summary(*figure, 10) for title, figure in figures.items() if isinstance(figure, list)}


def render(table: Table, rows: list[dict[str, str]], column: str = "test_at_best_val") -> str:
    """Markdown: our figures with the paper's mean in brackets, best student bold, second best italic; then statistics.

    Students with the same mean have the same mark; two that are best leave no second. The figure in brackets is what
    the paper's code reports, a maximum over epochs; it corresponds to ``test_max``.
    The number of seeds of a line is that of most of its students; a cell with another number says so. Cells with fewer
    seeds have no mark and no part in the statistics.
    """
    titles = list(table.columns)
    lines = [f"| {table_line(['seeds', *titles])}", "|---|---:|" + "---:|" * len(titles)]
    found = lines_of(table, rows, column)
    for line in found:
        means, seeds = _comparable(table, line), _usual_seeds(table, line)
        marks = _marks({title: mean for title, mean in means.items() if table.columns[title].method != "teacher"})
        cells = [_cell(line.ours.get(title), line.paper.get(title), marks.get(title, ""), seeds) for title in titles]
        name = ", ".join([line.dataset, line.setting, *([line.teacher] if len(table.teachers) > 1 else [])])
        lines.append(table_line([name, str(seeds), *cells]))
    for setting in sorted(table.settings):
        blocks = [_comparable(table, line) for line in found if line.setting == setting]
        scores = median_scores(blocks) if len(blocks) > 1 else {}  # of one graph, it would repeat its order
        if scores:
            cells = [f"{scores[title]:.2f}" if title in scores else "" for title in titles]
            lines.append(f"| median Score, {setting} | | {' | '.join(cells)} |")
    if any(column.sees for column in table.columns.values()):
        lines.append(f"| sees when it answers | | {' | '.join(table.columns[title].sees for title in titles)} |")
    tests = [text for setting in sorted(table.settings) if (text := _test(table, found, setting))]
    return "\n".join(lines) + "\n" + "".join(f"\n{text}\n" for text in tests)


def _marks(means: dict[str, float]) -> dict[str, str]:
    """Marks of the best and of the second best, by title; two that are best leave no second."""
    order = sorted(means.values(), reverse=True)
    marks = dict.fromkeys(order[1:2], "*") | dict.fromkeys(order[:1], "**")
    return {title: marks.get(mean, "") for title, mean in means.items()}


def _usual_seeds(table: Table, line: Line) -> int:
    """The number of seeds that most students of a line have.

    The largest number would not do: tables share rows, so one student may have more seeds than those beside it, and
    would be the best for want of others.
    """
    students = [summary.count for title, summary in line.ours.items() if table.columns[title].method != "teacher"]
    return statistics.median_low(students or [0])


def _comparable(table: Table, line: Line) -> dict[str, float]:
    """Means of the columns with as many seeds as most students have: few seeds may be the easy splits."""
    enough = _usual_seeds(table, line)
    enough_seeds = {title: summary for title, summary in line.ours.items() if summary.count >= enough}
    return {title: without_rounding(summary.mean) for title, summary in enough_seeds.items()}


def _cell(ours: Summary | None, paper: Summary | None, mark: str, usual_seeds: int) -> str:
    beside = "" if paper is None else f"({paper.mean:.2f})"
    figure = "" if ours is None else f"{mark}{ours}{mark}"
    if ours is not None and ours.count != usual_seeds:
        figure += f", {ours.count} seed{'s' * (ours.count != 1)}"
    return f"{figure} {beside}".strip()


def _test(table: Table, lines: list[Line], setting: str) -> str:
    """A sentence on whether the columns differ over the graphs of a setting, with the paper's p-value."""
    lines = [line for line in lines if line.setting == setting]
    blocks = [block for line in lines if len(block := _comparable(table, line)) >= 2]
    if len(blocks) < 2:
        return ""
    test = skillings_mack(blocks, permutations=PERMUTATIONS)
    printed = paper_tables()["reported_p_values"].get(table.paper, {}).get(setting)
    own = table.name or any(line.paper for line in lines)  # a table of the paper, or its figures are beside ours
    beside = f"; the paper prints {printed}, over nine graphs" if own and printed is not None else ""
    # Each teacher gives a graph a line of its own.
    what = "graphs" if len({line.teacher for line in lines}) == 1 else "pairs of graph and teacher"
    return (
        f"Skillings-Mack over {len(blocks)} {what}, {setting}: {test.statistic:.2f}, {test.df} degrees of freedom,"
        f" p {_rounded(test.p, '= ')} (chi-square), {_rounded(test.p_simulated)} (permutations){beside}."
    )


def _rounded(p: float, equals: str = "") -> str:
    return "< 0.0001" if p < 0.5e-4 else f"{equals}{p:.4f}"


def write_outputs(table: Table, rows: list[dict[str, str]], folder: Path, command: str) -> list[Path]:
    """Write ``<table>.md`` and ``<table>.png`` into a folder, and return their paths."""
    from rbm.experiments.plots import plot_table

    folder.mkdir(parents=True, exist_ok=True)
    page, picture = folder / f"{table.file_name}.md", folder / f"{table.file_name}.png"
    parts = [f"# {table.about}", "", f"`{command}`", ""]
    beside = " (the paper's figure in brackets)" if table.paper else ""
    parts += [f"Test accuracy at the epoch with the best validation accuracy{beside}:", ""]
    parts += [render(table, rows)]
    parts += ["Maximum over epochs of the test accuracy, which the paper's code reports:", ""]
    parts += [render(table, rows, "test_max")]
    write_text(page, "\n".join(parts))
    lines = lines_of(table, rows)
    if lines:
        plot_table(
            {", ".join(line[:2] if len(table.teachers) == 1 else line[:3]): (line.ours, line.paper) for line in lines},
            picture,
            title=table.about,
        )
    return [page, picture] if lines else [page]
