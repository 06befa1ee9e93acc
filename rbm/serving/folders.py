"""Predictions for a folder of Parquet files: one after the other, or in parallel on a Ray cluster.

Each file of features has one file of predictions, which appears under its name when it is complete and is then never
written again. A killed run therefore continues with the missing files, and a worker that dies loses only its current
file. If a cluster mistakes a worker for dead and two workers write the same file, both write the same bytes.
"""

import logging
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from rbm.serving.prediction import Predictor
from rbm.utils.cluster import check_ray, connected
from rbm.utils.files import as_path, optional, read_json, write_json
from rbm.utils.locks import is_free, only_process
from rbm.utils.plugins import load_plugin, loaded_plugins
from rbm.utils.progress import Progress
from rbm.utils.tensor_files import fingerprint

MANIFEST = "predictions.json"
_BLOCK_BYTES = 2**20
_TIMES = "times"  # modification times of features, which may change with a copy: they are no reason to refuse


@dataclass(frozen=True)
class _Task:
    """One file to process, with absolute paths, since workers run in other folders."""

    features: str
    out: str
    nodes: str | None
    neighbors: str | None


_Answer = dict[str, str]  # name, message, error


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
    console: Console | Literal["auto"] | None = None,
) -> int:
    """Predict classes for every ``.parquet`` file of a folder; files with finished predictions are skipped.

    Args:
        run: folder of a finished run. With ``ray``, every machine must see this and the other folders under the same
            path.
        features: folder of ``.parquet`` files with rows ``[B, F]``, as for
            :func:`rbm.serving.prediction.predict_file`. Files whose names begin with ``.`` or ``_`` are skipped.
        out: folder to write to: for each file of features, a ``.parquet`` of the same name (row in the file, class, and
            its probability). The folder must be new, empty, or from an earlier call with the same student and features.
        nodes: folder with a ``.npy`` or ``.csv`` per file of features, with the same name except for the ending, which
            gives the training graph's node of each row, see :func:`rbm.serving.prediction.predict_file`.
        neighbors: such a folder with the neighbours of new rows in the training graph. Rows are numbered per file.
        method: the method of the student; by default the student that the run keeps.
        quantize: ``int8`` for 8-bit weights, as in :func:`rbm.load`.
        ray: distribute the files over workers on the cluster of ``RAY_ADDRESS``, or on this machine. Each worker loads
            the student once and uses one thread.
        workers: the number of workers, at most (and by default) one per processor of the cluster.
        console: where progress and messages about single files are shown.

    Returns:
        The number of rows in all files.

    Raises:
        FileNotFoundError: a folder, or a table that belongs to a file of features, does not exist.
        FileExistsError: ``out`` contains other files, or predictions of another student or for other features.
        ValueError: a file is damaged or does not fit the run, or an argument is invalid. Finished files are kept.
        BlockingIOError: another process writes to ``out``.
    """
    _check(ray, workers)
    source, out, progress = as_path("features folder", features), as_path("predictions folder", out), Progress(console)
    optional("pyarrow", "files", f"features folder {source}")
    from pyarrow import parquet  # pyarrow does not import it by itself

    tasks = _tasks(source, out, nodes, neighbors)
    predictor = Predictor(run, method, quantize)
    rows = {task: _rows(parquet, Path(task.features)) for task in tasks}
    about = {
        "format": 2,
        "student": fingerprint("student", [type(predictor.student).__name__], predictor.student.state_dict().values()),
        "features": {
            Path(task.features).name: [rows[task], *_described(Path(task.features), _BLOCK_BYTES)] for task in tasks
        },
        "tables": {
            name: [[*_described(Path(getattr(task, name)))] for task in tasks]
            for name, given in (("nodes", nodes), ("neighbors", neighbors))
            if given is not None
        },
        _TIMES: {Path(task.features).name: Path(task.features).stat().st_mtime_ns for task in tasks},
    }
    if not out.parent.is_dir():
        raise FileNotFoundError(f"predictions folder {out}: folder {out.parent} does not exist; make it")
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"predictions folder {out} is a file; name a folder, new or empty")
    out.mkdir(exist_ok=True)
    advice = "wait for it, or name another folder"
    with only_process(out / ".predictions.lock", f"predictions folder {out}", advice):
        before = _claim(out, about)
        unfinished = [task for task in tasks if not _is_done(parquet, Path(task.out), rows[task])]
        finished = {Path(task.features).name for task in tasks if task not in unfinished}
        _warn_of_changed(source, out, before.get(_TIMES, {}), about[_TIMES], finished)
        if finished:
            progress.say(f"{len(finished)} of {len(tasks)} files have predictions from an earlier call, which stay")
        with progress.count("files", len(tasks)) as advance:
            advance(len(tasks) - len(unfinished))
            if ray:
                student = {"run": str(as_path("run", run).resolve()), "method": method, "quantize": quantize}
                answers = _on_ray(unfinished, student, workers)
            else:
                answers = (_answer(predictor, task) for task in unfinished)
            for answer in answers:
                if answer["error"]:
                    raise ValueError(answer["error"])
                if answer["message"]:
                    progress.say(f"{answer['name']}: {answer['message']}")
                advance(1)
        for left in out.glob(".*.parquet-*.partial"):  # left by killed workers
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
    if not (place := as_path(f"{what} folder", folder)).is_dir():
        raise FileNotFoundError(f"{what} folder {folder} does not exist; a folder of features has a folder of {what}")
    for ending in (".npy", ".csv"):
        path = place / f"{features.stem}{ending}"
        if path.is_file():
            return str(path.resolve())
    raise FileNotFoundError(f"{what} folder {folder} has neither {features.stem}.npy nor .csv, for {features}")


