"""Teachers: graph neural networks whose predictions a student learns from."""

import inspect
import platform
from typing import Any

import torch
import torch_geometric
from torch import nn
from torch_geometric.data import Data

from rbm.nn.sparse_rows import Features, in_single_precision, to_dense
from rbm.teachers.attention import AttentionTeacher
from rbm.teachers.base import ConvTeacher, Teacher
from rbm.teachers.drgat import DRGAT
from rbm.teachers.gat import GAT
from rbm.teachers.gcn import GCN
from rbm.teachers.label_input import LabelInput
from rbm.teachers.label_propagation import LabelPropagation
from rbm.teachers.mlp import APPNP, MLP
from rbm.teachers.revgat import RevGAT
from rbm.teachers.sage import GraphSAGE
from rbm.utils.suggestions import did_you_mean

TEACHERS: dict[str, type[Teacher]] = {
    "sage": GraphSAGE,
    "gcn": GCN,
    "gat": GAT,
    "appnp": APPNP,
    "mlp": MLP,
    "label_propagation": LabelPropagation,
    "revgat": RevGAT,
    "drgat": DRGAT,
}


def build_teacher(
    name: str,
    in_channels: int,
    out_channels: int,
    *,
    hidden_channels: int,
    num_layers: int = 2,
    dropout: float = 0.0,
    norm: str = "none",
    **further: Any,
) -> Teacher:
    """Build a teacher by its name in ``TEACHERS``; see its class for the arguments and errors.

    ``further`` arguments are those that only ``revgat`` and ``drgat`` have, such as ``heads``.

    Raises:
        ValueError: the name is unknown.
        TypeError: the name is a plugin's, and its class takes other arguments.
        RuntimeError: PyTorch Geometric does not run on this version of Python.
    """
    check_teacher(name)
    given = (in_channels, hidden_channels, out_channels, num_layers, dropout, norm)
    _check_constructor(name, given, further)
    try:
        return TEACHERS[name](*given, **further)
    except TypeError as error:
        if "_eval_type" not in str(error):
            raise
        # A private function of Python's typing, which PyTorch Geometric calls for every convolution.
        raise RuntimeError(
            f"teacher {name!r} cannot be built: torch-geometric {torch_geometric.__version__} does not run on Python"
            f" {platform.python_version()} ({error}); use an older Python, or a newer torch-geometric"
        ) from error


def _check_constructor(name: str, given: tuple[Any, ...], further: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(TEACHERS[name])
    except ValueError:  # compiled code may not tell
        return
    try:
        signature.bind(*given, **further)
    except TypeError as error:
        wanted = ", ".join(["in_channels, hidden_channels, out_channels, num_layers, dropout, norm", *further])
        raise TypeError(
            f"teacher {name!r} is the class {TEACHERS[name].__name__}{signature}, which cannot be made from ({wanted})"
            f" ({error}); give its constructor these arguments"
        ) from None


def check_teacher(name: str) -> None:
    """Raise ValueError unless ``name`` is one of ``TEACHERS``."""
    if name not in TEACHERS:
        raise ValueError(
            f"teacher: got {name!r}, expected one of {', '.join(TEACHERS)}, or your own: the name logits for those of"
            f" the graph, a name that a plugin adds (rbm --plugin FILE), or in Python a trained module"
            f"{did_you_mean(name, TEACHERS)}"
        )


def edges_for(teacher: nn.Module, graph: Data) -> Any:
    """The edges of ``graph`` as ``teacher`` takes them: a form that is built once for our own teachers, ``edge_index``
    for others.
    """
    if isinstance(teacher, Teacher):
        dtype = torch.float32 if graph.x.dtype == torch.float16 else graph.x.dtype
        return teacher.adjacency(graph.edge_index, graph.num_nodes, dtype)
    return graph.edge_index


def features_for(teacher: nn.Module, x: Features) -> Features:
    """Features as ``teacher`` takes them: sparse rows stay sparse for our own teachers and become dense for others."""
    rows = in_single_precision(x)
    return rows if isinstance(teacher, Teacher) else to_dense(rows)


__all__ = [
    "APPNP",
    "DRGAT",
    "GAT",
    "GCN",
    "MLP",
    "TEACHERS",
    "AttentionTeacher",
    "ConvTeacher",
    "GraphSAGE",
    "LabelInput",
    "LabelPropagation",
    "RevGAT",
    "Teacher",
    "build_teacher",
    "check_teacher",
    "edges_for",
    "features_for",
]
