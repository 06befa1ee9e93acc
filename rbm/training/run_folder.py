"""The run folder: the files of a run, its checkpoints, and how a student is loaded again.

Nothing is ever unpickled: finished models are safetensors files, the state of an unfinished one is read with
``weights_only``. Files are written beside their place and renamed, so that a kill leaves the old file or the new one.
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

from rbm.config import Config, flat
from rbm.datasets.encodings import hops
from rbm.nn.int8 import check_kind, quantized
from rbm.nn.pretrained import HubMixin
from rbm.nn.saved_student import STUDENT, describe, fill, find_student, read_description, rebuild
from rbm.training.run_files import begin_list, list_file, remove_run
from rbm.utils.files import disk_errors, read_text, write_bytes, write_json
from rbm.utils.locks import is_free, only_process
from rbm.utils.tensor_files import check_finite, read_pickled, read_sealed, sealed


class MetricsWriter(Protocol):
    """Receives what is written to ``metrics.jsonl``, such as :class:`rbm.training.tensorboard.Events`."""

    def add(self, record: dict[str, Any]) -> None:
        """A line was appended."""

    def rewrite(self, records: list[dict[str, Any]]) -> None:
        """These lines are all there are."""


class RunFolder:
    """One run on disk.

    ==========================  ==========================================================================
    ``run.json``                the list of all that follows: what ``--overwrite`` removes
    ``.run.lock``               held by the process whose run it is
    ``config.yaml``             the configuration
    ``metrics.jsonl``           one line an epoch
    ``<phase>.safetensors``     the best state of a finished phase (teacher, then each method) and its result
    ``encodings*.safetensors``  what students see beside the features, for all nodes of the graph
    ``student.json``            method, class and arguments that rebuild each student, first of the one that is kept
    ``summary.json``            results, equal for equal seeds
    ``timings.json``            seconds and latencies, which are not
    ``results.md``              both as a table
    ``checkpoint.pt``           state of the unfinished phase; gone when the run is complete
    ``graph.safetensors``       the graph, where no name or file leads to it (:mod:`rbm.distillation.run_graph`)
    ``report.html``, ``.json``  the report, and what is in it of the graph and the models
    ``student*.pt2``, ``.onnx`` the student for other runtimes, by ``rbm export``
    ``latency.json``            how long predictions take, by ``rbm latency``
    ``*.png``                   plots
    ``auto.yaml``, ``.db``,     with ``auto``: what was searched and chosen, Optuna's trials, and these as a table
    ``auto.csv``                (:mod:`rbm.distillation.auto.folder`)
    ``tensorboard/``            on request: ``metrics.jsonl`` as events of TensorBoard (:mod:`rbm.training.tensorboard`)
    ==========================  ==========================================================================

    Attributes:
        events: receives every line of metrics, or None.

    Raises:
        FileExistsError: the folder holds a run and neither ``resume`` nor ``overwrite`` is given.
        FileNotFoundError: ``resume`` without a run to continue.
        ValueError: ``resume`` with another configuration than the run was started with.
    """

    events: MetricsWriter | None = None

    def __init__(self, path: Path | str, config: Config, *, resume: bool = False, overwrite: bool = False) -> None:
        self.path = Path(path)
        check_place(self.path, resume, overwrite)
        if resume:
            _check_same(Config.from_yaml(self.path / "config.yaml"), config, self.path)
            begin_list(self.path)
        else:
            if not is_free(self.path):
                remove_run(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            begin_list(self.path)
            self.write_text("config.yaml", config.to_yaml())
        list_file(self.path / "metrics.jsonl")  # here, not at every line that is appended

    def finished(self, phase: str) -> dict[str, Any] | None:
        """The result of a phase that is complete, or None."""
        path = self.path / f"{phase}.safetensors"
        return read_sealed(path)[1] if path.is_file() else None

    def save_phase(self, phase: str, model: nn.Module, result: dict[str, Any]) -> None:
        """Write the model of a finished phase together with its result."""
        self._write(f"{phase}.safetensors", sealed(model.state_dict(), result))
        (self.path / "checkpoint.pt").unlink(missing_ok=True)

    def save_tensors(self, name: str, tensors: dict[str, Tensor], values: dict[str, Any] | None = None) -> None:
        """Write ``<name>.safetensors``: tensors, and beside them values that JSON can hold."""
        self._write(f"{name}.safetensors", sealed(tensors, values))

    def load_phase(self, phase: str, model: nn.Module) -> None:
        """Read the model of a finished phase."""
        load_weights(model, self.path / f"{phase}.safetensors")

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        content = io.BytesIO()
        torch.save(state, content)
        self._write("checkpoint.pt", content.getbuffer())

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The state of the unfinished phase, or None where there is none."""
        path = self.path / "checkpoint.pt"
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
        """Drop the lines of ``phase`` from ``epochs`` on: a kill came after they were written, before a checkpoint."""
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
        with disk_errors(path), open(path, "a") as file:
            file.write(json.dumps(record) + "\n")
        if self.events is not None:
            self.events.add(record)


@contextmanager
def open_run(path: Path | str, config: Config, *, resume: bool = False, overwrite: bool = False) -> Iterator[RunFolder]:
    """A run folder that no other process writes to as long as it is open; arguments and errors of :class:`RunFolder`.

    Raises:
        BlockingIOError: another run is at work in the folder; its process is named.
    """
    path = Path(path)
    check_place(path, resume, overwrite)  # before the folder is made, which holds the lock
    path.mkdir(parents=True, exist_ok=True)
    with only_process(path / ".run.lock", f"run folder {path}", "wait until that run has ended, or use another --out"):
        yield RunFolder(path, config, resume=resume, overwrite=overwrite)


