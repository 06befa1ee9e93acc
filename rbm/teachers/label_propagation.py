"""Label propagation as a teacher: it spreads the labels of training nodes along the edges, without training."""

import torch
from torch import Tensor
from torch_geometric.nn import LabelPropagation as Propagation

from rbm.nn.sparse_rows import Features, as_rows
from rbm.teachers.base import Teacher, check_settings
from rbm.teachers.label_input import ShownLabels

_LEAST = 1e-4  # added to the share of each class to make its logarithm finite


class LabelPropagation(ShownLabels, Teacher):
    """``Y <- min(0.9 D^-1/2 A D^-1/2 Y + 0.1 Y_0, 1)``, fifty times from the one-hot labels ``Y_0`` of training nodes,
    by PyG's operator. Logits are the logarithms of the classes' shares, so soft labels are these shares.

    A teacher for graphs with misleading features. Nodes that no label reaches have equal shares. There are no
    parameters, and the only setting that is used is the number of classes. Labels are set by :meth:`register_labels`.

    Args:
        in_channels, hidden_channels, num_layers, dropout, norm: checked as for other teachers, but not used.
        out_channels: number of classes.
    """

    hops = 50

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 2,
        dropout: float = 0.0,
        norm: str = "none",
    ) -> None:
        super().__init__()
        check_settings(in_channels, hidden_channels, out_channels, num_layers, norm, dropout=dropout)
        self.num_classes = out_channels
        self.propagation = Propagation(self.hops, alpha=0.9)

    @staticmethod
    def adjacency(edge_index: Tensor, num_nodes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return edge_index

    def forward(self, x: Features, edge_index: Tensor) -> Tensor:
        x = as_rows(x)
        known = self.known_labels(x)
        start = (known[:, None] == torch.arange(self.num_classes, device=x.device)).to(x.dtype)
        shares = self.propagation(start, edge_index) + _LEAST
        return (shares / shares.sum(-1, keepdim=True)).log()

    def embed(self, x: Features, edge_index: Tensor) -> Tensor:
        """The logits: there is no hidden layer."""
        return self(x, edge_index)
