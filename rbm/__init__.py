"""Routing-by-Memory: distil a graph neural network into a sparse mixture of experts that needs no graph.

* :func:`rbm.distill`: a graph and a teacher in, a student out; :func:`rbm.load` gives it back from its run folder.
* :class:`rbm.FusedRbMLayer`: the layer alone, for any other model.
* :mod:`rbm_kernels`: the operators alone.
"""

from importlib import import_module

from rbm import hub as hub
from rbm.nn import moe as _moe  # noqa: F401, registers its student
from rbm.nn.rbm_layer import FusedRbMLayer, Routing
from rbm.nn.students import MLPStudent, RbMStudent
from rbm_kernels import __version__

# What stands on PyTorch Geometric and scikit-learn is imported when it is first asked for: who wants the layer alone
# does not wait for them.
_LAZY = {
    "Config": "config",
    "Distillation": "distillation.distill",
    "distill": "distillation.distill",
    "export_student": "serving.export",
    "load": "training.run_folder",
    "load_dataset": "datasets",
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
