"""Predictions of a finished student for rows of features from a file, which may be larger than memory.

A student that was trained with encodings needs them in addition to the features. Those of the training graph's nodes
are stored in the run folder. Nodes that arrive later get theirs from their neighbours in the training graph, like
unseen nodes of the inductive setting.
"""

import csv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from rbm.datasets.readers.node_ids import NodeIds
from rbm.nn.newer import SIGNStudent
from rbm.nn.sparse_rows import Features, Rows, as_rows, concat_columns
from rbm.serving.feature_files import FeatureFile, open_features
from rbm.serving.neighbors import Neighbors, Nodes
from rbm.training.run_folder import load, load_encodings
from rbm.utils.files import check_ending, optional, same_file, write_atomically
from rbm.utils.progress import Progress


def predict_file(
    run: Path | str,
    features: Path | str,
    out: Path | str,
    *,
    nodes: Path | str | None = None,
    neighbors: Path | str | None = None,
    method: str | None = None,
    quantize: str | None = None,
    console: Console | None = None,
) -> int:
    """Predict classes for the rows of a file, chunk by chunk.

    Args:
        run: folder of a finished run.
        features: rows ``[B, F]``, see :func:`rbm.serving.feature_files.open_features`. They contain only the features
            if ``nodes`` or ``neighbors`` are given or the student takes no encodings, else features and encodings.
        out: file to write: ``.npy`` (all probabilities, float32 ``[B, C]``), or ``.csv`` or ``.parquet`` (row, class,
            and its probability; with ``nodes``, also the id of the node, if the graph has ids). It is written under a
            temporary name and renamed when complete.
        nodes: the node of the training graph that each row is, see :class:`rbm.serving.neighbors.Nodes`.
        neighbors: the neighbours of new rows in the training graph, see :class:`rbm.serving.neighbors.Neighbors`.
        method: the method of the student; by default the student that the run keeps.
        quantize: ``int8`` for 8-bit weights, as in :func:`rbm.load`.
        console: where progress is shown, and how many and which rows have no neighbour in the file.

    Returns:
        The number of rows, B.

    Raises:
        FileNotFoundError, ValueError, ModuleNotFoundError: a file is missing, damaged, of another kind, or does not fit
            the run. ``out`` is not changed.
    """
    progress = Progress(console)
    predictor = Predictor(run, method, quantize)
    rows, message = predictor.predict(features, out, nodes=nodes, neighbors=neighbors, progress=progress)
    if message is not None:
        progress.say(message)
    return rows


class Predictor:
    """A student of a run folder, loaded once to make predictions for several files.

    Args:
        run: folder of a finished run.
        method: the method of the student; by default the student that the run keeps.
        quantize: ``int8`` for 8-bit weights, as in :func:`rbm.load`.

    Attributes:
        student: the module, in eval mode.
        known: encodings of the training graph's nodes, ``[N, D]``, or None for a student of features alone.
        passed_on: what these nodes pass on to a new neighbour, ``[N, D]``: their encodings, except for a student of
            stored hops; or None.
        ids: ids of these nodes, or None if the graph has none.
    """

    def __init__(self, run: Path | str, method: str | None = None, quantize: str | None = None) -> None:
        self.run = run
        self.student, self.known = load(run, method, quantize=quantize, quiet=True), load_encodings(run, method)
        self.passed_on = load_passed_on(run, method, self.student, self.known)
        self.ids = NodeIds.of_run(run)

    def predict(
        self,
        features: Path | str,
        out: Path | str,
        *,
        nodes: Path | str | None = None,
        neighbors: Path | str | None = None,
        progress: Progress | None = None,
    ) -> tuple[int, str | None]:
        """Predict classes for the rows of one file; arguments and errors are those of :func:`predict_file`.

        Returns:
            The number of rows, and a sentence on the rows without an edge in ``neighbors``, or None.
        """
        out, progress = check_ending("predictions file", out, _WRITE), progress or Progress(None)
        if out.suffix == ".parquet":
            optional("pyarrow", "files", f"predictions file {out}", "or write .csv or .npy")
        if not out.parent.is_dir():
            raise FileNotFoundError(
                f"predictions file {out}: folder {out.parent} does not exist; make it, or name another"
            )
        source, joined = self._open(features, nodes, neighbors)
        for name, given in (("features", source.path), ("nodes", nodes), ("neighbors", neighbors)):
            if given is not None and same_file(out, given):
                raise ValueError(f"predictions file {out} is the {name} file; name another to write to")
        total = 0

        def write(partial: Path) -> None:
            nonlocal total
            names = joined.names if self.ids is not None and isinstance(joined, Nodes) else None
            with _WRITE[out.suffix](partial, names) as add, progress.count("rows", source.rows) as advance:
                for rows in source.pieces():
                    if joined is not None and self.known is not None:
                        rows = concat_columns(rows, joined.encodings(total, total + rows.shape[0]))
                    add(total, predict_probabilities(self.student, rows).numpy())
                    total += rows.shape[0]
                    advance(rows.shape[0])
                if total == 0:
                    nothing = torch.zeros(0, self.student.in_channels)
                    add(0, predict_probabilities(self.student, nothing).numpy())
                if joined is not None:
                    joined.check_rows(total)

        write_atomically(out, write)
        return total, None if joined is None else joined.missing_message(total)

    def _open(
        self, path: Path | str, nodes: Path | str | None, neighbors: Path | str | None
    ) -> tuple[FeatureFile, Nodes | Neighbors | None]:
        """Open the features, and the source of the encodings that they lack.

        A student of features alone takes ``nodes`` only for its output, and only if the nodes have ids.
        """
        width, known, ids = self.student.in_channels, self.known, self.ids
        if known is None:
            names_rows = ids is not None and nodes is not None and neighbors is None
            for name, file in () if names_rows else (("nodes", nodes), ("neighbors", neighbors)):
                if file is not None:
                    raise ValueError(
                        f"{name}: got {file}, but the student of {self.run} takes features alone; leave it out"
                    )
            source = open_features(path, width)
            return source, Nodes(nodes, None, source.rows, ids=ids) if names_rows else None
        alone = width - known.shape[1]
        if alone < 1:
            raise ValueError(
                f"{self.run} holds encodings of {known.shape[1]} columns, and its student takes rows of {width}: they"
                " are files of two runs; restore the run folder"
            )
        if nodes is not None or neighbors is not None:
            source = open_features(path, alone)
            joined = None if neighbors is None else Neighbors(neighbors, self.passed_on, source.rows, ids)
            return source, joined if nodes is None else Nodes(nodes, known, source.rows, joined, ids)
        meaning = (
            f"{alone} features and {known.shape[1]} encodings; or pass the {alone} features alone: for nodes of the"
            f" training graph with --nodes FILE, which says which of its {len(known)} nodes each row is (--nodes all:"
            " all in their order), for new nodes with --neighbors FILE, which says what nodes of that graph each row is"
            " joined to"
        )
        return open_features(path, width, meaning), None


