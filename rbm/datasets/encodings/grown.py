"""Encodings on a graph that has grown since training: new nodes get theirs as unseen nodes do in an evaluation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rbm.config import Config, EncodingConfig
from rbm.datasets.encodings import labels_nearby, with_self_loops
from rbm.datasets.encodings.transfer import transfer
from rbm.datasets.splits import GraphSplit
from rbm.utils.cache import Cache


@dataclass(frozen=True, eq=False)
class GrownGraph:
    """A graph with all nodes of a run's graph and others that were added since.

    Attributes:
        config: configuration of the run.
        trained: the run's split.
        split: the grown graph as a split. Its observed nodes are those of ``trained``; all others are unseen.
        nodes: int64 ``[N]``, the node of the grown graph that each node of the run's graph is.
        num_classes: C.
        stored: the student's encodings of the run's graph, floating ``[N, D]``.
    """

    config: Config
    trained: GraphSplit
    split: GraphSplit
    nodes: Tensor
    num_classes: int
    stored: Tensor

    def observed(self, columns: slice = slice(None)) -> Tensor:
        """Stored encodings of the observed nodes, or some columns of them, in the order of the observed graph."""
        return self.stored[self.trained.observed_nodes.cpu(), columns]


def means_on(grown: GrownGraph, columns: slice = slice(None)) -> Tensor:
    """Encodings ``[M, D]`` of all nodes of the grown graph, or some columns of them: nodes of the run's graph keep
    theirs, and a new node gets the mean over its neighbours there (:func:`rbm.datasets.encodings.transfer`).
    """
    graph = grown.split.graph
    return transfer(grown.stored[:, columns], grown.nodes, graph.edge_index, graph.num_nodes)


def encodings_on(grown: GrownGraph, section: str | None = None) -> Tensor:
    """Encodings ``[M, D]`` of all nodes of the grown graph, by the rules of :func:`rbm.datasets.encodings.encode`.

    Observed nodes keep their stored encodings. For all others, DeepWalk's positions are means over observed neighbours,
    labels are counted on the grown graph, and further columns are those of :func:`means_on`.

    Args:
        grown: the graph.
        section: the section of the configuration whose ``encoding`` the student has; None for ``Config.encoding``.
    """
    config: EncodingConfig = (grown.config if section is None else getattr(grown.config, section)).encoding
    split, parts, used = grown.split, [], 0
    graph = split.graph
    if config.deepwalk:
        used = config.embedding_dim
        edges = with_self_loops(graph, config)
        known = grown.observed(slice(used))
        parts.append(transfer(known, split.observed_nodes, edges, graph.num_nodes, config.fill))
    if config.label_propagation:
        columns = slice(used, used + grown.num_classes)
        used = columns.stop
        counted = labels_nearby(split, config, grown.num_classes, Cache()).full
        counted[split.observed_nodes] = grown.observed(columns)
        parts.append(counted)
    if used < grown.stored.shape[1]:
        parts.append(means_on(grown, slice(used, None)))
    return torch.cat(parts, dim=1)
