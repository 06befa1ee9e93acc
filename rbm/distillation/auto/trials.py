"""Answers and seconds of a search's trials, stored as attributes of Optuna's trials, and comparisons of trials.

An answer is a character per validation node and half: ``1`` correct, ``0`` wrong, ``-`` not held out.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rbm.distillation.auto.space import Point

# Bootstrap samples. For a gain of 2 points with a standard error of 2, their mean has an error of about 0.1 points.
_SAMPLES = 1000

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial, Trial


class Lead(NamedTuple):
    """Comparison of two complete trials on the same held-out nodes.

    Attributes:
        gain: accuracy of the first minus accuracy of the second.
        error: standard error of the gain.
    """

    gain: float
    error: float


def point_of(trial: "FrozenTrial | Trial") -> Point:
    """The point of a trial; empty if the process was killed before it was drawn."""
    return trial.user_attrs.get("point", {})


def answers(trial: "FrozenTrial | Trial") -> list[str]:
    """The judge's answers on each half so far."""
    return [found[0] for found in _found(trial)]


def accuracies(trial: "FrozenTrial | Trial") -> list[float]:
    """Accuracy on each half so far; 0 if the point could not be trained."""
    return [half.count("1") / max(1, len(half) - half.count("-")) for half in answers(trial)]


def lead(first: list[str], second: list[str]) -> Lead:
    """Compare the answers of two trials on the same halves.

    A node in several halves counts once, with the sum of its differences, because its answers are correlated. For one
    half this is McNemar's standard error of a difference of paired shares. One node is added to either side, as in
    :func:`rbm.distillation.verdict.compare`, so that a lead of a single answer does not exceed its error.
    """
    (ours, theirs), asked = _by_node([first, second])
    sums = ours - theirs
    total, judged, counted = int(sums.sum()), max(1, int(asked.sum())), max(1, int((asked > 0).sum()))
    squares = int((sums**2).sum()) + 2 * (judged / counted) ** 2
    return Lead(total / judged, math.sqrt(squares - total**2 / (counted + 2)) / judged)


def corrected_gain(trials: list[list[str]], given: Sequence[int]) -> float:
    """The expected gain in accuracy from choosing the best trial, corrected for selection bias.

    The lead of the best of many trials is larger on the nodes that selected it than on other nodes. For each bootstrap
    sample of the nodes, the best trial and the best of the ``given`` trials are selected again, and their difference is
    measured on the nodes outside the sample (37 % of all nodes). The result is the mean over samples. This is the
    bootstrap bias-corrected estimate of Tsamardinos, Greasidou and Borboudakis (Machine Learning 107, 2018), which
    needs no further training, applied to a difference.

    Args:
        trials: answers of each trial on the same halves; among equal trials the earliest is the best.
        given: indices of the trials that the best one is compared with.

    Returns:
        Gain as a share of nodes, negative if choosing is expected to lose accuracy; 0.0 without nodes or ``given``
        trials. The result is deterministic.
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
    """Number of correct answers of each trial for each node ``[T, V]``, and number of halves with each node ``[V]``."""
    halves = max(map(len, trials), default=0)
    nodes = max((len(half) for trial in trials for half in trial), default=0)
    # A point that could not be trained on a half has no answers, which count as wrong for all nodes of the half.
    texts = "".join(half.ljust(nodes, "-") for trial in trials for half in trial)
    answered = np.frombuffer(texts.encode(), np.uint8).reshape(len(trials), halves, nodes)
    return (answered == ord("1")).sum(1), (answered != ord("-")).any(0).sum(0)


def _found(trial: "FrozenTrial | Trial") -> list[list[Any]]:
    """Answers, seconds, and seconds of reused work (absent in searches of earlier versions) on each half so far."""
    attributes, found = trial.user_attrs, []
    while f"half {len(found)}" in attributes:
        found.append(attributes[f"half {len(found)}"])
    return found


def seconds_of_halves(trial: "FrozenTrial") -> list[float]:
    """Seconds of training for each half so far."""
    return [found[1] for found in _found(trial)]


def repeated_seconds(trial: "FrozenTrial") -> list[float]:
    """Seconds for each half so far that the run after the search needs again: without encodings that it reuses. Halves
    that were judged before are left out.
    """
    return [seconds - sum(reused) for _, seconds, *reused in _found(trial) if seconds]


def seconds_of(trial: "FrozenTrial") -> float:
    """Seconds of training for all halves so far."""
    return sum(seconds_of_halves(trial))
