"""Decides whether students learn their neighbours' soft labels if ``distill.neighbors`` is ``auto``.

The losses of the paper (Eqs. 9 and 12) teach a node its neighbours' soft labels, because most neighbours have the same
class. If they do not, these labels are wrong for the node. Reliability does not detect this, because it only measures
the stability of a soft label. This module reads labels of training and validation nodes, never of test nodes.
"""

from rbm.config import Config
from rbm.datasets.homophily import edge_homophily
from rbm.datasets.splits import GraphSplit


def uses_neighbor_labels(split: GraphSplit, config: Config) -> bool:
    """Whether students learn the soft labels of their neighbours.

    ``distill.neighbors`` decides this. With ``auto``, they do unless the graph is heterophilous or its edges follow
    classes little more than by chance. A graph without an edge between two nodes of known class counts as homophilous.

    Args:
        split: the graph, and the part of it that training may see.
        config: the configuration of the run.
    """
    if config.distill.neighbors != "auto":
        return config.distill.neighbors
    observed = split.observed
    found = edge_homophily(observed.edge_index, observed.y, observed.train_mask | observed.val_mask)
    return found is None or found.follows_classes
