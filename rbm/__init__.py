"""Routing-by-Memory: distil a graph neural network into a sparse mixture of experts that needs no graph.

* :func:`rbm.distill` trains a student from a graph and a teacher; :func:`rbm.load` loads it from its run folder.
* :class:`rbm.FusedRbMLayer` is the layer, for use in any model.
* :mod:`rbm_kernels` contains the operators, which do not depend on graphs.
"""

from importlib import import_module

from rbm import hub as hub
from rbm.nn import moe as _moe  # noqa: F401, registers its student, as the two below do
from rbm.nn import newer as _newer  # noqa: F401
from rbm.nn import trees as _trees  # noqa: F401
from rbm.nn.rbm_layer import FusedRbMLayer, Routing
from rbm.nn.students import MLPStudent, RbMStudent
from rbm_kernels import __version__

# Names that need PyTorch Geometric or scikit-learn are imported at their first use, so that importing the layer alone
# stays fast.
_LAZY = {
    "Config": "config",
    "Distillation": "distillation.distill",
    "distill": "distillation.distill",
    "export_student": "serving.export",
    "load": "training.run_folder",
    "load_dataset": "datasets",
    "load_encodings": "training.run_folder",
    "load_graph": "datasets",
    "load_released": "nn.original_checkpoint",
    "load_student": "training.run_folder",
    "preset_config": "config.presets",
}

__all__ = ["FusedRbMLayer", "MLPStudent", "RbMStudent", "Routing", "__version__", *_LAZY]


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module 'rbm' has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
