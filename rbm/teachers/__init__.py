"""Teachers: graph neural networks whose predictions a student learns from."""

from torch import nn

from rbm.teachers.base import Teacher
from rbm.teachers.gcn import GCN
from rbm.teachers.sage import GraphSAGE

TEACHERS: dict[str, type[Teacher]] = {"sage": GraphSAGE, "gcn": GCN}


def build_teacher(
    name: str,
    in_channels: int,
    out_channels: int,
    *,
    hidden_channels: int,
    num_layers: int = 2,
    dropout: float = 0.0,
    norm: str = "none",
) -> nn.Module:
    """Build a teacher by name (``"sage"`` or ``"gcn"``); see ``Teacher`` for the arguments and what is raised.

    Raises:
        ValueError: an unknown name.
    """
    if name not in TEACHERS:
        raise ValueError(f"teacher: got {name!r}, expected one of {', '.join(TEACHERS)}, or your own trained module")
    return TEACHERS[name](in_channels, hidden_channels, out_channels, num_layers, dropout, norm)


__all__ = ["GCN", "TEACHERS", "GraphSAGE", "Teacher", "build_teacher"]
