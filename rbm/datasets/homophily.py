"""How far the edges of a graph follow its classes."""

from typing import NamedTuple

import torch
from torch import Tensor

HETEROPHILOUS = 0.3  # a share of edges within a class below it
# Where classes dealt at random give that share already, as with one large class or with two, edges say something of
# classes from here on, of the way from chance to all edges within a class.
_FOLLOWED = 0.3


class Homophily(NamedTuple):
    """Edge homophily.

    Attributes:
        share: of the edges that join two nodes of one class, in [0, 1].
        chance: the share that classes dealt at random would give, each node keeping its degree.
        edges: that were counted: directed, without self-loops.
    """

    share: float
    chance: float
    edges: int

    @property
    def follows_classes(self) -> bool:
        """Whether a neighbour's class says enough of a node's own for soft labels of neighbours to be learned."""
        if self.share < HETEROPHILOUS:
            return False
        return self.chance <= HETEROPHILOUS or self.share - self.chance >= _FOLLOWED * (1 - self.chance)


def edge_homophily(edge_index: Tensor, labels: Tensor, known: Tensor) -> Homophily | None:
    """The homophily of the edges between nodes whose label may be read.

    Args:
        edge_index: int64 ``[2, M]``.
        labels: int64 ``[N]``; those of other nodes are not looked at.
        known: bool ``[N]``, whose labels may be read.

    Returns:
        None where no edge joins two such nodes.
    """
    sources, targets = edge_index
    counted = known[sources] & known[targets] & (sources != targets)
    ends = labels[edge_index[:, counted]]
    if not ends.numel():
        return None
    shares = torch.bincount(ends.flatten()).double() / ends.numel()
    same = (ends[0] == ends[1]).double().mean()
    return Homophily(float(same), float(shares.square().sum()), ends.shape[1])
