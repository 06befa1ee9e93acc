"""Predictions of a finished student for rows of features from a file, which may be larger than memory.

A student that was trained with encodings needs them in addition to the features. Those of the training graph's nodes
are stored in the run folder. Nodes that arrive later get theirs from their neighbours in the training graph, like
unseen nodes of the inductive setting.
"""

from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from torch import Tensor, nn

from rbm.datasets.readers.node_ids import NodeIds
from rbm.nn.sparse_rows import Features, Rows, as_rows, concat_columns
from rbm.nn.students import SIGNStudent
from rbm.serving.feature_files import FeatureFile, open_features
from rbm.serving.neighbors import Neighbors, Nodes
from rbm.serving.prediction_files import Add, check_predictions, write_predictions
from rbm.training.run_folder import load, load_encodings
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
    console: Console | Literal["auto"] | None = None,
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
        self.ids = NodeIds.of_run(run, None if self.known is None else len(self.known))

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
        inputs = {"features": features, "nodes": nodes, "neighbors": neighbors}
        out, progress = check_predictions(out, inputs), progress or Progress(None)
        source, joined = self._open(features, nodes, neighbors)
        total = 0

        def fill(add: Add) -> None:
            nonlocal total
            with progress.count("rows", source.rows) as advance:
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

        write_predictions(out, fill, joined.names if self.ids is not None and isinstance(joined, Nodes) else None)
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
