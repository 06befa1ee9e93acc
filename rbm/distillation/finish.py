"""The end of a run: summary, times of predictions, files, plots and report."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch_geometric.data import Data

from rbm.config import Config
from rbm.datasets.encodings.hops import StoredHops
from rbm.distillation.latency import student_latency, teacher_latency
from rbm.distillation.report import FILES as OF_REPORT
from rbm.distillation.result import Distillation
from rbm.distillation.run_graph import save_graph
from rbm.distillation.summary import results_markdown
from rbm.distillation.task import TrainedStudent
from rbm.distillation.verdict import LABELS_ALONE
from rbm.nn.parameters import count_parameters
from rbm.training.run_folder import RunFolder, SavedStudent, read_metrics, save_students
from rbm.utils.distributed import is_main_process
from rbm.utils.files import as_json, first_line
from rbm.utils.progress import Progress
from rbm.utils.timings import Timings

# Usual time for plots and the report, which hardly depends on the graph.
REPORT_SECONDS = 3.0


def draws(plots: bool | None) -> bool:
    """Whether a run with this argument ``plots`` and a folder writes plots and a report."""
    return plots or (plots is None and os.environ.get("RBM_PLOTS") != "0")


def sizes_of(graph: Data, classes: int) -> str:
    """What progress shows of a graph at first."""
    return f"{graph.num_nodes:,} nodes, {graph.num_edges:,} edges, {graph.num_features:,} features, {classes} classes"


def summary_of(
    config: Config,
    graph: Data,
    classes: int,
    teacher: dict[str, Any],
    module: nn.Module | None,
    trained: dict[str, TrainedStudent],
) -> dict[str, Any]:
    """The content of ``summary.json`` except the verdict: the run, the graph, the teacher and all students."""
    return {
        **{name: getattr(config, name) for name in ("dataset", "setting", "protocol", "preset", "seed")},
        "nodes": graph.num_nodes,
        "edges": graph.num_edges,
        "features": graph.num_features,
        "classes": classes,
        "teacher": {**teacher, **_parameters(module)},
        # The MLP on labels comes directly after the teacher.
        **{
            method: {**trained[method].result, **_parameters(trained[method].student)}
            for method in sorted(trained, key=LABELS_ALONE.__ne__)
        },
    }


def _parameters(model: nn.Module | None) -> dict[str, Any]:
    total, active = (None, None) if model is None else count_parameters(model)
    return {"parameters": total, "active_parameters": active}


def finish(
    found: Distillation,
    trained: dict[str, TrainedStudent],
    run: RunFolder | None,
    data: Data,
    *,
    latency: bool,
    plots: bool | None,
    progress: Progress,
) -> None:
    """Measure latencies and write the run folder; the arguments are those of :func:`rbm.distill` and its results.

    On other ranks than the first there is no ``run``, and nothing is measured.
    """
    timings = found.timings
    if latency and is_main_process():
        with timings.measured("latency"):
            _measure_latencies(found)
    if run is None:
        timings.end()
        return
    with timings.measured("saving"):
        save_graph(run, found.config, data, progress)
        _write_students(run, found, trained)
    _write_timings(run, timings)
    if draws(plots):
        with timings.measured("report"):
            _write_figures(run, found, progress)
        _write_timings(run, timings)


def _measure_latencies(found: Distillation) -> None:
    """Add the latencies of predictions, in milliseconds, to the timings."""
    for method, student in found.students.items():
        one_node, all_nodes = student_latency(student, found.student_inputs(method))
        found.timings[method] |= {"one_node_ms": one_node, "all_nodes_ms": all_nodes}
    if found.teacher is not None:
        num_layers = found.config.teacher.num_layers
        one_node, all_nodes = teacher_latency(found.teacher, found.split.graph, num_layers=num_layers)
        found.timings["teacher"] |= {"one_node_ms": one_node, "all_nodes_ms": all_nodes}


def _write_students(run: RunFolder, found: Distillation, trained: dict[str, TrainedStudent]) -> None:
    """Write all students, which of them is kept for predictions, and the results of the run."""
    saved, files = {}, {}
    for method, trained_student in trained.items():
        run.save_phase(method, trained_student.student, trained_student.result)
        name = None
        if trained_student.encodings is not None:  # methods with the same encodings share one object
            name = files.setdefault(id(trained_student.encodings), f"encodings-{method}" if files else "encodings")
            tensors = {"encodings": trained_student.encodings.full}
            if isinstance(trained_student.encodings, StoredHops):
                tensors["features"] = trained_student.encodings.features
            run.save_tensors(name, tensors)
        saved[method] = SavedStudent(trained_student.student, name)
    save_students(run.path, found.method, saved)
    summary = as_json(found.summary)
    _remove_report_of_others(run.path, summary)
    run.write_text("summary.json", summary)
    run.write_text("results.md", results_markdown(found.summary, found.timings))


def _remove_report_of_others(folder: Path, summary: str) -> None:
    """Remove report and plots of a run that was resumed with other students: they would stand beside ``summary``."""
    path = folder / "summary.json"
    if path.is_file() and path.read_bytes() != summary.encode():
        for name in OF_REPORT:
            (folder / name).unlink(missing_ok=True)


def _write_timings(run: RunFolder, timings: Timings) -> None:
    """Write the times measured so far."""
    timings.end()
    run.write_text("timings.json", as_json(timings))


def _write_or_warn(write: Callable[[], object], what: str, folder: Path) -> None:
    try:
        write()
    except Exception as error:
        text = "%s: %s could not be written (%s: %s); the run is complete without, and rbm report writes it again"
        logging.getLogger("rbm").warning(text, folder, what, type(error).__name__, first_line(error))


def _write_figures(run: RunFolder, found: Distillation, progress: Progress) -> None:
    """Write the plots and the report of a run. The run is complete without them, so errors are logged as warnings."""
    from rbm.distillation.report.pictures import write_plots  # Matplotlib takes a while to import
    from rbm.distillation.report.write import write_report

    with progress.step("plots and report"):
        _write_or_warn(lambda: write_plots(found, read_metrics(run.path), run.path), "plots", run.path)
        _write_or_warn(lambda: write_report(found, run.path), "report.html", run.path)
