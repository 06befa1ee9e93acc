"""Predictions for all nodes of a graph that has grown since training.

New nodes get their encodings by the rules for unseen nodes of the inductive setting
(:mod:`rbm.datasets.encodings.grown`). On the run's own graph, the predictions are therefore those of the evaluation,
also for students that count labels on the whole graph. :class:`rbm.serving.neighbors.Neighbors` only reads the edges
between new nodes and nodes of the training graph, and needs no other part of it.
"""

import logging
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch_geometric.data import Data

from rbm.config import Config
from rbm.datasets.encodings.grown import GrownGraph, means_on
from rbm.datasets.readers.node_ids import NodeIds
from rbm.datasets.readers.user_files import PART_OF
from rbm.datasets.splits import GraphSplit
from rbm.datasets.user_graph import load_unlabelled_graph
from rbm.datasets.validation import check_finite_features
from rbm.distillation.registry import METHODS
from rbm.distillation.run_graph import split_of_run
from rbm.nn.saved_student import STUDENT, read_description
from rbm.nn.sparse_rows import Rows, as_rows, concat_columns, packed, to_dense
from rbm.serving.neighbors import NAMED, unencoded_message
from rbm.serving.prediction import predict_probabilities
from rbm.serving.prediction_files import Add, check_predictions, write_predictions
from rbm.training.run_folder import load, load_encodings
from rbm.utils.chunks import row_chunks
from rbm.utils.files import as_path, same_file
from rbm.utils.progress import Progress

_ROWS_AT_ONCE, _NUMBERS_AT_ONCE = 2**14, 2**24
_ABSENT_NAMED = 5  # nodes of the run that the graph lacks and a message names


def predict_graph(
    run: Path | str,
    graph: Path | str,
    out: Path | str,
    *,
    root: Path | str | None = None,
    method: str | None = None,
    quantize: str | None = None,
    console: Console | Literal["auto"] | None = None,
) -> int:
    """Predict classes for all nodes of a graph that contains the graph of a run.

    Args:
        run: folder of a finished run.
        graph: file or folder as for :func:`rbm.load_graph`; labels are not needed. If both graphs have ids, the nodes
            of the run's graph are found by them. Otherwise they are the first nodes, in the same order.
        out: file to write, one row per node in the order of the graph, with its id if the graph has ids; see
            :func:`rbm.serving.prediction.predict_file`.
        root: folder with the raw files of the run's dataset; by default that of the run.
        method: the method of the student; by default the student that the run keeps.
        quantize: ``int8`` for 8-bit weights, as in :func:`rbm.load`.
        console: where progress is shown, and how many and which new nodes have zeros for encodings.

    Returns:
        The number of nodes.

    Raises:
        FileNotFoundError, ModuleNotFoundError: a file or an optional package is missing.
        ValueError: the graph cannot be read, does not contain the run's graph, or is not one of the student's features;
            or the run was evaluated on validation nodes. ``out`` is not changed.
    """
    run, progress, message = as_path("run", run), Progress(console), None
    out = check_predictions(out, {"graph": graph})
    _check_no_part(out, graph)
    student = load(run, method, quantize=quantize, quiet=True)
    if not (run / STUDENT).is_file():
        raise ValueError(
            f"run: {run} holds a student alone, as save_pretrained writes it, and not its graph and its encodings; name"
            " its run folder, or predict from a file of rows (rbm predict RUN FEATURES)"
        )
    config = Config.from_yaml(run / "config.yaml")
    data = load_unlabelled_graph(graph, sparse_features=config.sparse_features, undirected=config.undirected)
    stored, rows, ids = load_encodings(run, method), packed(data.x), data.get("node_ids")
    alone = student.in_channels - (0 if stored is None else stored.shape[1])
    if data.num_features != alone:
        raise ValueError(
            f"graph: {graph} has {data.num_features} features, and the student of {run} takes {alone}; give the"
            " features of training, in the same order"
        )
    check_finite_features(data.x, f"graph: {graph}, x")
    if stored is not None:
        method = read_description(run / STUDENT, method)["method"]
        with progress.step("encodings"):
            encodings, new = _encodings(run, config, method, stored, data, graph, root)
            missing = new[(encodings[new] == 0).all(dim=1)]
            reason = "are near no node that training saw"
            rows = concat_columns(rows, encodings)
            message = unencoded_message("new node", len(missing), len(new), reason, missing[:NAMED].tolist(), ids)

    def fill(add: Add) -> None:
        with progress.count("nodes", data.num_nodes) as advance:
            for start in range(0, data.num_nodes, _ROWS_AT_ONCE):
                some = rows[start : start + _ROWS_AT_ONCE]
                add(start, predict_probabilities(student, some).numpy())
                advance(some.shape[0])

    write_predictions(out, fill, None if ids is None else lambda start, stop: ids.names[start:stop].to_pylist())
    if message is not None:
        progress.say(message)
    return data.num_nodes


