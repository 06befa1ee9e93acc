"""What a run shows at its end: the comparison as a table, and plots of how it came about."""

from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from rbm import plots
from rbm.distillation import Distillation
from rbm.methods import METHODS
from rbm.metrics import expert_loads
from rbm.sparse import SparseRows
from rbm.students import MixtureStudent

_ROWS = {"teacher": "Teacher", **{name: method.title for name, method in METHODS.items()}}
_COLUMNS = ("Test", "Val", "Test max", "Params", "Active", "One node", "All nodes")
CAPTION = (
    "Test: accuracy at the epoch with the best validation accuracy (Val). Test max: maximum over epochs, as the paper's"
    " code reports it. Active: parameters that one prediction uses. Times in milliseconds; the teacher's one node"
    " includes gathering its neighbourhood."
)


def results_table(summary: dict[str, Any], timings: dict[str, Any]) -> Table:
    """The teacher and its students side by side, for the terminal."""
    table = Table(
        title=_title(summary), title_justify="left", caption=CAPTION, caption_justify="left", box=box.SIMPLE_HEAD
    )
    table.add_column("", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for name, *cells in _cells(summary, timings):
        table.add_row(name, *cells, style="bold" if name == METHODS["rbm"].title else None)
    return table


def results_markdown(summary: dict[str, Any], timings: dict[str, Any]) -> str:
    """The same table in Markdown."""
    lines = [f"| {_title(summary)} | {' | '.join(_COLUMNS)} |", "|---|" + "---:|" * len(_COLUMNS)]
    lines += [f"| {' | '.join(row)} |" for row in _cells(summary, timings)]
    return "\n".join([*lines, "", CAPTION, ""])


def _title(summary: dict[str, Any]) -> str:
    teacher = summary["teacher"]["name"]
    return f"{summary['dataset']}, {summary['setting']}, {teacher} teacher, seed {summary['seed']}"


def _cells(summary: dict[str, Any], timings: dict[str, Any]) -> list[list[str]]:
    rows = []
    for key in summary:
        if key not in _ROWS:
            continue
        result, latency = summary[key], timings.get(key, {})
        rows.append(
            [
                _ROWS[key],
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


@torch.no_grad()
def write_plots(result: Distillation, records: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Training curves; and of a mixture the experts' load, and the rows at its last router, coloured by top expert and
    by label.

    Returns:
        The files written: ``training.png``, ``expert_load.png``, ``representation.png``.
    """
    files = [folder / "training.png"]
    best_epochs = {phase: result.summary[phase]["best_epoch"] for phase in result.summary if phase in _ROWS}
    titles = {phase: _ROWS[phase] for phase in best_epochs}
    plots.plot_training_curves(records, files[0], best_epochs=best_epochs, titles=titles)
    student = result.student.eval()
    if not isinstance(student, MixtureStudent):
        return files
    files += [folder / name for name in ("expert_load.png", "representation.png")]
    x, labels = result.student_inputs(), result.split.graph.y
    plots.plot_expert_load(expert_loads(student, x).cpu(), files[1])
    *_, (_, rows) = student.router_inputs(x)
    rows = rows.to_dense() if isinstance(rows, SparseRows) else rows
    _, (routings, *_) = student(x, return_trace=True)
    top_expert = routings[-1].experts[:, 0]
    plots.plot_router_inputs(rows.cpu(), top_expert.cpu(), labels.cpu(), files[2], seed=result.config.seed)
    return files
