"""Whether students shall learn the soft labels of a node's neighbours, where the configuration leaves that open.

The losses of the paper (Eqs. 8 and 11) teach a node its neighbours' soft labels, because neighbours are mostly of its
class. Where they are not, these labels are wrong for it, and reliability, which asks how sure a soft label is, does not
see that. Labels of training and validation nodes are read here, those of test nodes never.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rbm.config import Config
from rbm.datasets.homophily import HETEROPHILOUS, edge_homophily
from rbm.datasets.splits import GraphSplit
from rbm.distillation.paired import Comparison, compare


class NeighborLabels(NamedTuple):
    """Whether the neighbours' soft labels are used, and why.

    Attributes:
        used: whether students learn them.
        reason: ``asked for``, ``heterophily``, ``validation`` (they make the targets worse), or ``homophily``.
        change: of the targets' validation accuracy by them; None where it was not asked for.
    """

    used: bool
    reason: str
    change: Comparison | None

    def as_dict(self) -> dict[str, Any]:
        """As ``summary.json`` has it."""
        return {**self._asdict(), "change": None if self.change is None else self.change._asdict()}


def choose_neighbor_labels(split: GraphSplit, soft_labels: Tensor, config: Config) -> NeighborLabels:
    """Decide ``distill.neighbors`` where it is ``auto``.

    They are left out on a heterophilous graph; and on any graph where the mean of a node's own soft label and its
    neighbours' mean names fewer classes of validation nodes rightly than the own one, by more than chance.

    Args:
        split: the graph, and what training may see of it.
        soft_labels: the teacher's logits on the observed graph, ``[N_observed, C]``.
        config: of the run.
    """
    asked = config.distill.neighbors
    if asked != "auto":
        return NeighborLabels(asked, "asked for", None)
    observed = split.observed
    found = edge_homophily(observed.edge_index, observed.y, observed.train_mask | observed.val_mask)
    change = _change(split, soft_labels)
    if found is not None and found.share < HETEROPHILOUS:
        return NeighborLabels(False, "heterophily", change)
    if change.high < 0:
        return NeighborLabels(False, "validation", change)
    return NeighborLabels(True, "homophily", change)


@torch.no_grad()
def _change(split: GraphSplit, soft_labels: Tensor) -> Comparison:
    """Validation nodes: a target with the neighbours' mean in it, against the node's own soft label alone."""
    observed = split.observed
    nodes = observed.val_mask.nonzero().flatten()
    place = torch.full_like(observed.val_mask, -1, dtype=torch.int64)
    place[nodes] = torch.arange(len(nodes), device=nodes.device)
    sources, targets = observed.edge_index
    arriving = observed.val_mask[targets] & (sources != targets)
    sources, targets = sources[arriving], place[targets[arriving]]
    own = soft_labels[nodes].softmax(-1)
    around = torch.zeros_like(own).index_add_(0, targets, soft_labels[sources].softmax(-1))
    counts = torch.bincount(targets, minlength=len(nodes)).clamp_min(1)
    labels = observed.y[nodes]
    both = (own + around / counts[:, None]).argmax(-1) == labels
    return compare(both.cpu(), (own.argmax(-1) == labels).cpu())
