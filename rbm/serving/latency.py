"""Latency of predictions: of a student from its rows, and of its teacher including the neighbourhood that it needs.

Times are wall-clock milliseconds of consecutive calls, each with its own batch. A student's rows are in memory before
the clock starts. A teacher gets node ids, and its time includes gathering their neighbourhood. A student with stored
hops (:mod:`rbm.datasets.encodings.hops`) has an additional row for new nodes, whose time includes this as well.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich import box, markup
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch_geometric.data import Data

from rbm.config import Config
from rbm.datasets.registry import graph_name
from rbm.distillation.latency import milliseconds, neighborhood_answer
from rbm.distillation.registry import title_of
from rbm.distillation.run_graph import split_of_run, teacher_of_run
from rbm.distillation.soft_targets import Neighborhood
from rbm.nn.int8 import quantized
from rbm.nn.saved_student import STUDENT, read_description
from rbm.nn.sparse_rows import as_rows, concat_columns
from rbm.nn.students import EnsembleStudent, MixtureStudent, MLPStudent, SIGNStudent
from rbm.training.run_files import file_of, list_file
from rbm.training.run_folder import load, load_encodings
from rbm.utils.arguments import usable_device
from rbm.utils.environment import today
from rbm.utils.files import as_path, check_writable, write_json
from rbm.utils.progress import Progress

PERCENTILES = (50, 95, 99)
MOST_ROWS = 2**20
# Calls of one measurement stop after this many seconds, see milliseconds().
_SECONDS = 10.0
# Title, the timed call, and a function that makes its input from the ids of nodes before the clock starts.
_Model = tuple[str, Callable[[Any], Any], Callable[[Tensor], Any]]


def measure_run(
    run: Path | str,
    *,
    root: Path | str | None = None,
    batch_sizes: Sequence[int] = (1, 64, 4096),
    repeats: int = 200,
    device: torch.device | str = "cpu",
    method: str | None = None,
    quantize: str | None = None,
    console: Console | Literal["auto"] | None = None,
) -> dict[str, Any]:
    """Time a run's student, an MLP as wide as one of its experts, and the teacher, on the run's own graph.

    Args:
        run: folder of a finished run.
        root: folder with the dataset's raw files; by default that of the run.
        batch_sizes: numbers of nodes per call. The nodes of each call are drawn at random with replacement.
        repeats: calls per model and batch size; fewer, but at least twenty, if they take longer than ten seconds.
        device: device of the models and features.
        method: the method of the student; by default the student that the run keeps.
        quantize: ``int8`` times the student with 8-bit weights, and in float32 for comparison.
        console: where progress is shown; ``"auto"`` as in :func:`rbm.distill`.

    Returns:
        The content of ``latency.json`` in the folder (``latency-METHOD.json`` if a method is given): a description of
        the measurement, and under ``"rows"`` the ``p50_ms``, ``p95_ms`` and ``p99_ms`` for each model and batch size. A
        run with a given teacher has no row for the teacher.

    Raises:
        FileNotFoundError: no finished run, or missing files of the dataset.
        PermissionError: the folder of the run cannot be written to.
        TypeError: ``device`` is no device.
        ValueError: batch sizes below one or above :data:`MOST_ROWS`, repeats below one, a device that is not usable, or
            a dataset that is not the one of the run.
    """
    batch_sizes = _checked(batch_sizes, repeats)
    device = usable_device(device)
    run = as_path("run", run)
    trained = load(run, method, quiet=True).to(device)
    check_writable(f"run: {run}", run, "measure a copy of it, or allow it")
    student = trained if quantize is None else quantized(trained, quantize)
    file, encodings = run / file_of("latency.json", method, quantize), load_encodings(run, method)
    method = read_description(run / STUDENT, method)["method"]
    config = Config.from_yaml(run / "config.yaml")
    split, classes = split_of_run(run, config, root)
    graph, teacher = split.graph.to(device), teacher_of_run(run, config, split, classes)
    models: dict[str, _Model] = {}
    if graph.x.dtype == torch.float16:  # rows are in memory and in the student's precision before the clock starts
        graph.x = graph.x.float()
    x = as_rows(graph.x) if encodings is None else concat_columns(graph.x, encodings)
    title = title_of(method)
    models[method] = (title if quantize is None else f"{title}, {quantize}", student, x.__getitem__)
    if quantize is not None:
        models["float32"] = (f"{title}, float32", trained, x.__getitem__)
    if isinstance(student, SIGNStudent) and encodings is not None:
        given = load_encodings(run, method, passed_on=True).to(device)
        models["new_nodes"] = (f"{title}, new nodes", new_node_answer(student, graph, given), lambda nodes: nodes)
    if (mlp := one_expert_mlp(trained)) is not None:
        models["one_expert"] = ("MLP of one expert's width", mlp.to(device).eval(), x.__getitem__)
    if teacher is not None:
        answer = neighborhood_answer(teacher.to(device).eval(), graph, config.teacher.num_layers)
        models["teacher"] = ("Teacher, with neighbourhood", answer, lambda nodes: nodes)

    rows = _measured(models, graph, batch_sizes, repeats, Progress(console))
    found = {
        "dataset": graph_name(config.dataset),
        "nodes": graph.num_nodes,
        "edges": graph.num_edges,
        "teacher": config.teacher.name if teacher is not None else None,
        "student": method,
        "quantize": quantize,
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": today(),
        "rows": rows,
    }
    list_file(file)
    write_json(file, found)
    return found


def _checked(batch_sizes: Sequence[int], repeats: int) -> list[int]:
    """The batch sizes as Python's numbers, which JSON can hold."""
    sizes = batch_sizes if isinstance(batch_sizes, Sequence) else ()
    if not sizes or not all(_is_whole(size) and size >= 1 for size in sizes):
        raise ValueError(f"batch_sizes: got {batch_sizes!r}, expected whole numbers of at least 1, such as [1, 64]")
    if max(sizes) > MOST_ROWS:
        raise ValueError(f"batch_sizes: got {max(sizes):,}, expected at most {MOST_ROWS:,} rows at once")
    if not _is_whole(repeats) or repeats < 1:
        raise ValueError(f"repeats: got {repeats!r}, expected a whole number of at least 1")
    return [int(size) for size in sizes]


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _measured(
    models: dict[str, _Model], graph: Data, batch_sizes: Sequence[int], repeats: int, progress: Progress
) -> list[dict[str, Any]]:
    """One row for each batch size and model, with the percentiles of its times."""
    rows = []
    for batch in batch_sizes:
        for name, (title, call, prepare) in models.items():
            with progress.step(f"{title}, {batch} at once"), torch.inference_mode():
                inputs = (prepare(nodes) for nodes in _random_nodes(graph, batch))
                times = milliseconds(call, inputs, repeats, seconds=_SECONDS)
            figures = {f"p{p}_ms": round(float(np.percentile(times, p)), 5) for p in PERCENTILES}
            rows.append({"model": name, "title": title, "batch_size": batch, "calls": len(times), **figures})
    return rows


