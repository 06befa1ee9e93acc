"""Stored hops: means of the features one, two, three edges away, as columns after a node's own features.

With ``M`` the mean over a node's in-neighbours (zeros if it has none), the columns are ``M X, M^2 X, ...``. A node is
not its own neighbour: self-loops of the graph do not count, as a node that arrives later has none. These columns are
the inputs of SGC (Wu et al., Simplifying Graph Convolutional Networks, ICML 2019) and SIGN (Frasca et al., 2020) under
a random walk without self-loops. With this operator, a node that arrives later only needs one mean over what its
neighbours have stored, ``[X, M X, ...]``, and no access to their neighbours.
"""

import numpy as np
import torch
from torch import Tensor

from rbm.datasets.encodings import Encodings
from rbm.datasets.encodings.graph import in_matrix
from rbm.datasets.encodings.transfer import transfer
from rbm.datasets.splits import GraphSplit
from rbm.nn.sparse_rows import Features, in_single_precision, to_dense

_MOST_NUMBERS = 2**31


class StoredHops(Encodings):
    """Encodings that shift by one hop when passed on: a new node's are not the mean of its neighbours' encodings.

    Attributes:
        features: float32 ``[N, F]``, hop zero.
    """

    features: Tensor

    @classmethod
    def of(cls, observed: Tensor, full: Tensor, features: Tensor) -> "StoredHops":
        """Make them from the hops of the observed nodes, the hops of all nodes, and the features of all nodes."""
        hops = cls(observed, full)
        hops.features = features
        return hops


def neighbor_means(x: Tensor, edge_index: Tensor, hops: int) -> Tensor:
    """``[M x, ..., M^hops x]`` as columns, float32 ``[N, hops * F]``.

    Args:
        x: float32 ``[N, F]`` on the CPU.
        edge_index: int64 ``[2, M]``; messages flow from row 0 to row 1, a duplicate edge counts twice, and a self-loop
            does not count.
        hops: at least 1.
    """
    from torch_geometric.utils import remove_self_loops

    sources, targets = remove_self_loops(edge_index.cpu())[0].numpy()
    adjacency = in_matrix(sources, targets, (len(x), len(x)), np.float32)
    degrees = np.maximum(np.bincount(targets, minlength=len(x)), 1).astype(np.float32)[:, None]
    (nodes, width), last = x.shape, x.numpy()
    means = np.empty((nodes, hops * width), np.float32)
    for hop in range(hops):
        last = adjacency @ last
        last /= degrees
        means[:, hop * width : (hop + 1) * width] = last
    return torch.from_numpy(means)


def passed_on(features: Tensor, encodings: Tensor) -> Tensor:
    """What nodes pass on to a new neighbour, whose hop ``k`` is the mean of their hop ``k - 1``: ``[N, hops * F]``."""
    return torch.cat([features, encodings[:, : encodings.shape[1] - features.shape[1]]], dim=1)


def check_hops(nodes: int, width: int, hops: int) -> None:
    """Raise ValueError if ``hops`` of the features ``[nodes, width]`` would hold more than 2^31 numbers (8 GiB)."""
    if nodes * width * hops > _MOST_NUMBERS:
        raise ValueError(
            f"sign.hops is {hops}: of {nodes:,} nodes with {width:,} features that is {nodes * width * hops:,} numbers,"
            f" expected at most {_MOST_NUMBERS:,}; set fewer, or give narrower features (such as a projection of these)"
        )


def hop_encodings(split: GraphSplit, hops: int) -> StoredHops | None:
    """Stored hops of all nodes; None if ``hops`` is 0.

    Hops of observed nodes come from the observed graph. Those of an unseen node are the means of what its observed
    neighbours pass on, as for a node that arrives after training.

    Raises:
        ValueError: see :func:`check_hops`.
    """
    if hops == 0:
        return None
    nodes = split.graph.num_nodes
    check_hops(nodes, split.graph.num_features, hops)
    features = _dense(split.graph.x)
    observed = features if split.observed is split.graph else _dense(split.observed.x)
    rows = neighbor_means(observed, split.observed.edge_index, hops)
    if not len(split.unseen_nodes):
        return StoredHops.of(rows, rows, features)
    nodes_seen = split.observed_nodes.cpu()
    full = transfer(passed_on(observed, rows), nodes_seen, split.graph.edge_index, nodes)
    full[nodes_seen] = rows
    return StoredHops.of(rows, full, features)


def _dense(x: Features) -> Tensor:
    return to_dense(in_single_precision(x)).detach().cpu().float()
