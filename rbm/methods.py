"""The former name of :mod:`rbm.distillation.registry`, kept for one version."""

from rbm.distillation.registry import *  # noqa: F403
