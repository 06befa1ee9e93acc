"""Decides whether students learn their neighbours' soft labels, where the configuration says ``auto``.

The losses of the paper (Eqs. 8 and 11) teach a node its neighbours' soft labels, because neighbours are mostly of its
class. Where they are not, these labels are wrong for it, and reliability, which asks how sure a soft label is, does not
see that. Labels of training and validation nodes are read here, those of test nodes never.
"""

from rbm.config import Config
from rbm.datasets.homophily import edge_homophily
from rbm.datasets.splits import GraphSplit


def uses_neighbor_labels(split: GraphSplit, config: Config) -> bool:
    """Whether students learn their neighbours' soft labels: ``distill.neighbors``; where that is ``auto``, unless the
    graph is heterophilous or its edges follow classes little more than chance.

    A graph on which no edge joins two nodes of known class counts as homophilous.

    Args:
        split: the graph, and what training may see of it.
        config: of the run.
    """
    if config.distill.neighbors != "auto":
        return config.distill.neighbors
    observed = split.observed
    found = edge_homophily(observed.edge_index, observed.y, observed.train_mask | observed.val_mask)
    return found is None or found.follows_classes
