"""An MLP teacher, which uses no edges, and APPNP, which propagates an MLP's outputs along the edges."""

import torch
from torch import Tensor, nn

from rbm.nn.sparse_rows import Features, Linear, Rows, as_rows
from rbm.teachers.aggregation import aggregate
from rbm.teachers.base import ConvTeacher
from rbm.teachers.gcn import GCN
from rbm.utils.precision import wide


class _Dense(Linear):
    """A linear layer with the interface of a convolution."""

    def forward(self, x: Rows, adjacency: object) -> Tensor:
        return super().forward(x)


class MLP(ConvTeacher):
    """``h' = W h + b``, then norm, ReLU, dropout; the last layer is plain. Edges are accepted and ignored.

    A teacher for graphs with misleading edges. ``embed`` returns the last hidden layer before norm and ReLU.
    """

    hops = 0

    @staticmethod
    def make_conv(in_channels: int, out_channels: int) -> nn.Module:
        return _Dense(in_channels, out_channels)

    @staticmethod
    def adjacency(edge_index: Tensor, num_nodes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return edge_index

    def hidden(self, layer: int, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, self.norms[layer](h).relu()


class APPNP(MLP):
    """An MLP's logits ``Z``, spread by personalised PageRank (Gasteiger et al., Predict then Propagate, ICLR 2019).

    ``L <- 0.9 D^-1/2 (A + I) D^-1/2 L + 0.1 Z``, ten times from ``L = Z``; self-loops are added here. Equal to PyG's
    ``APPNP(K=10, alpha=0.1)``. The publication also applies dropout to edges and features; here it only applies to
    hidden layers.
    """

    hops, alpha = 10, 0.1

    @staticmethod
    def adjacency(edge_index: Tensor, num_nodes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return GCN.adjacency(edge_index, num_nodes, dtype)

    def forward(self, x: Features, edge_index: Tensor) -> Tensor:
        x = as_rows(x)
        adjacency = self._as_adjacency(x, edge_index)
        return self.propagate(super().forward(x, adjacency), adjacency)

    def propagate(self, logits: Tensor, adjacency: Tensor) -> Tensor:
        """The MLP's logits ``[N, C]``, spread along the edges."""
        logits = near = wide(logits)
        for _ in range(self.hops):
            near = (1 - self.alpha) * aggregate(adjacency, near) + self.alpha * logits
        return near
