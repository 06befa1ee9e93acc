"""The former name of :mod:`rbm.distillation.methods.mlp`, kept for one version."""

from rbm.distillation.methods.mlp import *  # noqa: F403
