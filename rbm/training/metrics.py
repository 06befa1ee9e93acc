"""Accuracy, purity of groups, and the load of experts; for times see :mod:`rbm.serving.latency`."""

import torch
from torch import Tensor
from torch.nn import functional as F

from rbm.nn.evaluation import evaluating
from rbm.nn.losses import expert_load
from rbm.nn.sparse_rows import Features
from rbm.nn.students import MixtureStudent


def accuracy(answers: Tensor, labels: Tensor) -> float:
    """Share of rows that are classified correctly, in [0, 1]; NaN without rows. ``answers`` are logits ``[B, C]`` or
    classes, int64 ``[B]``.
    """
    if labels.numel() == 0:
        return float("nan")
    classes = answers if answers.dim() == 1 else answers.argmax(dim=-1)
    return (classes == labels).sum().item() / labels.numel()


def purity(groups: Tensor, labels: Tensor) -> float:
    """Share of the nodes whose class is the most frequent one of their group: the best accuracy of a classifier that
    knows only a node's group. ``groups [N]`` and ``labels [N]`` are integers from 0; nodes with label -1 are ignored.
    """
    known = labels >= 0
    counts = torch.zeros(int(groups.max()) + 1, int(labels.max()) + 1, dtype=torch.int64)
    counts.index_put_((groups[known].long(), labels[known]), torch.ones((), dtype=torch.int64), accumulate=True)
    return int(counts.max(dim=1).values.sum()) / int(known.sum())


@torch.no_grad()
def expert_loads(student: MixtureStudent, x: Features) -> Tensor:
    """Share of the gate mass that each expert of each layer receives from the rows ``x [N, F]``: ``[L, E]``."""
    with evaluating(student):
        _, (routings, *_) = student(x, return_trace=True)
    loads = [expert_load(routing, layer.num_experts) for layer, routing in zip(student.layers, routings, strict=True)]
    return F.normalize(torch.stack(loads), p=1, dim=-1)