def _rows(parquet: Any, path: Path) -> int:
    try:
        return parquet.read_metadata(path).num_rows
    except Exception as error:  # a damaged file raises nearly anything
        raise ValueError(f"features file {path} cannot be read ({error}); restore it, or remove it") from error


def _described(path: Path, last: int | None = None) -> tuple[int, int]:
    """The size of a file, and a checksum of its content, or of its ``last`` bytes alone.

    The end of a Parquet file has the extremes of each column, and the last numbers of a column: the same rows in
    another order have the same size and the same extremes.
    """
    size, checksum = path.stat().st_size, 0
    with open(path, "rb") as file:
        file.seek(0 if last is None else max(0, size - last))
        while block := file.read(_BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
    return size, checksum


def _is_done(parquet: Any, path: Path, rows: int) -> bool:
    """Whether a file has predictions for all rows; a file truncated by a failing disk is written again."""
    if not path.exists():
        return False
    try:
        return parquet.read_metadata(path).num_rows == rows
    except Exception:
        return False


def _claim(out: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Record what the folder's predictions were made from, or compare it with the record of an earlier call.

    Returns:
        The record in the folder, of this call or the earlier one.
    """
    path = out / MANIFEST
    if not path.exists():
        for left in out.glob(f".{MANIFEST}-*.partial"):  # of a call killed here; this one holds the lock
            left.unlink(missing_ok=True)
        if not is_free(out):
            raise FileExistsError(f"predictions folder {out} holds other files; name a new or an empty one")
        write_json(path, about)
        return about
    before = read_json(path, "predictions manifest")
    other = [name for name in about if name != _TIMES and before.get(name) != about[name]]
    if other:
        raise FileExistsError(
            f"predictions folder {out} is of another call, which differs in {' and '.join(other)}; name a new folder"
        )
    return before


def _warn_of_changed(source: Path, out: Path, was: dict[str, int], now: dict[str, int], finished: set[str]) -> None:
    """Log which features were written again since a call that described them: perhaps with other rows in the middle."""
    changed = sorted(name for name in finished if was.get(name, now[name]) != now[name])
    if changed:
        logging.getLogger("rbm").warning(
            "features folder %s: %d of the files with predictions in %s were modified since the first call, such as %s."
            " Their size and their end are the same, and the predictions stay; if rows changed, name a new folder.",
            *(source, len(changed), out, changed[0]),
        )


def _answer(predictor: Predictor, task: _Task) -> _Answer:
    """The result for one file; an error in its content is reported, and the worker continues."""
    name = Path(task.features).name
    try:
        _, message = predictor.predict(task.features, task.out, nodes=task.nodes, neighbors=task.neighbors)
    except (ValueError, FileNotFoundError) as error:
        return {"name": name, "message": "", "error": str(error)}
    return {"name": name, "message": message or "", "error": ""}


class _Worker:
    """A Ray worker, which holds one student."""

    def __init__(self, run: str, method: str | None, quantize: str | None, plugins: tuple[str, ...]) -> None:
        for plugin in plugins:
            load_plugin(plugin)
        torch.set_num_threads(1)
        self._predictor = Predictor(run, method, quantize)

    def __call__(self, row: dict[str, Any]) -> _Answer:
        return _answer(self._predictor, _Task(**row))


def _on_ray(tasks: list[_Task], student: dict[str, Any], workers: int | None) -> Iterator[_Answer]:
    """Run the tasks with Ray Data, which reassigns the file of a worker that died."""
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
    """Turn off Ray Data's own progress bars, which would overwrite ours."""
    import ray.data

    context = ray.data.DataContext.get_current()
    before, context.enable_progress_bars = context.enable_progress_bars, False
    try:
        yield
    finally:
        context.enable_progress_bars = before
