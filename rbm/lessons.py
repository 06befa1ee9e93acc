"""The former name of :mod:`rbm.distillation.task`, kept for one version."""

from rbm.distillation.task import DistillationTask as Lesson
from rbm.distillation.task import TrainedStudent as Learned

__all__ = ["Learned", "Lesson"]
