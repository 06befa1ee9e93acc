"""An MLP teacher, which uses no edges, and APPNP, which propagates an MLP's outputs along the edges."""

from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import conv

from rbm.nn.sparse_rows import Features, Linear, Rows, as_rows
from rbm.teachers.base import ConvTeacher
from rbm.teachers.gcn import GCN
from rbm.utils.precision import full_precision, wide


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

    ``L <- 0.9 D^-1/2 (A + I) D^-1/2 L + 0.1 Z``, ten times from ``L = Z``, by PyG's operator; self-loops are added
    here. The publication also applies dropout to edges and features; here it only applies to hidden layers.
    """

    hops = 10

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.propagation = conv.APPNP(K=self.hops, alpha=0.1, normalize=False)

    @staticmethod
    def adjacency(edge_index: Tensor, num_nodes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return GCN.adjacency(edge_index, num_nodes, dtype)

    def forward(self, x: Features, edge_index: Tensor) -> Tensor:
        x = as_rows(x)
        adjacency = self._as_adjacency(x, edge_index)
        logits = super().forward(x, adjacency)
        with full_precision(x.device):
            return self.propagation(wide(logits), adjacency)
