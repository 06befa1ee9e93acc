"""The results of a run as a table: for the terminal, and in Markdown."""

from typing import Any

from rich import box
from rich.table import Table

from rbm.datasets.registry import short_name
from rbm.distillation.registry import METHODS
from rbm.distillation.sentences import verdict_sentences

ROWS = {"teacher": "Teacher", **{name: method.title for name, method in METHODS.items()}}
_COLUMNS = ("Test", "Val", "Test max", "Params", "Active", "One node", "All nodes")
CAPTION = (
    "Test: accuracy at the epoch with the best validation accuracy (Val). Test max: maximum over epochs, as the paper's"
    " code reports it. Active: parameters that one prediction uses. Times in milliseconds; the teacher's one node"
    " includes gathering its neighbourhood."
)


def results_table(summary: dict[str, Any], timings: dict[str, Any]) -> Table:
    """The teacher and its students side by side, for the terminal; the one that is kept is bold."""
    table = Table(
        title=_title(summary),
        title_justify="left",
        caption=CAPTION,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,  # 80 columns are all there are where nobody looks at a terminal
    )
    table.add_column("", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column.replace(" ", "\n"), justify="right", no_wrap=True)
    for name, *cells in _cells(summary, timings):
        table.add_row(name, *cells, style="bold" if name == ROWS.get(summary["verdict"]["kept"]) else None)
    return table


def results_markdown(summary: dict[str, Any], timings: dict[str, Any]) -> str:
    """The same table in Markdown, and the verdict."""
    lines = [f"| {_title(summary)} | {' | '.join(_COLUMNS)} |", "|---|" + "---:|" * len(_COLUMNS)]
    lines += [f"| {' | '.join(row)} |" for row in _cells(summary, timings)]
    verdict = [f"- {sentence}" for sentence in verdict_sentences(summary["verdict"])]
    return "\n".join([*lines, "", CAPTION, "", *verdict, ""])


def _title(summary: dict[str, Any]) -> str:
    teacher = summary["teacher"]["name"]
    dataset = short_name(summary["dataset"])  # of a graph given as a file only the file's name is published
    return f"{dataset}, {summary['setting']}, {teacher} teacher, seed {summary['seed']}"


def _cells(summary: dict[str, Any], timings: dict[str, Any]) -> list[list[str]]:
    rows = []
    for key in summary:
        if key not in ROWS:
            continue
        result, latency = summary[key], timings.get(key, {})
        rows.append(
            [
                ROWS[key],
                f"{result['test_accuracy']:.2%}",
                f"{result['val_accuracy']:.2%}",
                f"{result['test_max']:.2%}",
                _count(result["parameters"]),
                _count(result["active_parameters"]),
                _milliseconds(latency, "one_node_ms", 2),
                _milliseconds(latency, "all_nodes_ms", 1),
            ]
        )
    return rows


def _milliseconds(latency: dict[str, float], name: str, digits: int) -> str:
    return f"{latency[name]:.{digits}f}" if name in latency else ""


def _count(number: int | None) -> str:
    if number is None:
        return ""
    return f"{number:,}" if number < 1_000_000 else f"{number / 1e6:.2f} M"
