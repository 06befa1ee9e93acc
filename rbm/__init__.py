"""Routing-by-Memory: distil a graph neural network into a sparse mixture of experts that does not need the graph.

* :func:`rbm.distill` trains a student from a graph and a teacher; :func:`rbm.load` loads it from its run folder.
* :class:`rbm.FusedRbMLayer` is a layer of linear experts and :class:`rbm.RbMFeedForward` a layer of feed-forward
  experts, both for use in any model.
* :mod:`rbm_kernels` contains the operators, which do not depend on graphs.
"""

from importlib import import_module

from rbm.utils import interruptions as _interruptions  # noqa: F401, acts before PyTorch is imported

# isort: split

from rbm import hub as hub
from rbm.nn import moe as _moe  # noqa: F401, registers its students, like the next three imports
from rbm.nn import simmlp as _simmlp  # noqa: F401
from rbm.nn import tined as _tined  # noqa: F401
from rbm.nn import trees as _trees  # noqa: F401
from rbm.nn.dead_experts import reset_dead_experts
from rbm.nn.feed_forward import RbMFeedForward
from rbm.nn.losses import auxiliary_loss
from rbm.nn.memory_router import Routing, accumulate_memory
from rbm.nn.parameters import parameter_groups
from rbm.nn.rbm_layer import FusedRbMLayer
from rbm.nn.routing_record import record_routing
from rbm.nn.students import MLPStudent, RbMStudent
from rbm.nn.usage import expert_usage, track_usage
from rbm_kernels import __version__

# Names that need PyTorch Geometric or scikit-learn are imported on first use, so that importing only the layer is fast.
_LAZY = {
    "Config": "config",
    "Distillation": "distillation.result",
    "distill": "distillation.distill",
    "export": "serving.export",
    "export_student": "serving.export",
    "initialize_memory": "nn.kmeans_init",
    "load": "training.run_folder",
    "load_dataset": "datasets",
    "load_encodings": "training.run_folder",
    "load_graph": "datasets",
    "load_released": "nn.original_checkpoint",
    "load_student": "training.run_folder",
    "preset_config": "config.presets",
}

__all__ = [
    "FusedRbMLayer",
    "MLPStudent",
    "RbMFeedForward",
    "RbMStudent",
    "Routing",
    "__version__",
    "accumulate_memory",
    "auxiliary_loss",
    "expert_usage",
    "parameter_groups",
    "record_routing",
    "reset_dead_experts",
    "track_usage",
    *_LAZY,
]


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module 'rbm' has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
