"""The former name of :mod:`rbm.distillation.methods.glnn`, kept for one version."""

from rbm.distillation.methods.glnn import GLNNTrainer as GLNNTraining

__all__ = ["GLNNTraining"]
