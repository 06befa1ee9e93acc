"""Graph convolutional network with symmetric normalisation."""

import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from rbm.nn.sparse_rows import Rows, SparseRows, linear
from rbm.teachers.aggregation import aggregate, sparse_adjacency, spread
from rbm.teachers.base import ConvTeacher


class _Conv(GCNConv):
    """PyG's convolution over a normalised adjacency, for dense and sparse rows. It aggregates the narrower side of
    dense rows, and the output side of sparse ones.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, normalize=False)

    def forward(self, x: Rows, adjacency: Tensor) -> Tensor:
        if self.in_channels <= self.out_channels and not isinstance(x, SparseRows):
            return self.transform(spread(adjacency, x))
        return aggregate(adjacency, linear(x, self.lin.weight)) + self.bias

    def transform(self, aggregated: Tensor) -> Tensor:
        """The output ``[B, H]`` for the weighted sums over neighbours ``aggregated [B, F]``."""
        projected = linear(aggregated, self.lin.weight)
        return projected + self.bias.to(projected.dtype)

    def transformation(self) -> tuple[nn.Parameter, nn.Parameter]:
        """The weight ``[H, F]`` and the bias ``[H]`` of :meth:`transform`."""
        return self.lin.weight, self.bias


class GCN(ConvTeacher):
    """``h' = D^-1/2 (A + I) D^-1/2 h W + b``, then ReLU, norm, dropout; the last layer is plain.

    Equal to PyG's ``GCN(..., act_first=True)``; self-loops are added here. ``embed`` returns the last hidden layer
    after ReLU and before norm.
    """

    @staticmethod
    def make_conv(in_channels: int, out_channels: int) -> nn.Module:
        return _Conv(in_channels, out_channels)

    @staticmethod
    def adjacency(edge_index: Tensor, num_nodes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        edges, weight = gcn_norm(edge_index, None, num_nodes, add_self_loops=True, dtype=dtype)
        return sparse_adjacency(edges, weight, num_nodes)

    def hidden(self, layer: int, h: Tensor) -> tuple[Tensor, Tensor]:
        activated = h.relu()
        return activated, self.norms[layer](activated)