def check_place(path: Path, resume: bool, overwrite: bool, begun: str = "config.yaml") -> None:
    """Raise where there is nothing to resume (no file ``begun``), or something that is not to be overwritten."""
    if resume and not (path / begun).is_file():
        raise FileNotFoundError(f"run folder {path} has no {begun}: there is no run to resume{_mistaken(path, begun)}")
    if resume and overwrite:
        raise ValueError(f"run folder {path}: resume continues its run and overwrite replaces it; expected one of them")
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"run folder {path} is a file; use another --out")
    if not resume and not overwrite and not is_free(path):
        raise FileExistsError(
            f"run folder {path} exists and is not empty;"
            " use --resume to continue it, --overwrite to replace it, or another --out"
        )


def _mistaken(path: Path, begun: str) -> str:
    """Advice where a run with a search before it (``auto``) is mistaken for one without, or the other way around."""
    if begun == "config.yaml" and (path / "auto.yaml").is_file():
        return "; its search is not over: resume with auto (--auto)"
    if begun == "auto.yaml" and (path / "config.yaml").is_file():
        return " with auto; its run was started without a search: leave auto out, or use another --out"
    return ""


def read_metrics(folder: Path | str) -> list[dict[str, Any]]:
    """All lines of a run folder's ``metrics.jsonl``; a line that a kill cut short is left out.

    Raises:
        ValueError: a line that is whole does not tell of an epoch.
    """
    path = Path(folder) / "metrics.jsonl"
    if not path.is_file():
        return []
    lines = read_text(path).split("\n")[:-1]  # behind the last newline stands nothing, or what a kill cut short
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
    """A student of a run folder, and the name of its file of encodings without its ending; None for features alone."""

    student: HubMixin
    encodings: str | None


def save_students(folder: Path | str, kept: str, students: Mapping[str, SavedStudent]) -> None:
    """Write ``student.json``, from which :func:`load` rebuilds the module for each ``<method>.safetensors``."""
    described = {method: describe(each.student, encodings=each.encodings) for method, each in students.items()}
    content = {"method": kept, **described.pop(kept), "students": described}
    list_file(Path(folder) / STUDENT)
    write_json(Path(folder) / STUDENT, content)


def load(
    folder: Path | str, method: str | None = None, *, quantize: str | None = None, quiet: bool = False
) -> nn.Module:
    """Load a student of a run folder, or the one that ``save_pretrained`` wrote: a plain module in eval mode, on the
    CPU, made by any method. By default it is the one that the run folder keeps for predictions.

    It maps rows ``[B, student.in_channels]`` to logits ``[B, C]``. The last ``student.encodings`` columns of a row,
    behind the features, are encodings. Where there are any, the logger ``rbm`` says so, unless ``quiet``;
    :func:`load_encodings` gives those of the training graph's nodes. Call it under :func:`torch.inference_mode`, in
    every thread that does: the operators made for answering serve there alone.

    Args:
        folder: a run folder, or one that ``save_pretrained`` wrote.
        method: whose student of a run folder.
        quantize: ``"int8"`` for weights of 8 bits (:func:`rbm.nn.int8.quantized`), a quarter of the memory.
        quiet: say nothing of encodings.

    Raises:
        FileNotFoundError: the folder holds no finished student.
        ValueError: a file of it is corrupt or was not written by this package, it holds no student of ``method``, or
            one that ``quantize`` does not serve.
    """
    check_kind(quantize)
    config, weights = find_student(Path(folder), method)
    student = rebuild(config, weights, method=method)
    if quantize is not None:
        student = quantized(student, quantize)
    if student.encodings and not quiet:
        place = repr(str(folder)) if method is None else f"{str(folder)!r}, {method!r}"
        logging.getLogger("rbm").warning(
            "%s: rows of this %s are %s. rbm.load_encodings(%s) has those of the training graph's nodes; a new node's"
            " are the mean of %s.",
            *(folder, type(student).__name__, student.row, place),
            "its neighbors'" if student.beside == HubMixin.beside else "what its neighbors have under passed_on=True",
        )
    return student


load_student = load  # a name that says what, where the package's own does not stand before it


def load_encodings(folder: Path | str, method: str | None = None, *, passed_on: bool = False) -> Tensor | None:
    """What a student of a run folder sees beside the features, ``[N, D]`` for all nodes of the graph, or None.

    A new node's are the mean of what its neighbours have under ``passed_on``: their own encodings, but for stored hops
    (:mod:`rbm.datasets.encodings.hops`), which are one hop further there.
    """
    config = Path(folder) / STUDENT
    described = read_description(config, method) if config.is_file() else {}
    name = described.get("encodings", "encodings")
    if name is None:
        return None
    if not isinstance(name, str) or name != Path(name).name:
        raise ValueError(f"{config} is damaged: it names the encodings {name!r}, expected a file of its folder")
    path = Path(folder) / f"{name}.safetensors"
    if not path.is_file():
        if "encodings" in described:
            raise FileNotFoundError(f"{path} does not exist, and the student of {config} needs it; restore it")
        return None  # earlier versions did not write the name: theirs is the file that is there, if any
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
    if stored == given:
        return
    was, now = flat(asdict(stored)), flat(asdict(given))
    changed = [f"{name} (was {_shown(was[name])}, now {_shown(now[name])})" for name in was if was[name] != now[name]]
    raise ValueError(
        f"run folder {path} was started with another configuration: {'; '.join(changed)};"
        " resume without these changes, or use another --out"
    )


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
