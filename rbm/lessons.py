"""The former name of :mod:`rbm.distillation.task`, kept for one version."""

from rbm.distillation.task import *  # noqa: F403
