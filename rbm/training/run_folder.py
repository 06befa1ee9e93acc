"""The run folder: the files of a run, its checkpoints, and functions to load its students.

No file is unpickled: finished models are safetensors files, and checkpoints are read with ``weights_only``. Files are
written under a temporary name and renamed, so that a killed process leaves either the old file or the new one.
"""

import io
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rbm.config import Config, as_text, differences, flat
from rbm.datasets.encodings import hops
from rbm.nn.int8 import check_kind, quantized
from rbm.nn.pretrained import HubMixin
from rbm.nn.saved_student import (
    STUDENT,
    check_described,
    check_exists,
    describe,
    fill,
    find_student,
    read_description,
    rebuild,
)
from rbm.training.run_files import CHECKPOINT, begin_list, is_unused, list_file, remove_partials, remove_run
from rbm.utils.files import (
    absolute,
    as_path,
    check_utf8,
    check_writable,
    disk_errors,
    read_text,
    write_bytes,
    write_json,
)
from rbm.utils.locks import only_process
from rbm.utils.tensor_files import check_finite, read_pickled, read_sealed, sealed, stored_checksum


class MetricsWriter(Protocol):
    """Receives the lines of ``metrics.jsonl``; an example is :class:`rbm.training.tensorboard.Events`."""

    def add(self, record: dict[str, Any]) -> None:
        """Called with each line that is appended."""

    def rewrite(self, records: list[dict[str, Any]]) -> None:
        """Called with all lines when the file is rewritten."""


