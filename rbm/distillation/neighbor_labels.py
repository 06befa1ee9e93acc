"""Decides whether students learn the soft labels of their neighbours if the configuration is ``auto``.

The losses of the paper (Eqs. 8 and 11) teach a node the soft labels of its neighbours, because neighbours mostly have
the same class. If they do not, these labels are wrong for the node, and reliability does not notice it, since it
measures how certain a soft label is. Only labels of training and validation nodes are read here, never those of test
nodes.
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
