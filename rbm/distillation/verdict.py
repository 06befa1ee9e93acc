"""The verdict of a run on its graph and its models, and the choice of the student that is kept, from validation nodes.

Labels of training and validation nodes are read here, those of test nodes never. The words for it are in
:mod:`rbm.distillation.sentences`.
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
from rbm.distillation.task import TrainedStudent
from rbm.nn.half_rows import HalfPrecisionRows
from rbm.nn.parameters import count_parameters
from rbm.nn.sparse_rows import Rows, concat_columns
from rbm.nn.students import predict

LABELS_ALONE = "labels"  # the method that learns without a teacher
CONFIDENCE = 0.95
_Z = 1.959964  # of a normal distribution, that share lies within so many standard deviations
# Of validation accuracy: what a cheaper student may cost. An interval over few nodes is wide, and alone it would let a
# student go for one that is several points worse. Half a point, because test nodes may show twice of it.
MOST_LOST = 0.005


class Comparison(NamedTuple):
    """Two models on the same nodes.

    Attributes:
        difference: of their shares of right answers, the first's less the second's.
        low, high: ends of its interval at :data:`CONFIDENCE`.
        p: of McNemar's exact test, two-sided, which is a little more cautious than the interval.
        nodes: how many were asked.
    """

    difference: float
    low: float
    high: float
    p: float
    nodes: int

    @property
    def is_chance(self) -> bool:
        """Whether the difference may be no more than chance."""
        return self.low <= 0 <= self.high


def compare(first: Tensor, second: Tensor) -> Comparison:
    """Compare two models by the nodes that only one of them has right; both are bool ``[N]``, true where right.

    The interval is that of Bonett and Price (Adjusted Wald confidence interval for a difference of binomial proportions
    based on paired data, JEBS 2012): Wald's, with one node added to either side, which holds for few nodes too.
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
    neighbors: bool = True,
    source: str = "teacher",
    searched_for: str | None = None,
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
        source: whose soft labels they learned, ``"teacher"`` or :data:`LABELS_ALONE`.
        searched_for: the method that a search has chosen the settings for, or None.

    Returns:
        ``homophily`` (its fields, or None where no edge tells it); ``nodes``, the validation nodes; ``accuracy`` of
        every model on them; ``teacher_gain``, the teacher's :class:`Comparison` with labels alone, or None; ``best`` of
        the methods, and ``teacher_lead``, the teacher's :class:`Comparison` with it; ``behind``, for each other student
        the best one's :class:`Comparison` with it; ``kept``, and whether it was ``asked_for``; ``cost``, the parameters
        that a prediction of each student uses; ``needs``, the columns of each student's rows, and ``beside``, what
        those behind the features are where these are stored hops;
        ``neighbors``, ``source`` and ``searched_for``, as given.
    """
    observed = split.observed
    known = edge_homophily(observed.edge_index, observed.y, observed.train_mask | observed.val_mask)
    right = {method: student_right(split, each) for method, each in trained.items()}
    right["teacher"] = answers_right(soft_labels[observed.val_mask], split)
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
        "teacher_lead": compare(right["teacher"], right[best])._asdict(),
        "behind": {method: each._asdict() for method, each in behind.items()},
        "kept": keep or kept_student(best, behind, methods, cost, searched_for),
        "asked_for": keep is not None,
        "cost": cost,
        "needs": {method: _needs(split, each) for method, each in trained.items()},
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
    """The student for predictions. Whoever asks for one method gets it; among several the user leaves the choice to
    validation, and a student that a teacher misled must not come before an MLP that had none. The settings that a
    search chose were judged with one method, and another must be better by more than chance.
    """
    alone = behind.get(LABELS_ALONE)
    if alone is not None and len(methods) > 1 and alone.difference < -MOST_LOST:
        return LABELS_ALONE
    if searched_for == best or (searched_for in behind and behind[searched_for].is_chance):
        return searched_for
    return _cheapest(best, {method: behind[method] for method in methods if method != best}, cost)


def _cheapest(best: str, behind: Mapping[str, Comparison], cost: Mapping[str, int]) -> str:
    """The student with the fewest parameters of those that may be as good as the best."""
    as_good = [method for method, each in behind.items() if each.is_chance and each.difference <= MOST_LOST]
    return min([best, *as_good], key=cost.__getitem__)


@torch.no_grad()
def student_right(split: GraphSplit, trained: TrainedStudent) -> Tensor:
    """Whether a student is right on the validation nodes: bool ``[N_val]`` on the CPU."""
    nodes = split.observed_nodes.to(split.observed.val_mask.device)[split.observed.val_mask]
    return answers_right(predict(trained.student, rows_of(split, trained.encodings, nodes)), split)


def rows_of(split: GraphSplit, encodings: Encodings | None, nodes: Tensor) -> Rows | HalfPrecisionRows:
    """What a student sees of nodes of the full graph, int64 ``[n]``: features, and beside them its encodings."""
    rows = split.full_rows[nodes]
    return rows if encodings is None else concat_columns(rows, encodings.full[nodes.to(encodings.full.device)])


def answers_right(logits: Tensor, split: GraphSplit) -> Tensor:
    """Whether the answers for the validation nodes, ``[N_val, C]``, are right: bool ``[N_val]`` on the CPU."""
    return (logits.argmax(-1) == split.observed.y[split.observed.val_mask]).cpu()


def _needs(split: GraphSplit, trained: TrainedStudent) -> dict[str, Any]:
    encodings = 0 if trained.encodings is None else trained.encodings.full.shape[1]
    found = {"features": split.graph.num_features, "encodings": encodings}
    return found | ({"beside": trained.student.beside} if isinstance(trained.encodings, StoredHops) else {})
