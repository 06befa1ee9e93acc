"""GraphSAGE with the "gcn" aggregator: one mean over a node and its in-neighbours, with equal weights."""

import torch
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv
from torch_geometric.utils import add_self_loops, degree

from rbm.nn.sparse_rows import Rows, SparseRows, linear
from rbm.teachers.aggregation import aggregate, sparse_adjacency, spread
from rbm.teachers.base import ConvTeacher


class _MeanConv(SAGEConv):
    """PyG's convolution over a row-normalised adjacency, with which a weighted sum is the mean of the in-neighbours.

    Mean and projection commute (a mean of equal biases is the bias), so the narrower side is aggregated. Sparse rows
    are always projected first.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, aggr="sum", root_weight=False)

    def reset_parameters(self) -> None:
        # The initialisation of DGL's layer, which the paper's teachers use.
        nn.init.xavier_uniform_(self.lin_l.weight, gain=nn.init.calculate_gain("relu"))
        nn.init.zeros_(self.lin_l.bias)

    def forward(self, x: Rows, adjacency: Tensor) -> Tensor:
        if self.in_channels <= self.out_channels and not isinstance(x, SparseRows):
            return self.transform(spread(adjacency, x))
        return aggregate(adjacency, linear(x, self.lin_l.weight, self.lin_l.bias))

    def transform(self, aggregated: Tensor) -> Tensor:
        """The output ``[B, H]`` for the weighted sums over neighbours ``aggregated [B, F]``."""
        return self.lin_l(aggregated)

    def transformation(self) -> tuple[nn.Parameter, nn.Parameter]:
        """The weight ``[H, F]`` and the bias ``[H]`` of :meth:`transform`."""
        return self.lin_l.weight, self.lin_l.bias


class GraphSAGE(ConvTeacher):
    """``h_i' = W (h_i + sum_{j -> i} h_j) / (in-degree(i) + 1) + b``, then norm, ReLU, dropout; the last is plain.

    Equal to PyG's ``SAGEConv(aggr="mean", root_weight=False)`` with one more self-loop per node (added here), and to
    DGL's ``SAGEConv(aggregator_type="gcn")``. ``embed`` returns the last hidden layer before norm and ReLU.
    """

    @staticmethod
    def make_conv(in_channels: int, out_channels: int) -> nn.Module:
        return _MeanConv(in_channels, out_channels)

    @staticmethod
    def adjacency(edge_index: Tensor, num_nodes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        edges, _ = add_self_loops(edge_index, num_nodes=num_nodes)
        weight = 1.0 / degree(edges[1], num_nodes, dtype)
        return sparse_adjacency(edges, weight[edges[1]], num_nodes)

    def hidden(self, layer: int, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, self.norms[layer](h).relu()
