"""Answers and seconds of a search's trials, which Optuna keeps as their attributes, and how two trials compare."""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rbm.distillation.auto.space import Point

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
    nodes = max(map(len, [*first, *second]))
    ours, theirs = (
        np.frombuffer("".join(each.ljust(nodes, "-") for each in some).encode(), np.uint8).reshape(-1, nodes or 1)
        for some in (first, second)
    )
    asked = (ours != ord("-")) | (theirs != ord("-"))
    sums = ((ours == ord("1")).astype(int) - (theirs == ord("1"))).sum(0)
    total, judged, counted = int(sums.sum()), max(1, int(asked.sum())), max(1, int(asked.any(0).sum()))
    squares = int((sums**2).sum()) + 2 * (judged / counted) ** 2
    return Lead(total / judged, math.sqrt(squares - total**2 / (counted + 2)) / judged)


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
