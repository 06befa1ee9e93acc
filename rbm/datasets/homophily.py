"""Homophily: how often edges join nodes of the same class."""

from typing import NamedTuple

import torch
from torch import Tensor

HETEROPHILOUS = 0.3  # a graph is heterophilous if its share of edges within a class is below this


class Homophily(NamedTuple):
    """Edge homophily.

    Attributes:
        share: the share of edges that join two nodes of the same class, in [0, 1].
        chance: the share that would be expected if classes were assigned at random and each node kept its degree.
        edges: the number of edges counted: directed, without self-loops.
    """

    share: float
    chance: float
    edges: int


def edge_homophily(edge_index: Tensor, labels: Tensor, known: Tensor) -> Homophily | None:
    """The homophily of the edges between nodes with known labels.

    Args:
        edge_index: int64 ``[2, M]``.
        labels: int64 ``[N]``; only those of known nodes are read.
        known: bool ``[N]``, the nodes whose labels may be read.

    Returns:
        The homophily, or None if no edge joins two known nodes.
    """
    sources, targets = edge_index
    counted = known[sources] & known[targets] & (sources != targets)
    ends = labels[edge_index[:, counted]]
    if not ends.numel():
        return None
    shares = torch.bincount(ends.flatten()).double() / ends.numel()
    same = (ends[0] == ends[1]).double().mean()
    return Homophily(float(same), float(shares.square().sum()), ends.shape[1])
