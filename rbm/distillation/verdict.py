"""The verdict of a run on its graph and its models, and the choice of the kept student, from validation nodes.

Only labels of training and validation nodes are used here, never those of test nodes.
:mod:`rbm.distillation.sentences` turns the verdict into text.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from scipy.stats import binomtest
from torch import Tensor

from rbm.datasets.encodings import Encodings
from rbm.datasets.encodings.hops import StoredHops
from rbm.datasets.homophily import edge_homophily
from rbm.datasets.splits import GraphSplit
from rbm.distillation.task import TrainedStudent, columns_of
from rbm.nn.half_rows import HalfPrecisionRows
from rbm.nn.parameters import count_parameters
from rbm.nn.sparse_rows import Rows, concat_columns
from rbm.nn.students import predict

LABELS_ALONE = "labels"  # the method that learns without a teacher
CONFIDENCE = 0.95
_Z = 1.959964  # this share of a normal distribution is within so many standard deviations
# Validation accuracy that a cheaper student may lose. The interval alone is wide for few nodes and would accept a
# student that is several points worse. It is half a point, because the loss on test nodes may be twice as large.
MOST_LOST = 0.005


class Comparison(NamedTuple):
    """Comparison of two models on the same nodes.

    Attributes:
        difference: accuracy of the first model minus that of the second.
        low, high: confidence interval of the difference at :data:`CONFIDENCE`.
        p: p-value of McNemar's exact test, two-sided, which is slightly more conservative than the interval.
        nodes: number of nodes.
    """

    difference: float
    low: float
    high: float
    p: float
    nodes: int

    @property
    def is_chance(self) -> bool:
        """Whether the interval contains zero, so that the difference may be chance."""
        return self.low <= 0 <= self.high


def compare(first: Tensor, second: Tensor) -> Comparison:
    """Compare two models by the nodes that only one of them classifies correctly. Both arguments are bool ``[N]``, true
    for correct nodes.

    The interval is that of Bonett and Price (Adjusted Wald confidence interval for a difference of binomial proportions
    based on paired data, JEBS 2012): the Wald interval with one node added to each side, which is also valid for few
    nodes.
    """
    won, lost, nodes = int((first & ~second).sum()), int((second & ~first).sum()), len(first)
    ours, theirs = (won + 1) / (nodes + 2), (lost + 1) / (nodes + 2)
    middle = ours - theirs
    reach = _Z * math.sqrt((ours + theirs - middle**2) / (nodes + 2))
    p = float(binomtest(won, won + lost).pvalue) if won + lost else 1.0
    return Comparison((won - lost) / nodes, max(-1.0, middle - reach), min(1.0, middle + reach), p, nodes)


def judge(
    split: GraphSplit,
    soft_labels: Tensor,
    trained: Mapping[str, TrainedStudent],
    methods: Sequence[str],
    keep: str | None,
    *,
    teacher: str = "given",
    neighbors: bool = True,
    source: str = "teacher",
    searched_for: str | None = None,
) -> dict[str, Any]:
    """The verdict on a run, as in ``summary.json``.

    Args:
        split: the graph, and which nodes training may see.
        soft_labels: soft labels of the teacher on the observed graph, ``[N_observed, C]``.
        trained: method -> its student, including :data:`LABELS_ALONE` if it was trained.
        methods: the requested methods, one of which is kept. If there are several, :data:`LABELS_ALONE` is kept instead
            if it is ahead of all of them by more than :data:`MOST_LOST`.
        keep: the method to keep regardless of validation, or None.
        teacher: name of the teacher, ``"given"`` if it was passed as a module or as logits.
        neighbors: whether students learned the soft labels of their neighbours.
        source: where their soft labels came from, ``"teacher"`` or :data:`LABELS_ALONE`.
        searched_for: the method for which a search has chosen the settings, or None.

    Returns:
        ``homophily`` (its fields, or None if no edge has two known labels); ``has_edges``, whether an edge of the
        observed graph joins two nodes; ``nodes``, the number of validation nodes; ``accuracy`` of every model on them;
        ``teacher_gain``, the :class:`Comparison` of the teacher with labels alone, or None; ``best`` of the methods;
        ``teacher_lead``, the :class:`Comparison` of the teacher with the best student; ``behind``, the
        :class:`Comparison` of the best student with each other student; ``kept``, and whether it was ``asked_for``;
        ``cost``, the parameters that a prediction of each student uses; ``needs``, the columns of each student's rows,
        with ``beside``, a description of the columns after the features if these are stored hops; ``teacher``,
        ``neighbors``, ``source`` and ``searched_for``, as given.
    """
    observed = split.observed
    known = edge_homophily(observed.edge_index, observed.y, observed.train_mask | observed.val_mask)
    right = {method: student_right(split, trained_student) for method, trained_student in trained.items()}
    right["teacher"] = answers_right(soft_labels[observed.val_mask], split)
    counts = {name: int(correct.sum()) for name, correct in right.items()}
    cost = {method: count_parameters(trained_student.student)[1] for method, trained_student in trained.items()}
    best = min(methods, key=lambda method: (-counts[method], cost[method]))
    behind = {method: compare(right[best], right[method]) for method in trained if method != best}
    gain = compare(right["teacher"], right[LABELS_ALONE]) if LABELS_ALONE in trained else None
    return {
        "homophily": None if known is None else known._asdict(),
        "has_edges": bool((observed.edge_index[0] != observed.edge_index[1]).any()),
        "nodes": int(observed.val_mask.sum()),
        "accuracy": {name: count / len(right[name]) for name, count in counts.items()},
        "teacher_gain": None if gain is None else gain._asdict(),
        "best": best,
        "teacher_lead": compare(right["teacher"], right[best])._asdict(),
        "behind": {method: comparison._asdict() for method, comparison in behind.items()},
        "kept": keep or kept_student(best, behind, methods, cost, searched_for),
        "asked_for": keep is not None,
        "cost": cost,
        "needs": {method: _needs(split, trained_student) for method, trained_student in trained.items()},
        "teacher": teacher,
        "neighbors": neighbors,
        "source": source,
        "searched_for": searched_for,
    }


def kept_student(
    best: str,
    behind: Mapping[str, Comparison],
    methods: Sequence[str],
    cost: Mapping[str, int],
    searched_for: str | None = None,
) -> str:
    """The student to keep for predictions.

    A single requested method is kept. Among several, validation decides, and students that a teacher misled must not be
    preferred to an MLP without a teacher. A search has judged its settings with one method, so another method must be
    better by more than chance.
    """
    alone = behind.get(LABELS_ALONE)
    if alone is not None and len(methods) > 1 and alone.difference < -MOST_LOST:
        return LABELS_ALONE
    if searched_for == best or (searched_for in behind and behind[searched_for].is_chance):
        return searched_for
    return _cheapest(best, {method: behind[method] for method in methods if method != best}, cost)


def _cheapest(best: str, behind: Mapping[str, Comparison], cost: Mapping[str, int]) -> str:
    """The student that uses the fewest parameters, among those that may be as good as the best."""
    as_good = [method for method, found in behind.items() if found.is_chance and found.difference <= MOST_LOST]
    return min([best, *as_good], key=cost.__getitem__)


@torch.no_grad()
def student_right(split: GraphSplit, trained: TrainedStudent) -> Tensor:
    """Whether a student classifies each validation node correctly: bool ``[N_val]`` on the CPU."""
    nodes = split.observed_nodes.to(split.observed.val_mask.device)[split.observed.val_mask]
    return answers_right(predict(trained.student, rows_of(split, trained.encodings, nodes)), split)


def rows_of(split: GraphSplit, encodings: Encodings | None, nodes: Tensor) -> Rows | HalfPrecisionRows:
    """The student's rows of nodes of the full graph, int64 ``[n]``: features, then its encodings."""
    rows = split.full_rows[nodes]
    return rows if encodings is None else concat_columns(rows, encodings.full[nodes.to(encodings.full.device)])


def answers_right(logits: Tensor, split: GraphSplit) -> Tensor:
    """Whether logits of the validation nodes, ``[N_val, C]``, predict the right class: bool ``[N_val]`` on the CPU."""
    return (logits.argmax(-1) == split.observed.y[split.observed.val_mask]).cpu()


def _needs(split: GraphSplit, trained: TrainedStudent) -> dict[str, Any]:
    found = {"features": split.graph.num_features, "encodings": columns_of(trained.encodings)}
    return found | ({"beside": trained.student.beside} if isinstance(trained.encodings, StoredHops) else {})
