"""What a run says of its graph and its models, and which student is kept: all of it from validation nodes.

Labels of training and validation nodes are read here, those of test nodes never. The words for it are in
:mod:`rbm.distillation.sentences`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rbm.datasets.homophily import edge_homophily
from rbm.datasets.splits import GraphSplit
from rbm.distillation.neighbor_labels import NeighborLabels
from rbm.distillation.paired import Comparison, compare
from rbm.distillation.task import TrainedStudent
from rbm.nn.parameters import count_parameters
from rbm.nn.sparse_rows import concat_columns
from rbm.nn.students import predict

LABELS_ALONE = "labels"  # the method that learns without a teacher
# Of validation accuracy: what a cheaper student may cost. An interval over few nodes is wide, and alone it would let a
# student go for one that is several points worse.
MOST_LOST = 0.01


def judge(
    split: GraphSplit,
    soft_labels: Tensor,
    trained: Mapping[str, TrainedStudent],
    methods: Sequence[str],
    keep: str | None,
    neighbors: NeighborLabels | None = None,
) -> dict[str, Any]:
    """The verdict on a run, as ``summary.json`` has it.

    Args:
        split: the graph, and what training may see of it.
        soft_labels: the teacher's on the observed graph, ``[N_observed, C]``.
        trained: method -> its student; with :data:`LABELS_ALONE` where it was trained.
        methods: those that were asked for, one of which is kept; or, where there is a choice of several,
            :data:`LABELS_ALONE` if it is ahead of them all by more than :data:`MOST_LOST`.
        keep: the one to keep whatever validation says, or None.
        neighbors: whether students learned their neighbours' soft labels.

    Returns:
        ``homophily`` (its fields, or None where no edge tells it); ``nodes``, the validation nodes; ``accuracy`` of
        every model on them; ``teacher_gain``, the teacher's :class:`Comparison` with labels alone, or None; ``best`` of
        the methods; ``behind``, for each other student the best one's :class:`Comparison` with it; ``kept``, and
        whether it was ``asked_for``; ``cost``, the parameters that a prediction of each student uses; ``needs``, the
        columns of each student's rows; ``neighbors``, as given.
    """
    observed = split.observed
    known = edge_homophily(observed.edge_index, observed.y, observed.train_mask | observed.val_mask)
    right = {method: _right(split, each) for method, each in trained.items()}
    right["teacher"] = _are_right(soft_labels[observed.val_mask], split)
    counts = {name: int(each.sum()) for name, each in right.items()}
    cost = {method: count_parameters(each.student)[1] for method, each in trained.items()}
    best = min(methods, key=lambda method: (-counts[method], cost[method]))
    behind = {method: compare(right[best], right[method]) for method in trained if method != best}
    gain = compare(right["teacher"], right[LABELS_ALONE]) if LABELS_ALONE in trained else None
    return {
        "homophily": None if known is None else known._asdict(),
        "nodes": int(observed.val_mask.sum()),
        "accuracy": {name: count / len(right[name]) for name, count in counts.items()},
        "teacher_gain": None if gain is None else gain._asdict(),
        "best": best,
        "behind": {method: each._asdict() for method, each in behind.items()},
        "kept": keep or _kept(best, behind, methods, cost),
        "asked_for": keep is not None,
        "cost": cost,
        "needs": {method: _needs(split, each) for method, each in trained.items()},
        "neighbors": None if neighbors is None else neighbors.as_dict(),
    }


def _kept(best: str, behind: Mapping[str, Comparison], methods: Sequence[str], cost: Mapping[str, int]) -> str:
    """The student for predictions. Whoever asks for one method gets it; among several the user leaves the choice to
    validation, and a student that a teacher misled must not come before an MLP that had none.
    """
    alone = behind.get(LABELS_ALONE)
    if alone is not None and len(methods) > 1 and alone.difference < -MOST_LOST:
        return LABELS_ALONE
    return _cheapest(best, {method: behind[method] for method in methods if method != best}, cost)


def _cheapest(best: str, behind: Mapping[str, Comparison], cost: Mapping[str, int]) -> str:
    """The student with the fewest parameters of those that may be as good as the best."""
    as_good = [method for method, each in behind.items() if each.is_chance and each.difference <= MOST_LOST]
    return min([best, *as_good], key=cost.__getitem__)


@torch.no_grad()
def _right(split: GraphSplit, trained: TrainedStudent) -> Tensor:
    nodes = split.observed_nodes.to(split.observed.val_mask.device)[split.observed.val_mask]
    rows = split.full_rows[nodes]
    if trained.encodings is not None:
        rows = concat_columns(rows, trained.encodings.full[nodes.to(trained.encodings.full.device)])
    return _are_right(predict(trained.student, rows), split)


def _are_right(logits: Tensor, split: GraphSplit) -> Tensor:
    """Whether the answers for the validation nodes, ``[N_val, C]``, are right: bool ``[N_val]`` on the CPU."""
    return (logits.argmax(-1) == split.observed.y[split.observed.val_mask]).cpu()


def _needs(split: GraphSplit, trained: TrainedStudent) -> dict[str, int]:
    encodings = 0 if trained.encodings is None else trained.encodings.full.shape[1]
    return {"features": split.graph.num_features, "encodings": encodings}