def load_passed_on(run: Path | str, method: str | None, student: nn.Module, encodings: Tensor | None) -> Tensor | None:
    """What the training graph's nodes pass on to a new neighbour, ``[N, D]``: their ``encodings``, except for a student
    of stored hops.
    """
    return load_encodings(run, method, passed_on=True) if isinstance(student, SIGNStudent) else encodings


@torch.inference_mode()
def predict_probabilities(student: nn.Module, x: Features, *, batch_size: int = 65536) -> Tensor:
    """Class probabilities ``[B, C]`` of the rows ``x [B, F]``, dense or sparse, in batches."""
    rows: Rows = as_rows(x)
    starts = range(0, max(1, rows.shape[0]), batch_size)
    return torch.cat([torch.softmax(student(rows[start : start + batch_size]), dim=-1) for start in starts])


# Each yields a function add(first row, probabilities [b, C]), to be called in order. names(start, stop), if given,
# returns the ids of rows, for a column of their own.
_Add = Callable[[int, np.ndarray], None]
_Names = Callable[[int, int], list[str]]


@contextmanager
def _write_csv(path: Path, names: _Names | None) -> Iterator[_Add]:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["row", *(["id"] if names else []), "class", "probability"])

        def add(first: int, probabilities: np.ndarray) -> None:
            classes, shares = probabilities.argmax(axis=1).tolist(), probabilities.max(axis=1).tolist()
            rows = range(first, first + len(classes))
            ids = [names(rows.start, rows.stop)] if names else []
            writer.writerows(zip(rows, *ids, classes, [f"{share:.6f}" for share in shares], strict=True))

        yield add


@contextmanager
def _write_npy(path: Path, names: _Names | None) -> Iterator[_Add]:
    with open(path, "wb") as file:
        shape = None

        def header() -> None:
            # NumPy pads the header so that the first dimension can grow; it is rewritten at the end.
            content = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, content)

        def add(first: int, probabilities: np.ndarray) -> None:
            nonlocal shape
            rows, classes = probabilities.shape
            if shape is None:
                shape = (0, classes)
                header()
            file.write(np.ascontiguousarray(probabilities, dtype="<f4"))
            shape = (first + rows, classes)

        yield add
        file.seek(0)
        header()


@contextmanager
def _write_parquet(path: Path, names: _Names | None) -> Iterator[_Add]:
    import pyarrow
    from pyarrow import parquet

    fields = [("row", pyarrow.int64()), ("class", pyarrow.int32()), ("probability", pyarrow.float32())]
    schema = pyarrow.schema([fields[0], *([("id", pyarrow.string())] if names else []), *fields[1:]])
    with parquet.ParquetWriter(path, schema) as writer:

        def add(first: int, probabilities: np.ndarray) -> None:
            rows = np.arange(first, first + len(probabilities))
            ids = [names(first, first + len(rows))] if names else []
            columns = [rows, *ids, probabilities.argmax(axis=1).astype(np.int32), probabilities.max(axis=1)]
            writer.write_table(pyarrow.table(columns, schema=schema))

        yield add


_WRITE = {".csv": _write_csv, ".npy": _write_npy, ".parquet": _write_parquet}
