"""Predictions for a folder of Parquet files: one after the other, or side by side on a Ray cluster.

Each file of features has one file of predictions, which appears under its name when it is whole and is then never
written again. So a run that was killed goes on with the files that are missing, a worker that died costs its own file
alone, and two writers of one file, of which a cluster may take one for dead, leave the same bytes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from rbm.serving.prediction import Predictor
from rbm.utils.cluster import check_ray, connected
from rbm.utils.files import optional, read_json, write_json
from rbm.utils.locks import is_free, only_process
from rbm.utils.plugins import load_plugin, loaded_plugins
from rbm.utils.progress import Progress
from rbm.utils.tensor_files import fingerprint

MANIFEST = "predictions.json"


@dataclass(frozen=True)
class _Task:
    """One file: whole paths, since workers run in folders of their own."""

    features: str
    out: str
    nodes: str | None
    neighbors: str | None


_Answer = dict[str, Any]  # name, rows, told, error


def predict_folder(
    run: Path | str,
    features: Path | str,
    out: Path | str,
    *,
    nodes: Path | str | None = None,
    neighbors: Path | str | None = None,
    method: str | None = None,
    quantize: str | None = None,
    ray: bool = False,
    workers: int | None = None,
    console: Console | None = None,
) -> int:
    """Let a student of a run folder answer for every ``.parquet`` file of a folder; what is there already, stays.

    Args:
        run: folder of a finished run. With ``ray`` every machine sees it, and the other folders, under the same path.
        features: folder of ``.parquet`` files, rows ``[B, F]`` each, as
            :func:`rbm.serving.prediction.predict_file` takes them. Files whose names begin with ``.`` or ``_`` are
            passed over.
        out: folder to write to, for each file of features a ``.parquet`` of the same name (row of its file, class,
            its probability). It is new, empty, or of an earlier call with the same student and the same features.
        nodes: folder with a ``.npy`` or ``.csv`` for each file of features, named as it is but for the ending: which
            node of the training graph each of its rows is, see :func:`rbm.serving.prediction.predict_file`.
        neighbors: such a folder with the nodes of the training graph that new rows are joined to. Rows are counted
            in their own file.
        method: whose student answers; by default the one that the run keeps.
        quantize: ``int8`` for weights of 8 bits, as in :func:`rbm.load`.
        ray: share the files among workers on the cluster that ``RAY_ADDRESS`` names, or on one of this machine. Each
            loads the student once and uses one thread.
        workers: how many, at most one for each of the cluster's processors; by default as many.
        console: shows progress there, and what is said of single files.

    Returns:
        The number of rows in all files.

    Raises:
        FileNotFoundError: a folder, or a table that belongs to a file of features, does not exist.
        FileExistsError: ``out`` holds other files, or predictions of another student or other features.
        ValueError: a file is damaged or does not fit the run, or an argument makes no sense. Other files are kept.
        BlockingIOError: another process writes to ``out``.
    """
    _check(ray, workers)
    source, out, progress = Path(features), Path(out), Progress(console)
    parquet = optional("pyarrow", "files", f"features folder {source}").parquet
    tasks = _tasks(source, out, nodes, neighbors)
    predictor = Predictor(run, method, quantize)
    rows = {task: _rows(parquet, Path(task.features)) for task in tasks}
    about = {
        "format": 1,
        "student": fingerprint("student", [type(predictor.student).__name__], predictor.student.state_dict().values()),
        "features": {Path(task.features).name: [rows[task], Path(task.features).stat().st_size] for task in tasks},
        "tables": [None if given is None else str(Path(given).resolve()) for given in (nodes, neighbors)],
    }
    if not out.parent.is_dir():
        raise FileNotFoundError(f"predictions folder {out}: folder {out.parent} does not exist; make it")
    out.mkdir(exist_ok=True)
    advice = "wait for it, or name another folder"
    with only_process(out / ".predictions.lock", f"predictions folder {out}", advice):
        _claim(out, about)
        todo = [task for task in tasks if not _is_done(parquet, Path(task.out), rows[task])]
        with progress.count("files", len(tasks)) as advance:
            advance(len(tasks) - len(todo))
            given = {"run": str(Path(run).resolve()), "method": method, "quantize": quantize}
            for answer in _on_ray(todo, given, workers) if ray else _here(todo, predictor):
                if answer["error"]:
                    raise ValueError(answer["error"])
                if answer["told"]:
                    progress.say(f"{answer['name']}: {answer['told']}")
                advance(1)
        for left in out.glob(".*.parquet-*.partial"):  # of workers that were killed
            left.unlink(missing_ok=True)
    return sum(rows.values())


def _check(ray: bool, workers: int | None) -> None:
    if workers is not None and not ray:
        raise ValueError(f"workers: got {workers} without ray; leave it out, or add --ray")
    if workers is not None and workers < 1:
        raise ValueError(f"workers: got {workers}, expected 1 or more")
    if ray:
        check_ray("data")


def _tasks(source: Path, out: Path, nodes: Path | str | None, neighbors: Path | str | None) -> list[_Task]:
    if not source.is_dir():
        found = "is a file, and files are shared out" if source.exists() else "does not exist"
        raise FileNotFoundError(f"features folder {source} {found}; name a folder of .parquet files")
    files = sorted(path for path in source.glob("*.parquet") if not path.name.startswith((".", "_")))
    if not files:
        raise FileNotFoundError(f"features folder {source} holds no .parquet file")
    if out.resolve() == source.resolve():
        raise ValueError(f"predictions folder {out} is the features folder; name another to write to")
    return [
        _Task(
            str(file.resolve()),
            str(out.resolve() / file.name),
            _table("nodes", nodes, file),
            _table("neighbors", neighbors, file),
        )
        for file in files
    ]


def _table(what: str, folder: Path | str | None, features: Path) -> str | None:
    if folder is None:
        return None
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"{what} folder {folder} does not exist; a folder of features has a folder of {what}")
    for ending in (".npy", ".csv"):
        path = Path(folder) / f"{features.stem}{ending}"
        if path.is_file():
            return str(path.resolve())
    raise FileNotFoundError(f"{what} folder {folder} has neither {features.stem}.npy nor .csv, for {features}")


def _rows(parquet: Any, path: Path) -> int:
    try:
        return parquet.read_metadata(path).num_rows
    except Exception as error:  # a damaged file raises nearly anything
        raise ValueError(f"features file {path} cannot be read ({error}); restore it, or take it away") from error


def _is_done(parquet: Any, path: Path, rows: int) -> bool:
    """Whether predictions for all rows are there; what a failing disk has cut short is made again."""
    if not path.exists():
        return False
    try:
        return parquet.read_metadata(path).num_rows == rows
    except Exception:
        return False


def _claim(out: Path, about: dict[str, Any]) -> None:
    """Write down what the folder's predictions are of, or compare it with what an earlier call wrote."""
    path = out / MANIFEST
    if not path.exists():
        if not is_free(out):
            raise FileExistsError(f"predictions folder {out} holds other files; name a new or an empty one")
        write_json(path, about)
        return
    before = read_json(path, "predictions manifest")
    other = [name for name in about if before.get(name) != about[name]]
    if other:
        raise FileExistsError(
            f"predictions folder {out} is of another call, which differs in {' and '.join(other)}; name a new folder"
        )


