"""The results of a run as a table, for the terminal, notebooks and Markdown."""

import io
from collections import Counter
from html import escape
from typing import Any

from rich import box, markup
from rich.console import Console
from rich.table import Table

from rbm.datasets.registry import graph_name
from rbm.distillation.registry import title_of
from rbm.distillation.sentences import verdict_sentences
from rbm.distillation.verdict import LABELS_ALONE
from rbm.utils.console import WIDTH

# Name and unit of each column, which the terminal stacks; shares are shown with %.
_COLUMNS = (
    *(("Test", ""), ("Val", ""), ("Test max", ""), ("Params", ""), ("Active", "")),
    *(("One node", "ms"), ("All nodes", "ms")),
)
CAPTION = (
    "Test: accuracy at the epoch with the best validation accuracy (Val). Test max: maximum over epochs, as the paper's"
    " code reports it. Active: parameters that one prediction uses. The teacher's time for one node includes gathering"
    " its neighbourhood."
)


def results_table(summary: dict[str, Any], timings: dict[str, Any]) -> Table:
    """The table of the teacher and its students for the terminal; the kept student is bold."""
    table = Table(
        title=markup.escape(_title(summary)),
        title_justify="left",
        caption=CAPTION,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,  # there are only 80 columns if standard output is not a terminal
    )
    table.add_column("", no_wrap=True)
    lines = max(len(_heading(*column)) for column in _COLUMNS)
    for column in _COLUMNS:
        heading = _heading(*column)
        heading += [""] * (lines - len(heading))
        table.add_column("\n".join(heading), justify="right", no_wrap=True)
    kept = title_of(summary["verdict"]["kept"])
    for name, *cells in _cells(summary, timings):
        table.add_row(name, *cells, style="bold" if name == kept else None)
    return table


def results_markdown(summary: dict[str, Any], timings: dict[str, Any]) -> str:
    """The same table in Markdown, and the verdict."""
    title = " ".join(_title(summary).split()).replace("|", "\\|")  # a graph's name may be any text
    lines = [f"| {title} | {' | '.join(_headings())} |", "|---|" + "---:|" * len(_COLUMNS)]
    lines += [f"| {' | '.join(row)} |" for row in _cells(summary, timings)]
    verdict = [f"- {sentence}" for sentence in verdict_sentences(summary["verdict"])]
    return "\n".join([*lines, "", CAPTION, "", *verdict, ""])


def results_text(summary: dict[str, Any], timings: dict[str, Any]) -> str:
    """The same table as text of :data:`WIDTH` columns, and the verdict."""
    written = io.StringIO()
    console = Console(file=written, width=WIDTH, force_terminal=False, force_jupyter=False)
    console.print(results_table(summary, timings))
    for sentence in verdict_sentences(summary["verdict"]):
        console.print(sentence, markup=False, highlight=False)
    return written.getvalue().strip("\n")


def results_html(summary: dict[str, Any], timings: dict[str, Any]) -> str:
    """The same table as HTML for notebooks, and the verdict."""
    kept = title_of(summary["verdict"]["kept"])
    rows = []
    for name, *cells in _cells(summary, timings):
        tag = "th" if name == kept else "td"
        figures = "".join(f'<{tag} style="text-align:right">{escape(cell)}</{tag}>' for cell in cells)
        rows.append(f'<tr><{tag} style="text-align:left">{escape(name)}</{tag}>{figures}</tr>')
    heads = "".join(f"<th>{escape(head)}</th>" for head in ("", *_headings()))
    verdict = "".join(f"<li>{escape(sentence)}</li>" for sentence in verdict_sentences(summary["verdict"]))
    return (
        f"<table><caption>{escape(_title(summary))}</caption><thead><tr>{heads}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table><p>{escape(CAPTION)}</p><ul>{verdict}</ul>"
    )


def chosen_epochs(summary: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, int]:
    """The epoch that each model was taken from, counted within the phase of its name. Other models are not included.

    The summary of a student with several phases, such as SimMLP, counts the epochs of all of them.

    Args:
        summary: of a run.
        records: lines of its ``metrics.jsonl``.
    """
    lengths = Counter(record["phase"] for record in records)
    models = {name: result for name, result in _models(summary).items() if lengths[name]}
    return {name: result["best_epoch"] - (result["epochs"] - lengths[name]) for name, result in models.items()}


def _models(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The results of the teacher and of all students, by name."""
    return {name: part for name, part in summary.items() if isinstance(part, dict) and "test_accuracy" in part}


def _headings() -> list[str]:
    return [f"{name} ({unit})" if unit else name for name, unit in _COLUMNS]


def _heading(name: str, unit: str) -> list[str]:
    """The lines of a narrow column's heading."""
    return [*name.split(" "), *([f"({unit})"] if unit else [])]


def _title(summary: dict[str, Any]) -> str:
    teacher = summary["teacher"]["name"]
    dataset = graph_name(summary["dataset"])
    return f"{dataset}, {summary['setting']}, {teacher} teacher, seed {summary['seed']}"


def _cells(summary: dict[str, Any], timings: dict[str, Any]) -> list[list[str]]:
    rows = []
    for key, result in _models(summary).items():
        latency = timings.get(key, {})
        rows.append(
            [
                title_of(key),
                *(f"{result[share]:.2%}" for share in ("test_accuracy", "val_accuracy")),
                # It evaluates test nodes only at epochs that may be selected, so its maximum is over few epochs.
                "" if key == LABELS_ALONE else f"{result['test_max']:.2%}",
                short_count(result["parameters"]),
                short_count(result["active_parameters"]),
                _milliseconds(latency, "one_node_ms", 2),
                _milliseconds(latency, "all_nodes_ms", 1),
            ]
        )
    return rows


def _milliseconds(latency: dict[str, float], name: str, digits: int) -> str:
    return f"{latency[name]:.{digits}f}" if name in latency else ""


def short_count(number: int | None, unknown: str = "") -> str:
    """Text of a number of parameters, from a million on in millions."""
    if number is None:
        return unknown
    return f"{number:,}" if number < 1_000_000 else f"{number / 1e6:.2f} M"
