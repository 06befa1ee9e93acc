"""The former name of :mod:`rbm.distillation.task`, kept for one version."""

from rbm.distillation.task import DistillationTask as Lesson
from rbm.distillation.task import TrainedStudent


def Learned(student, arguments, result, encodings) -> TrainedStudent:  # noqa: N802
    """The former name of :class:`rbm.distillation.task.TrainedStudent`; students now store their arguments."""
    return TrainedStudent(student, result, encodings)


__all__ = ["Learned", "Lesson"]