def _check_no_part(out: Path, graph: Path | str) -> None:
    """Raise ValueError if the predictions would be a part of the graph, which may be a folder of files."""
    if Path(graph).is_dir() and same_file(out.parent, graph) and out.stem in PART_OF:
        raise ValueError(f"predictions file {out} is a part of the graph {graph}; name another to write to")


def _encodings(
    run: Path, config: Config, method: str, stored: Tensor, data: Data, graph: Path | str, root: Path | str | None
) -> tuple[Tensor, Tensor]:
    """Encodings of all nodes of the graph ``data``, ``[M, D]``; and the nodes that the run's graph lacks, int64."""
    if config.evaluate_on != "test":
        raise ValueError(
            f"graph: {run} was evaluated on {config.evaluate_on} nodes, and its students did not see the whole graph;"
            " train again without evaluate_on"
        )
    trained, classes = split_of_run(run, config, root)
    if len(stored) != trained.graph.num_nodes:
        raise ValueError(
            f"{run} holds encodings of {len(stored)} nodes, and its graph has {trained.graph.num_nodes}; restore the"
            " run folder"
        )
    nodes = _places(run, trained.graph, data, graph)
    unseen = torch.ones(data.num_nodes, dtype=torch.bool)
    unseen[nodes[trained.observed_nodes]] = False
    data.y = torch.full((data.num_nodes,), -1)
    data.y[nodes] = trained.graph.y.cpu()
    split = GraphSplit("inductive", data, trained.observed, nodes[trained.observed_nodes], unseen.nonzero().flatten())
    grown = GrownGraph(config, trained, split, nodes, classes, stored)
    new = torch.ones(data.num_nodes, dtype=torch.bool)
    new[nodes] = False
    encode = METHODS[method].encodings_on if method in METHODS and unseen.any() else means_on
    return encode(grown), new.nonzero().flatten()


def _places(run: Path, known: Data, data: Data, graph: Path | str) -> Tensor:
    """The node of the graph ``data`` that each node of the run's graph is, int64 ``[N]``.

    Raises:
        ValueError: a node of the run's graph is missing, or most have other features.
    """
    ids, names = NodeIds.of_run(run, known.num_nodes), data.get("node_ids")
    if (ids is None) != (names is None):
        has, lacks = (f"graph {graph}", f"the graph of {run}") if ids is None else (f"the graph of {run}", str(graph))
        raise ValueError(f"graph: nodes of {has} have ids, and those of {lacks} do not; give both, or neither")
    if ids is not None:
        nodes = names.rows(ids.names)
        if (absent := np.flatnonzero(nodes < 0)).size:
            raise ValueError(
                f"graph: {graph} lacks {absent.size:,} of {len(ids):,} nodes of the graph of {run}"
                f" ({', '.join(map(repr, ids.of(absent[:_ABSENT_NAMED])))}); keep them, since new nodes may be joined"
                " to them"
            )
        nodes = torch.from_numpy(nodes)
    else:
        if data.num_nodes < known.num_nodes:
            raise ValueError(
                f"graph: {graph} has {data.num_nodes:,} nodes, and that of {run} has {known.num_nodes:,}; expected"
                " those and new nodes after them"
            )
        nodes = torch.arange(known.num_nodes)
    changed = _differing(as_rows(known.x), as_rows(data.x), nodes)
    if 2 * changed > len(nodes):
        raise ValueError(
            f"graph: {changed:,} of {len(nodes):,} nodes of the graph of {run} have other features in {graph}; expected"
            " these nodes first and in the same order, with features scaled as in training"
        )
    if changed:
        logging.getLogger("rbm").warning(
            "graph: %s of %s nodes of the graph of %s have other features in %s; their encodings stay as they were.",
            *(f"{changed:,}", f"{len(nodes):,}", run, graph),
        )
    return nodes


def _differing(known: Rows, rows: Rows, nodes: Tensor) -> int:
    """The number of rows ``known [N, F]`` that are not equal to the rows of their ``nodes [N]``, up to rounding."""
    count = 0
    for part in row_chunks(len(nodes), max(1, _NUMBERS_AT_ONCE // known.shape[1])):
        first, second = (to_dense(some).float() for some in (known[part], rows[nodes[part]]))
        count += int((~torch.isclose(first, second, rtol=1e-4, atol=1e-6)).any(dim=1).sum())
    return count
