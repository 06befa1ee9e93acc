"""Encodings: inputs of a student in addition to the features, from a node's position and from nearby labels."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rbm.config import EncodingConfig
from rbm.datasets.encodings.deepwalk import deepwalk, gensim_version, random_walks
from rbm.datasets.encodings.label_propagation import label_propagation
from rbm.datasets.encodings.transfer import FILLS, transfer
from rbm.datasets.splits import GraphSplit
from rbm.nn.sparse_rows import SparseRows, in_single_precision
from rbm.utils.cache import Cache

if TYPE_CHECKING:
    from torch_geometric.data import Data

# All seeds of a transductive experiment share one graph, and therefore its DeepWalk positions.
_SHARED_SEED = 0


class Encodings(NamedTuple):
    """Columns of a student's input that follow the node features.

    Attributes:
        observed: float32 ``[n_observed, d]`` in the order of the observed graph: what training sees.
        full: float32 ``[N, d]`` in the order of the full graph; observed nodes have the same rows as in ``observed``.
    """

    observed: Tensor
    full: Tensor


def encode(
    split: GraphSplit,
    config: EncodingConfig,
    num_classes: int,
    *,
    seed: int,
    cache: Cache,
    extra: Sequence[Tensor] = (),
    advance: Callable[[int], None] | None = None,
) -> Encodings | None:
    """Concatenate all encodings that ``config`` enables: DeepWalk, label propagation, then ``extra`` unchanged.

    DeepWalk uses the observed graph alone; an unseen node gets the mean of its neighbours
    (:func:`rbm.datasets.encodings.transfer`). In the transductive setting, DeepWalk ignores ``seed``: all seeds share
    one result.

    Label propagation reads only labels under the observed graph's ``train_mask``. Rows of observed nodes come from the
    observed graph, rows of unseen nodes from the full graph.

    Args:
        split: the graph, and the part of it that training may see.
        config: ``Config.encoding``. ``config.self_loops`` adds a self-loop to each node for both encodings, as the
            released code does on Planetoid and OGB. Without it, walks follow the graph's own self-loops, and label
            propagation ignores them.
        num_classes: C.
        seed: seed of the run.
        cache: folder in which positions and propagated labels are cached, by graph, settings and seed.
        extra: encodings of your own, floating ``[N, d]`` in the order of the full graph. It is not checked whether
            they contain information that training must not see.
        advance: called with DeepWalk's progress, see :func:`rbm.datasets.encodings.deepwalk`.

    Returns:
        The encodings on the CPU, or None if there are none.

    Raises:
        TypeError, ValueError: an invalid graph, label, setting or extra encoding; the message tells how to fix it.
    """
    parts = []
    if config.deepwalk:
        positions = _positions(split, config, seed, cache, advance)
        parts.append(_scaled(positions, split, config.relative_norm))
    if config.label_propagation:
        parts.append(labels_nearby(split, config, num_classes, cache))
    for place, given in enumerate(extra):
        rows = own_encoding(given, place, split.graph.num_nodes)
        parts.append(Encodings(rows[split.observed_nodes.cpu()], rows))
    if not parts:
        return None
    return Encodings(*(torch.cat(columns, dim=1) for columns in zip(*parts, strict=True)))


def _positions(
    split: GraphSplit, config: EncodingConfig, seed: int, cache: Cache, advance: Callable[[int], None] | None
) -> Encodings:
    graph, observed = split.graph, split.observed
    transductive = split.setting == "transductive"
    settings = {
        "dim": config.embedding_dim,
        "walk_length": config.walk_length,
        "walks_per_node": config.walks_per_node,
        "window_size": config.window_size,
        "epochs": config.epochs,
        "negative": config.negative,
        "hierarchical_softmax": config.hierarchical_softmax,
        "workers": config.workers,
        "seed": _SHARED_SEED if transductive else seed,
    }
    edges, num_nodes = with_self_loops(observed, config), observed.num_nodes
    rows = cache.tensors(
        "deepwalk",
        {**settings, "num_nodes": num_nodes, "gensim": gensim_version()},
        [edges],
        lambda: {"positions": deepwalk(edges, num_nodes, **settings, advance=advance)},
    )["positions"]
    if transductive:
        return Encodings(rows, rows)
    return Encodings(
        rows, transfer(rows, split.observed_nodes, with_self_loops(graph, config), graph.num_nodes, config.fill)
    )


def with_self_loops(graph: "Data", config: EncodingConfig) -> Tensor:
    """The graph's edges ``[2, M]``, with a self-loop for each node if ``config.self_loops`` is set."""
    if not config.self_loops:
        return graph.edge_index
    from torch_geometric.utils import add_self_loops

    return add_self_loops(graph.edge_index, num_nodes=graph.num_nodes)[0]


