"""The former name of :mod:`rbm.nn.students`, kept for one version."""

from rbm.nn.students import *  # noqa: F403
