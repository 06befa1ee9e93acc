"""Resumable runs over datasets, settings, variants and seeds; each model is a row (:mod:`rbm.experiments.results`)."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Literal

from rich.console import Console
from torch_geometric.data import Data

from rbm.config import Config
from rbm.datasets import check_files
from rbm.datasets.load import graph_checksum, graph_settings, load_configured_dataset
from rbm.datasets.registry import short_name
from rbm.distillation.distill import distill
from rbm.distillation.verdict import LABELS_ALONE
from rbm.experiments.experiment import Experiment, Task
from rbm.experiments.results import append_rows, config_fingerprint, figures, made_by, read_rows, row_key
from rbm.utils.arguments import usable_device
from rbm.utils.cache import cache_or_temporary
from rbm.utils.files import as_path, check_writable
from rbm.utils.locks import only_process
from rbm.utils.parallel import worker_pool
from rbm.utils.progress import count_runs

_TEACHER = "teacher"


def run_experiment(
    experiment: Experiment | Sequence[Experiment],
    out: Path | str,
    *,
    root: str | None = None,
    cache: Path | str | None = None,
    jobs: int = 1,
    device: str = "cpu",
    console: Console | Literal["auto"] | None = None,
) -> list[dict[str, str]]:
    """Run what ``out`` does not contain yet, and append a row for each model as soon as it is trained.

    Args:
        experiment: what to run; several experiments are interleaved by seed.
        out: CSV file with :data:`rbm.experiments.results.COLUMNS`; created if missing. Running an experiment again
            with the same file continues it.
        root: folder of the datasets.
        cache: folder of cached teachers and encodings, shared by all models; without one, they are cached only for the
            duration of the experiment.
        jobs: number of parallel processes, which share the cores.
        device: device on which models are trained.
        console: where progress is shown; ``"auto"`` as in :func:`rbm.distill`.

    Returns:
        All rows of the experiments, including those of earlier runs.

    Raises:
        ValueError: ``out`` is not such a file, or contains a row of this experiment made with other settings, or of a
            graph file that has changed since; or the device is not usable.
        FileNotFoundError: a graph's files are missing; raised before anything runs.
        BlockingIOError: another process is adding rows to ``out``.
        PermissionError, NotADirectoryError: ``out`` cannot be written; raised before anything runs.
    """
    device = usable_device(device)
    out = as_path("results file", out)
    if out.is_symlink():
        out = out.resolve()  # so that one lock holds, and the file itself is written, whichever path is given
    if out.is_dir():
        raise IsADirectoryError(f"results file {out} is a folder; give a file by --out")
    experiments = [experiment] if isinstance(experiment, Experiment) else list(experiment)
    remembered_dataset.cache_clear()  # a file may have changed since an earlier call
    _, waiting = _plan(experiments, out, jobs)
    for name, protocol in dict.fromkeys((task.dataset, planned.protocol) for planned, task, _ in waiting):
        check_files(name, root, protocol=protocol)
    remedy = "give another file by --out, or allow it"
    check_writable(f"results file {out}", out.parent, remedy)
    if out.exists() and not os.access(out, os.W_OK):
        raise PermissionError(f"results file {out}: no permission to write to it; {remedy}")
    out.parent.mkdir(parents=True, exist_ok=True)
    advice = "more --jobs share one file; wait until that process has ended, or give another file by --out"
    with only_process(out.with_name(f".{out.name}.lock"), f"results file {out}", advice):
        return _run_missing(experiments, out, root, cache, jobs, device, console)


def _plan(
    experiments: list[Experiment], out: Path, jobs: int
) -> tuple[dict[tuple, dict[str, str]], list[tuple[Experiment, "Task", str]]]:
    """The rows of a file by their keys, and the missing models in the order in which they will run."""
    done: dict[tuple, dict[str, str]] = {}
    rows = read_rows(out)
    for experiment in experiments:
        done |= check_rows(rows, experiment)
    tasks = _tasks(experiments)
    waiting = [(experiment, task, method) for experiment, task in tasks for method in _missing(task, experiment, done)]
    # A student that is trained brings its teacher's row; one that was removed from the file is trained again by itself.
    teachers = {row_key(_expected(task, experiment)[0]): (experiment, task, _TEACHER) for experiment, task in tasks}
    brought = {row_key(_expected(task, experiment)[0]) for experiment, task, _ in waiting}
    waiting += [what for key, what in teachers.items() if key not in done and key not in brought]
    if jobs > 1:  # method by method: processes that start with the same teacher would wait for it
        waiting.sort(key=lambda what: (what[0].seeds.index(what[1].seed), (*what[0].methods, _TEACHER).index(what[2])))
    return done, waiting


def _tasks(experiments: list[Experiment]) -> list[tuple[Experiment, "Task"]]:
    """The tasks of several experiments, interleaved by seed."""
    tasks = [(experiment, task) for experiment in experiments for task in experiment.tasks()]
    return sorted(tasks, key=lambda pair: pair[0].seeds.index(pair[1].seed))


def _run_missing(
    experiments: list[Experiment],
    out: Path,
    root: str | None,
    cache: Path | str | None,
    jobs: int,
    device: str,
    console: Console | Literal["auto"] | None,
) -> list[dict[str, str]]:
    tasks = _tasks(experiments)
    done, waiting = _plan(experiments, out, jobs)
    total = sum(len(experiment.methods) for experiment, _ in tasks)
    finished = total - len(waiting)
    with count_runs(console, "runs", total) as bar, cache_or_temporary(cache) as folder:
        bar.update(finished, "")
        arguments = [(*what, root, folder, device, graph_checksum(what[1].dataset)) for what in waiting]
        with closing(_results(arguments, jobs)) as results:  # ends the workers, even if a row cannot be written
            for task, rows in results:
                new = [row for row in rows if row_key(row) not in done]
                append_rows(out, new)
                done |= {row_key(row): row for row in new}
                finished += 1
                bar.update(finished, f"{short_name(task.dataset)} {task.setting} {task.variant} seed {task.seed}")
    keys = {row_key(row) for experiment, task in tasks for row in _expected(task, experiment)}
    return [row for key, row in done.items() if key in keys]


def _results(arguments: list[tuple], jobs: int) -> Iterator[tuple[Task, list[dict[str, str]]]]:
    if jobs == 1:
        for given in arguments:
            yield given[1], _run_task(*given)
        return
    with worker_pool(jobs) as pool:
        futures = {pool.submit(_run_task, *given): given[1] for given in arguments}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _run_task(
    experiment: Experiment,
    task: Task,
    method: str,
    root: str | None,
    cache: Path,
    device: str,
    graph: str,
) -> list[dict[str, str]]:
    """Train a student, and return its row and its teacher's; or only a teacher, as the method ``teacher``. ``graph`` is
    the checksum of the graph's files.
    """
    config = experiment.config(task)
    result = distill(
        remembered_dataset(graph_settings(config, root), device),
        config=config,
        methods=[LABELS_ALONE if method == _TEACHER else method],  # that MLP is trained in no time, and has no row
        labels_alone=config.distill.source == "auto",  # "auto" needs that MLP
        cache=cache,
        measure_latency=False,
        console=None,
    )
    return [
        {**row, **figures(result.summary[made], result.timings[made]), **made_by(config, made, graph)}
        for row in _expected(task, experiment, [] if method == _TEACHER else [method])
        for made in [row["method"]]
    ]


@lru_cache(maxsize=2)
def remembered_dataset(settings: Config, device: str) -> Data:
    """Load the graph of :func:`rbm.datasets.load.graph_settings` onto a device; the process keeps the last two."""
    return load_configured_dataset(settings).to(device)


def _expected(task: Task, experiment: Experiment, methods: list[str] | None = None) -> list[dict[str, str]]:
    """The keys of a task's rows. The teacher's row is the same for all variants of the students."""
    shared = {name: getattr(experiment, name) for name in ("protocol", "teacher", "preset")}
    shared |= {"dataset": task.dataset, "setting": task.setting, "seed": str(task.seed)}
    students = experiment.methods if methods is None else methods
    rows = [{"method": _TEACHER, "variant": ""}, *({"method": m, "variant": task.variant} for m in students)]
    return [{**shared, **row} for row in rows]


def _missing(task: Task, experiment: Experiment, done: dict[tuple, dict[str, str]]) -> list[str]:
    rows = _expected(task, experiment)[1:]
    return [row["method"] for row in rows if row_key(row) not in done]


def check_rows(rows: list[dict[str, str]], experiment: Experiment) -> dict[tuple, dict[str, str]]:
    """The rows by their keys.

    Raises:
        ValueError: a row belongs to this experiment by its key, but was made with other settings; or a graph's files
            have changed since one of its rows was written.
    """
    done = {row_key(row): row for row in rows}
    graphs = {name: graph_checksum(name) for name in experiment.datasets}
    for row in rows:
        # Rows of other seeds and methods count too: a table would compare models of two graphs.
        was, now = row["config"].partition("-")[2], graphs.get(row["dataset"])
        if was and now and was != now:
            raise ValueError(
                f"the results file holds rows of another graph: {row['dataset']} has changed since, or is another file"
                f" ({was}, now {now}); give this experiment a file of its own, or remove the rows of that graph"
            )
    for task in experiment.tasks():
        config = experiment.config(task)
        for row in _expected(task, experiment):
            if (known := done.get(row_key(row))) is None:
                continue
            expected = config_fingerprint(config, row["method"])
            # The teacher's too: rows of methods without a teacher do not tell that their file has another one.
            if (was := known["config"].partition("-")[0]) != expected:
                # All variants share the teacher, so another name for the variant would find the same row.
                rename = "" if row["method"] == "teacher" else ", or its variant another name"
                raise ValueError(
                    f"the results file holds {' '.join(row_key(row))} from other settings ({was}, now"
                    f" {expected}); give this experiment a file of its own{rename}"
                )
    return done