def labels_nearby(split: GraphSplit, config: EncodingConfig, num_classes: int, cache: Cache) -> Encodings:
    """The columns of label propagation, see :func:`encode`."""
    graph, observed = split.graph, split.observed

    def propagated(edges: Tensor, nodes: Tensor, num_nodes: int, exclude_self: bool) -> Tensor:
        """Propagate the labels of the observed training nodes; ``nodes`` are the observed nodes in this graph."""
        settings = {
            "num_classes": num_classes,
            "decay": config.propagation_decay,
            "hops": config.propagation_hops,
            "exclude_self": exclude_self,
            "self_loops": config.self_loops,
        }
        labels, mask = torch.full((num_nodes,), -1), torch.zeros(num_nodes, dtype=torch.bool)
        labels[nodes], mask[nodes] = known, True
        return cache.tensors(
            "label_propagation",
            settings,
            [edges, labels],
            lambda: {"labels": label_propagation(edges, labels, mask, **settings)},
        )["labels"]

    train_nodes = observed.train_mask.nonzero().flatten().cpu()
    known = observed.y.cpu()[train_nodes]
    rows = propagated(observed.edge_index, train_nodes, observed.num_nodes, config.exclude_self)
    if split.setting == "transductive":
        return _scaled(Encodings(rows, rows), split, config.relative_norm)
    # Unseen nodes have no training label that could return to them.
    nodes = split.observed_nodes.cpu()
    full = propagated(graph.edge_index, nodes[train_nodes], graph.num_nodes, False)
    full[nodes] = rows
    return _scaled(Encodings(rows, full), split, config.relative_norm)


def _scaled(part: Encodings, split: GraphSplit, relative_norm: float) -> Encodings:
    """Scale an encoding so that its mean norm over observed nodes is ``relative_norm`` times that of the features. With
    0, it stays as it is.
    """
    if relative_norm == 0:
        return part
    features = in_single_precision(split.observed.x)
    norms = features.squared_norms().sqrt() if isinstance(features, SparseRows) else features.norm(dim=1)
    own = float(part.observed.norm(dim=1).mean())
    factor = relative_norm * float(norms.mean()) / own if own > 0 else 1.0
    return Encodings(*(factor * rows for rows in part))


def own_encoding(given: Tensor, place: int, num_nodes: int) -> Tensor:
    """Check an encoding of the user's own, ``[N, d]``, and return it as float32 on the CPU. Messages call it
    ``encodings[place]``, as an argument of :func:`rbm.distill`.

    Raises:
        TypeError: not a dense floating tensor.
        ValueError: another shape, or numbers that are not finite.
    """
    if not isinstance(given, Tensor) or given.layout != torch.strided or not given.is_floating_point():
        kind = f"a {given.layout} tensor of {given.dtype}" if isinstance(given, Tensor) else type(given).__name__
        raise TypeError(
            f"encodings[{place}]: got {kind}, expected a dense floating tensor; use torch.as_tensor(...).float()"
        )
    if given.dim() != 2 or given.shape[0] != num_nodes:
        raise ValueError(
            f"encodings[{place}]: got shape {list(given.shape)}, expected [{num_nodes}, width], one row for each node"
            " of the full graph"
        )
    if not torch.isfinite(given).all():
        raise ValueError(f"encodings[{place}]: holds NaN or infinity, expected finite numbers; try torch.nan_to_num")
    return given.detach().cpu().float()


__all__ = ["FILLS", "Encodings", "deepwalk", "encode", "label_propagation", "random_walks", "transfer"]
