"""The former name of :mod:`rbm.distillation.methods`, kept for one version."""
