"""Answers and seconds of a search's trials, which Optuna keeps as their attributes, and how trials compare."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rbm.distillation.auto.space import Point

# Bootstrap samples. Of a gain of 2 points with a standard error of 2 their mean has an error of about 0.1 points.
_SAMPLES = 1000

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial, Trial


class Lead(NamedTuple):
    """Two complete trials on the same held-out nodes.

    Attributes:
        gain: the first's share of right answers less the second's.
        error: its standard error.
    """

    gain: float
    error: float


def point_of(trial: "FrozenTrial | Trial") -> Point:
    """What a trial tries; empty where a kill came before it was drawn."""
    return trial.user_attrs.get("point", {})


def answers(trial: "FrozenTrial | Trial") -> list[str]:
    """On each half so far, as the judge gave them."""
    return [found[0] for found in _found(trial)]


def accuracies(trial: "FrozenTrial | Trial") -> list[float]:
    """On each half so far; 0 where a point could not be trained."""
    return [each.count("1") / max(1, len(each) - each.count("-")) for each in answers(trial)]


def lead(first: list[str], second: list[str]) -> Lead:
    """Compare the answers of two trials on the same halves.

    A node that several halves ask counts once, with the sum of its differences, since its answers are alike; on one
    half this is McNemar's standard error of a difference of paired shares. One node is added to either side, as in
    :func:`rbm.distillation.verdict.compare`: one answer more must not be ahead by more than its error.
    """
    (ours, theirs), asked = _by_node([first, second])
    sums = ours - theirs
    total, judged, counted = int(sums.sum()), max(1, int(asked.sum())), max(1, int((asked > 0).sum()))
    squares = int((sums**2).sum()) + 2 * (judged / counted) ** 2
    return Lead(total / judged, math.sqrt(squares - total**2 / (counted + 2)) / judged)


def corrected_gain(trials: list[list[str]], given: Sequence[int]) -> float:
    """The expected gain of choosing the best trial, free of the optimism of having chosen it.

    The best of many trials is ahead on the nodes that chose it by more than on other nodes. Each bootstrap sample of
    the nodes chooses the best trial, and the best of the ``given`` ones, anew; the nodes that it left out, 37 % of
    them, tell by how much the first is ahead of the second. The result is the mean over samples. This is the bootstrap
    bias-corrected estimate of Tsamardinos, Greasidou and Borboudakis (Machine Learning 107, 2018), which needs no
    further training, applied to a difference.

    Args:
        trials: answers of each trial on the same halves; of equals the earlier one is the best.
        given: indices of the trials that the best one is compared with.

    Returns:
        A share of right answers, negative where choosing is expected to lose; 0.0 without trials or nodes. The same
        answers give the same number.
    """
    right, asked = _by_node(trials)
    nodes = int((asked > 0).sum())
    if not nodes or not given:
        return 0.0
    right, asked = right[:, asked > 0].astype(np.float32), asked[asked > 0]
    before = np.asarray(given)
    generator, gains = np.random.default_rng(0), []
    for _ in range(_SAMPLES):
        times = np.bincount(generator.integers(nodes, size=nodes), minlength=nodes)
        scores, rest = right @ times.astype(np.float32), times == 0
        if judged := int(asked[rest].sum()):
            best, base = right[scores.argmax()], right[before[scores[before].argmax()]]
            gains.append(float((best - base)[rest].sum()) / judged)
    return sum(gains) / max(1, len(gains))


def _by_node(trials: list[list[str]]) -> tuple[np.ndarray, np.ndarray]:
    """How often each trial is right at each node ``[T, V]``, and how often a node is asked ``[V]``."""
    halves = max(map(len, trials), default=0)
    nodes = max((len(half) for trial in trials for half in trial), default=0)
    # A half on which a point could not be trained has no answers: it is wrong at all nodes that others were asked.
    texts = "".join(half.ljust(nodes, "-") for trial in trials for half in trial)
    answered = np.frombuffer(texts.encode(), np.uint8).reshape(len(trials), halves, nodes)
    return (answered == ord("1")).sum(1), (answered != ord("-")).any(0).sum(0)


def _found(trial: "FrozenTrial | Trial") -> list[list[Any]]:
    """Answers and seconds on each half so far."""
    attributes, found = trial.user_attrs, []
    while f"half {len(found)}" in attributes:
        found.append(attributes[f"half {len(found)}"])
    return found


def seconds_of_halves(trial: "FrozenTrial") -> list[float]:
    """Seconds of the training for each half so far."""
    return [each[1] for each in _found(trial)]


def seconds_of(trial: "FrozenTrial") -> float:
    """All of them."""
    return sum(seconds_of_halves(trial))
