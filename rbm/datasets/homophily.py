"""Homophily: how often edges join nodes of the same class."""

from typing import NamedTuple

import torch
from torch import Tensor

HETEROPHILOUS = 0.3  # a graph is heterophilous if its share of edges within a class is below this
# If chance alone gives a larger share than that, as with two classes or one large class, edges follow classes if their
# share covers at least this part of the way from chance to 1.
_FOLLOWED = 0.3


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

    @property
    def follows_classes(self) -> bool:
        """Whether the class of a neighbour predicts a node's own class well enough to learn from its soft labels."""
        if self.share < HETEROPHILOUS:
            return False
        return self.chance <= HETEROPHILOUS or self.share - self.chance >= _FOLLOWED * (1 - self.chance)


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
