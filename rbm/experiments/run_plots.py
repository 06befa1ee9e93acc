"""Plots of a run, written into its folder."""

from pathlib import Path
from typing import Any

import torch

from rbm.distillation.distill import Distillation
from rbm.distillation.summary import ROWS
from rbm.experiments import plots
from rbm.nn.sparse_rows import SparseRows
from rbm.nn.students import MixtureStudent
from rbm.training.metrics import expert_loads
from rbm.training.run_files import list_file


@torch.no_grad()
def write_plots(result: Distillation, records: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Training curves; and of a mixture the experts' load, and the rows at its last router, coloured by top expert and
    by label. Of several mixtures it is the one that is kept, or else the last.

    Returns:
        The files written: ``training.png``, ``expert_load.png``, ``representation.png``.
    """
    files = [folder / "training.png"]
    list_file(files[0])
    best_epochs = {phase: result.summary[phase]["best_epoch"] for phase in result.summary if phase in ROWS}
    titles = {phase: ROWS[phase] for phase in best_epochs}
    plots.plot_training_curves(records, files[0], best_epochs=best_epochs, titles=titles)
    mixtures = [method for method, student in result.students.items() if isinstance(student, MixtureStudent)]
    if not mixtures:
        return files
    method = result.method if result.method in mixtures else mixtures[-1]
    student = result.students[method].eval()
    for name in ("expert_load.png", "representation.png"):
        files.append(folder / name)
        list_file(folder / name)
    x, labels = result.student_inputs(method), result.split.graph.y
    plots.plot_expert_load(expert_loads(student, x).cpu(), files[1])
    *_, (_, rows) = student.router_inputs(x)
    rows = rows.to_dense() if isinstance(rows, SparseRows) else rows
    _, (routings, *_) = student(x, return_trace=True)
    top_expert = routings[-1].experts[:, 0]
    plots.plot_router_inputs(rows.cpu(), top_expert.cpu(), labels.cpu(), files[2], seed=result.config.seed)
    return files
