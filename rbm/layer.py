"""The former name of :mod:`rbm.nn.rbm_layer`, kept for one version."""

from rbm.nn.rbm_layer import *  # noqa: F403
