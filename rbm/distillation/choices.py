"""What a run is asked for besides its inputs and its configuration."""

from collections.abc import Sequence
from typing import NamedTuple

from rbm.distillation.verdict import LABELS_ALONE


class Choices(NamedTuple):
    """What a run was asked for; a run that is resumed does the same, except where it is asked for something else.

    Attributes:
        methods: the methods to train; None if unknown.
        keep: the method to keep for predictions; None if the run chooses.
        labels_alone: whether the method ``labels`` is trained too.
    """

    methods: Sequence[str] | None = None
    keep: str | None = None
    labels_alone: bool = True


def with_labels(methods: Sequence[str], labels_alone: bool) -> tuple[str, ...]:
    """The methods to train; the MLP that learns from labels alone is added at the end if it is not one of them."""
    return tuple(methods) if LABELS_ALONE in methods or not labels_alone else (*methods, LABELS_ALONE)
