"""Graph attention network."""

from math import gcd

import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv

from rbm.nn.sparse_rows import Linear, Rows
from rbm.teachers.attention import Edges
from rbm.teachers.base import ConvTeacher

_MOST_HEADS = 8


class _Conv(GATConv):
    """PyG's convolution for dense and sparse rows, over edges that already include self-loops.

    ``e_ij = LeakyReLU(a . W h_j + b . W h_i)``, slope 0.2; ``h_i' = sum_j softmax_j(e_ij) W h_j + c``, head after head.
    """

    def __init__(self, in_channels: int, out_channels: int, heads: int) -> None:
        super().__init__(in_channels, out_channels // heads, heads, add_self_loops=False)
        self.lin = Linear(in_channels, out_channels, bias=False)
        nn.init.xavier_uniform_(self.lin.weight)

    def forward(self, x: Rows, edges: Edges) -> Tensor:
        sent = self.lin(x).view(-1, self.heads, self.out_channels)
        scores = (sent * self.att_src).sum(-1), (sent * self.att_dst).sum(-1)
        alpha = self.edge_updater(edges.index, alpha=scores, edge_attr=None, size=None)
        return self.propagate(edges.index, x=(sent, sent), alpha=alpha, size=None).flatten(1) + self.bias


class GAT(ConvTeacher):
    """Attention over neighbours and the node itself (Veličković et al., Graph Attention Networks, ICLR 2018), then
    norm, ELU, dropout; the last layer is plain and has one head.

    Hidden layers have a total width of ``hidden_channels``. The number of heads is the greatest common divisor of 8 and
    the width. Repeated edges count once. The publication also applies dropout to features and attention weights; here
    it only applies to hidden layers. ``embed`` returns the last hidden layer before norm and ELU.
    """

    @staticmethod
    def make_conv(in_channels: int, out_channels: int) -> nn.Module:
        return _Conv(in_channels, out_channels, gcd(_MOST_HEADS, out_channels))

    @classmethod
    def make_last_conv(cls, in_channels: int, out_channels: int) -> nn.Module:
        return _Conv(in_channels, out_channels, 1)

    @staticmethod
    def adjacency(edge_index: Tensor, num_nodes: int, dtype: torch.dtype = torch.float32) -> Edges:
        return Edges.of(edge_index, num_nodes, dtype)

    def hidden(self, layer: int, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, nn.functional.elu(self.norms[layer](h))