class RunFolder:
    """The folder of one run on disk.

    ==========================  ==========================================================================
    ``run.json``                list of the files below, which ``--overwrite`` removes
    ``.run.lock``               lock of the process that runs in the folder
    ``config.yaml``             the configuration
    ``inputs.json``             hashes of the graph and of what else was given, and the methods
                                (:mod:`rbm.distillation.run_inputs`)
    ``metrics.jsonl``           one line per epoch
    ``<phase>.safetensors``     the best state of a finished phase (teacher, then each method) and its result
    ``encodings*.safetensors``  the students' encodings of all nodes of the graph
    ``student.json``            method, class and arguments of each student, the kept one first
    ``summary.json``            results, equal for equal seeds
    ``timings.json``            seconds and latencies, which vary between runs
    ``results.md``              both as a table, and the verdict
    ``checkpoint.pt``           state of the unfinished phase; removed when the phase is finished
    ``graph.safetensors``       the graph, if its name does not load it (:mod:`rbm.distillation.run_graph`)
    ``report.html``, ``.json``  the report, and its data
    ``student*.pt2``, ``.onnx`` the student for other runtimes, from ``rbm export``
    ``latency.json``            latencies of predictions, from ``rbm latency``
    ``*.png``                   plots
    ``auto.yaml``, ``.db``,     with ``auto``: the search space and the choice, Optuna's trials, and the trials as a
    ``auto.csv``                table (:mod:`rbm.distillation.auto.folder`)
    ``tensorboard/``            on request: ``metrics.jsonl`` as TensorBoard events (:mod:`rbm.training.tensorboard`)
    ==========================  ==========================================================================

    Attributes:
        events: receives every line of metrics, or None.

    Raises:
        FileExistsError: the folder is not empty and neither ``resume`` nor ``overwrite`` is given.
        FileNotFoundError: ``resume`` is given but there is no run to continue.
        PermissionError: the folder cannot be written to.
        ValueError: ``resume`` is given with a configuration that differs from that of the run.
    """

    events: MetricsWriter | None = None

    def __init__(self, path: Path | str, config: Config, *, resume: bool = False, overwrite: bool = False) -> None:
        self.path = Path(path)
        check_place(self.path, resume, overwrite)
        if resume and (self.path / "config.yaml").is_file():
            _check_same(Config.from_yaml(self.path / "config.yaml"), config, self.path)
            begin_list(self.path)
            remove_partials(self.path)
        else:
            remove_run(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            begin_list(self.path)
            self.write_text("config.yaml", config.to_yaml())
        list_file(self.path / "metrics.jsonl")  # once, and not for every line that is appended

    def finished(self, phase: str) -> dict[str, Any] | None:
        """The result of a finished phase, or None."""
        path = self.path / f"{phase}.safetensors"
        return read_sealed(path)[1] if path.is_file() else None

    def save_phase(self, phase: str, model: nn.Module, result: dict[str, Any]) -> None:
        """Write the model of a finished phase together with its result."""
        self._write(f"{phase}.safetensors", sealed(model.state_dict(), result))
        (self.path / CHECKPOINT).unlink(missing_ok=True)

    def save_tensors(self, name: str, tensors: dict[str, Tensor], values: dict[str, Any] | None = None) -> None:
        """Write ``<name>.safetensors`` with tensors and JSON values."""
        self._write(f"{name}.safetensors", sealed(tensors, values))

    def load_phase(self, phase: str, model: nn.Module) -> None:
        """Read the model of a finished phase."""
        load_weights(model, self.path / f"{phase}.safetensors")

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        content = io.BytesIO()
        torch.save(state, content)
        self._write(CHECKPOINT, content.getbuffer())

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The state of the unfinished phase, or None."""
        path = self.path / CHECKPOINT
        if not path.is_file():
            return None
        try:
            state = read_pickled(path, device=None)
            if not isinstance(state, dict) or "phase" not in state:
                raise ValueError("it holds no state of a phase")
            return state
        except ValueError as error:
            raise ValueError(
                f"{path} is no readable checkpoint ({error}); delete it to start its phase anew"
            ) from error

    def keep_metrics(self, phase: str, epochs: int) -> None:
        """Drop the lines of ``phase`` from epoch ``epochs`` on, which were written after the last checkpoint."""
        records = read_metrics(self.path)
        kept = [r for r in records if r["phase"] != phase or r["epoch"] < epochs]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        self.write_text("metrics.jsonl", text)
        if self.events is not None and len(kept) < len(records):
            self.events.rewrite(kept)

    def write_text(self, name: str, text: str) -> None:
        """Write a file of the run."""
        self._write(name, text.encode())

    def _write(self, name: str, content: bytes | memoryview) -> None:
        list_file(self.path / name)
        write_bytes(self.path / name, content)

    def append_metrics(self, record: dict[str, Any]) -> None:
        path = self.path / "metrics.jsonl"
        with disk_errors(path), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if self.events is not None:
            self.events.add(record)


@contextmanager
def open_run(path: Path | str, config: Config, *, resume: bool = False, overwrite: bool = False) -> Iterator[RunFolder]:
    """Open a run folder and lock it against other processes. Arguments and errors are those of :class:`RunFolder`.

    Raises:
        BlockingIOError: another process runs in the folder; the message names it.
        TypeError: ``path`` is no path.
    """
    path = as_path("folder", path)
    check_place(path, resume, overwrite)  # before the folder is made, which holds the lock
    path.mkdir(parents=True, exist_ok=True)
    with only_process(path / ".run.lock", f"run folder {path}", "wait until that run has ended, or use another --out"):
        yield RunFolder(path, config, resume=resume, overwrite=overwrite)


def check_has_folder(folder: Path | None, **asked: bool | None) -> None:
    """Raise ValueError if one of ``asked`` is true and there is no run folder, which it would read or write."""
    for name, value in asked.items():
        if value and folder is None:
            raise ValueError(f"{name} is True but folder is None; give the run a folder, or leave {name} out")


def check_place(path: Path, resume: bool, overwrite: bool, config_file: str = "config.yaml") -> None:
    """Raise if there is nothing to resume (no ``config_file``), if files would be overwritten without permission, or if
    the folder cannot be written to.

    A run that was killed before it wrote its ``config_file`` lost nothing: it is resumed from its beginning, and a new
    run may take its folder.
    """
    check_utf8("run folder", path)
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"run folder {path} is a file; use another --out")
    was_begun = path.is_dir() and any(path.iterdir()) and is_unused(path)
    if resume and not was_begun and not (path / config_file).is_file():
        raise FileNotFoundError(
            f"run folder {path} has no {config_file}: there is no run to resume{_mistaken(path, config_file)}"
        )
    if resume and overwrite:
        raise ValueError(f"run folder {path}: resume continues its run and overwrite replaces it; expected one of them")
    if not resume and not overwrite and not is_unused(path):
        raise FileExistsError(
            f"run folder {path} exists and is not empty;"
            " use --resume to continue it, --overwrite to replace it, or another --out"
        )
    check_writable(f"run folder {path}", path, "use another --out, or allow it")


def _mistaken(path: Path, config_file: str) -> str:
    """Advice if a run with a search (``auto``) is mistaken for one without, or the other way around."""
    if config_file == "config.yaml" and (path / "auto.yaml").is_file():
        return "; its search is not over: resume with auto (--auto)"
    if config_file == "auto.yaml" and (path / "config.yaml").is_file():
        return " with auto; its run was started without a search: leave auto out, or use another --out"
    # A new run refuses a folder with files and advises --resume.
    return "; start it anew with --overwrite instead of --resume" if not is_unused(path) else ""


def read_metrics(folder: Path | str) -> list[dict[str, Any]]:
    """All lines of a run folder's ``metrics.jsonl``, without an incomplete last line.

    Raises:
        ValueError: a complete line does not describe an epoch.
    """
    path = as_path("folder", folder) / "metrics.jsonl"
    if not path.is_file():
        return []
    lines = read_text(path).split("\n")[:-1]  # after the last newline is nothing, or an incomplete line
    return [_record(path, number, line) for number, line in enumerate(lines, 1)]


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
        if isinstance(record["phase"], str) and isinstance(record["epoch"], int):
            return record
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ValueError(
        f"{path}: line {number} is {line[:60]!r}, expected an epoch of a phase, as a run writes it; remove the line"
    )


class SavedStudent(NamedTuple):
    """A student of a run folder, and the stem of its encodings file; None if it takes only features."""

    student: HubMixin
    encodings: str | None


def save_students(folder: Path | str, kept: str, students: Mapping[str, SavedStudent]) -> None:
    """Write ``student.json``, from which :func:`load` rebuilds the module of each ``<method>.safetensors``. It has the
    checksums of these files and of the encodings, which must be written before.
    """
    described = {}
    for method, (student, encodings) in students.items():
        names = [f"{name}.safetensors" for name in (method, encodings) if name is not None]
        files = {name: stored_checksum(Path(folder) / name) for name in names}
        described[method] = describe(student, encodings=encodings, files=files)
    content = {"method": kept, **described.pop(kept), "students": described}
    list_file(Path(folder) / STUDENT)
    write_json(Path(folder) / STUDENT, content)


def load(
    folder: Path | str, method: str | None = None, *, quantize: str | None = None, quiet: bool = False
) -> nn.Module:
    """Load a student from a run folder, or from a folder written by ``save_pretrained``. It is a plain module in eval
    mode and on the CPU.

    The student maps rows ``[B, student.in_channels]`` to logits ``[B, C]``. The last ``student.encodings`` columns of a
    row, after the features, are encodings. If there are any, the logger ``rbm`` says so, unless ``quiet`` is set;
    :func:`load_encodings` returns the encodings of the nodes of the training graph. Call the student under
    :func:`torch.inference_mode`, which must be set in every thread: the operators for inference need it. It may be
    loaded in that mode too.

    Args:
        folder: a run folder, or one written by ``save_pretrained``.
        method: the method whose student is loaded from a run folder; by default the one kept for predictions.
        quantize: ``"int8"`` for 8-bit weights (:func:`rbm.nn.int8.quantized`), a quarter of the memory.
        quiet: do not log the message about encodings.

    Raises:
        FileNotFoundError: the folder has no finished student.
        ValueError: a file is corrupt or was not written by this package, the folder has no student of ``method``, or
            ``quantize`` does not support the student.
    """
    check_kind(quantize)
    config, weights = find_student(as_path("folder", folder), method)
    student = rebuild(config, weights, method=method)
    if quantize is not None:
        student = quantized(student, quantize)
    if student.encodings and not quiet:
        place = repr(str(folder)) if method is None else f"{str(folder)!r}, {method!r}"
        logging.getLogger("rbm").warning(
            "%s: rows of this %s are %s. rbm.load_encodings(%s) has those of the training graph's nodes; a new node's"
            " are the mean of %s.",
            *(folder, type(student).__name__, student.row, place),
            "its neighbours'" if student.beside == HubMixin.beside else "what its neighbours have under passed_on=True",
        )
    return student


load_student = load  # a more explicit name, for ``from rbm import load_student``


def load_encodings(folder: Path | str, method: str | None = None, *, passed_on: bool = False) -> Tensor | None:
    """The encodings of a student of a run folder, ``[N, D]`` for all nodes of the graph; None if it takes none.

    The encodings of a new node are the mean over its neighbours of ``load_encodings(..., passed_on=True)``. These are
    the neighbours' own encodings, except for stored hops (:mod:`rbm.datasets.encodings.hops`), which are shifted by one
    hop.

    Arguments are those of :func:`load`. A folder written by ``save_pretrained`` holds no encodings: None.

    Raises:
        FileNotFoundError: the folder has no finished student, or its encodings are missing.
        ValueError: a file is corrupt, or the folder has no student of ``method``.
    """
    folder = as_path("folder", folder)
    check_exists(folder)
    config = folder / STUDENT
    described = read_description(config, method) if config.is_file() else {}
    name = described.get("encodings", "encodings")
    if name is None:
        return None
    if not isinstance(name, str) or name != Path(name).name:
        raise ValueError(f"{config} is damaged: it names the encodings {name!r}, expected a file of its folder")
    path = folder / f"{name}.safetensors"
    if not path.is_file():
        if "encodings" in described:
            raise FileNotFoundError(f"{path} does not exist, and the student of {config} needs it; restore it")
        find_student(folder, method)  # raises an error if there is none
        return None  # earlier versions did not write the name: theirs is the file that is there, if any
    check_described(config, described, path)
    tensors, _ = read_sealed(path, foreign=True)  # version 0.1.0 wrote no metadata into this file
    known = tensors.get("encodings")
    if known is None or known.dim() != 2 or not known.is_floating_point():
        found = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"{path} holds no encodings of this package: it has {found or 'nothing'}")
    check_finite(path, tensors)
    if (features := tensors.get("features")) is None or not passed_on:
        return known
    fits = features.dim() == 2 and len(features) == len(known) and features.shape[1] > 0
    if not fits or known.shape[1] % features.shape[1] or features.dtype != known.dtype:
        raise ValueError(
            f"{path} is damaged: it holds stored hops {list(known.shape)} and features {list(features.shape)}, expected"
            " as many rows, and a multiple of their columns; restore it"
        )
    return hops.passed_on(features, known)


def load_weights(model: nn.Module, path: Path) -> None:
    """Fill ``model`` from a safetensors file of this package; ValueError where the file is corrupt or foreign."""
    fill(model, read_sealed(path)[0], path)


def _check_same(stored: Config, given: Config, path: Path) -> None:
    was, now = flat(asdict(stored)), flat(asdict(given))
    for name in ("dataset", "root"):  # earlier versions stored paths as they were given
        if was[name] and now[name] and absolute(name, was[name]) == now[name]:
            was[name] = now[name]
    changed = [f"{name} (was {as_text(old)}, now {as_text(new)})" for name, old, new in differences(was, now)]
    if not changed:
        return
    raise ValueError(
        f"run folder {path} was started with another configuration: {'; '.join(changed)};"
        f" give them as they were, as --resume --out {path} does without settings, or use another --out"
    )
