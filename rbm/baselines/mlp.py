"""The former name of :mod:`rbm.distillation.methods.mlp`, kept for one version."""

from rbm.distillation.methods.mlp import *  # noqa: F403
from rbm.nn.students import MLPStudent


def mlp_arguments(task, network, encodings=None) -> dict:
    """Arguments of an MLP for this task; :meth:`DistillationTask.new_student` makes the MLP itself."""
    return task.new_student(MLPStudent, network, encodings).arguments