def new_node_answer(student: nn.Module, graph: Data, given: Tensor) -> Callable[[Tensor], Tensor]:
    """The work of a student with stored hops for new nodes, as a function from ids, int64 ``[B]``, to logits.

    It gathers what the nodes' neighbours have stored, averages it, and runs the student. The hops that the graph stores
    for these nodes themselves are not used.

    Args:
        student: takes features ``[F]`` and hops ``[D]``.
        graph: graph with ``x [N, F]`` and ``edge_index``.
        given: float ``[N, D]``, what each node passes on (:func:`rbm.training.run_folder.load_encodings`).
    """
    x, around = as_rows(graph.x), Neighborhood(graph.edge_index, graph.num_nodes)

    def answer(nodes: Tensor) -> Tensor:
        counts = around.crow[nodes + 1] - around.crow[nodes]
        rows = torch.repeat_interleave(torch.arange(len(nodes), device=nodes.device), counts)
        first = torch.repeat_interleave(around.crow[nodes] - counts.cumsum(0) + counts, counts)
        sources = around.sources[first + torch.arange(len(rows), device=nodes.device)]
        sums = given.new_zeros(len(nodes), given.shape[1]).index_add_(0, rows, given[sources])
        return student(concat_columns(x[nodes], sums / counts.clamp_min(1)[:, None]))

    return answer


def one_expert_mlp(student: nn.Module) -> nn.Module | None:
    """An untrained MLP of the shape of one expert (or member) of a student; None if the student is itself an MLP."""
    if isinstance(student, EnsembleStudent):
        return student.members[0]
    if not isinstance(student, MixtureStudent):
        return None
    first, last = student.layers[0], student.layers[-1]
    mlp = MLPStudent(student.in_channels, first.out_features, last.out_features, num_layers=len(student.layers))
    mlp.norms = copy.deepcopy(student.norms)
    return mlp.float()  # whatever the process's default dtype is


def latency_table(found: dict[str, Any]) -> Table:
    """The results of :func:`measure_run` for the terminal: times, and ratios of medians to the student's."""
    where = f"{found['dataset']}, {found['nodes']:,} nodes, {found['device']}, threads: {found['threads']}"
    table = Table(title=f"Latency: {markup.escape(where)}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("Nodes", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name in (*(f"p{p}\n(ms)" for p in PERCENTILES), "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    own = {row["batch_size"]: row["p50_ms"] for row in found["rows"] if row["model"] == found["student"]}
    for row in found["rows"]:
        is_student, ratio = row["model"] == found["student"], row["p50_ms"] / own[row["batch_size"]]
        table.add_row(
            f"{row['batch_size']:,}" if is_student else "",
            row["title"],
            *(_readable(row[f"p{p}_ms"]) for p in PERCENTILES),
            f"{ratio:,.0f} x" if ratio >= 10 else f"{ratio:.2g} x",
            style="bold" if is_student else None,
        )
    return table


def _readable(ms: float) -> str:
    """Milliseconds with three digits, but never below a microsecond."""
    return f"{ms:,.0f}" if ms >= 99.95 else f"{ms:.1f}" if ms >= 9.995 else f"{ms:.2f}" if ms >= 0.995 else f"{ms:.3f}"


def _random_nodes(graph: Data, batch: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randint(graph.num_nodes, (batch,), generator=generator).to(graph.x.device)