def _here(tasks: list[_Task], predictor: Predictor) -> Iterator[_Answer]:
    return (_answer(predictor, task) for task in tasks)


def _answer(predictor: Predictor, task: _Task) -> _Answer:
    """The result for one file; an error of its content is reported, and the worker goes on."""
    name = Path(task.features).name
    try:
        rows, told = predictor.predict(task.features, task.out, nodes=task.nodes, neighbors=task.neighbors)
    except (ValueError, FileNotFoundError) as error:
        return {"name": name, "rows": 0, "told": "", "error": str(error)}
    return {"name": name, "rows": rows, "told": told or "", "error": ""}


class _Worker:
    """The state of a Ray worker: one student."""

    def __init__(self, run: str, method: str | None, quantize: str | None, plugins: tuple[str, ...]) -> None:
        for plugin in plugins:
            load_plugin(plugin)
        torch.set_num_threads(1)
        self._predictor = Predictor(run, method, quantize)

    def __call__(self, row: dict[str, Any]) -> _Answer:
        return _answer(self._predictor, _Task(**row))


def _on_ray(tasks: list[_Task], student: dict[str, Any], workers: int | None) -> Iterator[_Answer]:
    """Ray Data gives the file of a worker that died to another one."""
    if not tasks:
        return
    with connected(), _quiet_data():
        import ray

        processors = int(ray.cluster_resources().get("CPU", 1))
        if workers is not None and workers > processors:
            raise ValueError(f"workers: got {workers}, but the cluster has {processors} processors; ask for fewer")
        rows = ray.data.from_items([asdict(task) for task in tasks], override_num_blocks=len(tasks))
        answers = rows.map(
            _Worker,
            fn_constructor_kwargs={**student, "plugins": loaded_plugins()},
            concurrency=min(workers or processors, processors, len(tasks)),
            num_cpus=1,
        )
        yield from answers.iter_rows()


@contextmanager
def _quiet_data() -> Iterator[None]:
    """Ray Data without its own progress bars, which would write over ours."""
    import ray.data

    context = ray.data.DataContext.get_current()
    before, context.enable_progress_bars = context.enable_progress_bars, False
    try:
        yield
    finally:
        context.enable_progress_bars = before
