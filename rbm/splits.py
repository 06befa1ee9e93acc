"""The former name of :mod:`rbm.datasets.splits`, kept for one version."""

from rbm.datasets.splits import *  # noqa: F403
