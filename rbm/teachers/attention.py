"""Graph attention as in teachers of the ogbn-arxiv leaderboard: convolution and base class of RevGAT and DRGAT."""

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import add_self_loops, coalesce, degree, remove_self_loops, softmax

from rbm.nn.dropout import Dropout
from rbm.nn.sparse_rows import Features, Linear, Rows, as_rows, dropout
from rbm.teachers.base import NORMS, Teacher, check_settings


@dataclass(frozen=True, eq=False)
class Edges:
    """The edges of one graph without duplicates, with one self-loop per node and the scales of symmetric normalisation.

    Attributes:
        index: int64 ``[2, M]``, source and target, ordered by target.
        send: ``outdegree ** -1/2``, ``[N, 1]``.
        receive: ``indegree ** +1/2``, ``[N, 1]``. Attention takes the mean over in-edges, GCN the sum divided by
            ``indegree ** 1/2``. With this factor the two are equal if all attention weights are equal.
    """

    index: Tensor
    send: Tensor
    receive: Tensor

    @classmethod
    def of(cls, edge_index: Tensor, num_nodes: int, dtype: torch.dtype = torch.float32) -> "Edges":
        """From any ``edge_index [2, M]``: repeated edges count once, and existing self-loops have no effect."""
        others, _ = remove_self_loops(edge_index)
        index = coalesce(add_self_loops(others, num_nodes=num_nodes)[0], num_nodes=num_nodes, sort_by_row=False)
        out_degree, in_degree = (degree(ends, num_nodes, dtype)[:, None] for ends in index)
        return cls(index, out_degree.rsqrt(), in_degree.sqrt())

    def without(self, share: float, seed: int) -> "Edges":
        """A copy with each edge dropped with probability ``share``; the scales do not change.

        The seed determines the dropped edges, so a layer that is recomputed in the backward pass need not store them.
        """
        generator = torch.Generator(self.index.device).manual_seed(seed)
        drawn = torch.rand(self.index.shape[1], generator=generator, device=self.index.device)
        return replace(self, index=self.index[:, drawn >= share])


class AttentionConv(MessagePassing):
    """Attention that only depends on the sender, with symmetric normalisation and a residual.

    With ``m_j = outdegree_j ** -1/2 W h_j``, the score ``e_j = LeakyReLU(a . m_j)``, slope 0.2, and ``alpha`` the
    softmax of the scores over the edges into ``i``: ``h_i' = indegree_i ** 1/2 sum_j alpha_j m_j + R h_i``. Each head
    has its own ``W``, ``a`` and ``R``. There is no bias.

    Args:
        in_channels: width of the input.
        out_channels: width of each head.
        heads: number of heads.
    """

    def __init__(self, in_channels: int, out_channels: int, heads: int = 1) -> None:
        super().__init__(aggr="sum", node_dim=0)
        self.heads, self.out_channels = heads, out_channels
        self.lin = Linear(in_channels, heads * out_channels, bias=False)
        self.residual = Linear(in_channels, heads * out_channels, bias=False)
        self.att = nn.Parameter(torch.empty(1, heads, out_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.lin.weight, self.residual.weight, self.att):
            nn.init.xavier_normal_(weight, gain=nn.init.calculate_gain("relu"))

    def forward(self, x: Rows, edges: Edges) -> Tensor:
        """Map ``x [N, in_channels]`` (dense or sparse) to ``[N, heads * out_channels]``, head after head."""
        sent = (self.lin(x) * edges.send).view(-1, self.heads, self.out_channels)
        score = F.leaky_relu((sent * self.att).sum(-1), 0.2)
        source, target = edges.index
        alpha = softmax(score[source], target, num_nodes=x.shape[0])
        received = self.propagate(edges.index, sent=sent, alpha=alpha, size=(x.shape[0], x.shape[0]))
        return received.flatten(1) * edges.receive + self.residual(x)

    def message(self, sent_j: Tensor, alpha: Tensor) -> Tensor:
        return alpha.unsqueeze(-1) * sent_j


class BatchNorm(nn.BatchNorm1d):
    """BatchNorm that only updates its running statistics when gradients are recorded, so that each step counts once.

    A reversible block runs three times in a training step, and only one of these runs records gradients. Label reuse
    also runs the network without gradients first.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not torch.is_grad_enabled():
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        return super().forward(x)


def build_norm(norm: str, channels: int) -> nn.Module:
    """Build the normalisation ``norm`` over ``channels``."""
    return (NORMS | {"batch": BatchNorm})[norm](channels)


class AttentionTeacher(Teacher):
    """Base class with the first and the last convolution; subclasses implement the hidden layers between them.

    Input dropout and a convolution; ``hidden_layers``; then norm, ReLU, dropout and a convolution with one head, plus a
    bias. In training, each convolution drops its own random edges. ``embed`` returns the last hidden layer, before
    norm.

    Args:
        in_channels: width of the node features.
        hidden_channels: width of every head; hidden layers are ``heads * hidden_channels`` wide.
        out_channels: number of classes.
        num_layers: number of consecutive convolutions, at least 2.
        dropout: dropout probability of hidden layers, in [0, 1).
        norm: ``"none"``, ``"batch"`` or ``"layer"``.
        heads: attention heads of all convolutions but the last.
        input_dropout: dropout probability of features, in [0, 1).
        edge_dropout: probability of dropping an edge from a convolution in training, in [0, 1).

    Raises:
        ValueError: a size below its minimum, a probability outside [0, 1), an unknown norm.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 3,
        dropout: float = 0.0,
        norm: str = "batch",
        *,
        heads: int = 3,
        input_dropout: float = 0.0,
        edge_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        shares = {"dropout": dropout, "input_dropout": input_dropout, "edge_dropout": edge_dropout}
        check_settings(in_channels, hidden_channels, out_channels, num_layers, norm, **shares)
        if heads < 1:
            raise ValueError(f"heads: got {heads}, expected at least 1")
        self.input_dropout, self.edge_dropout = input_dropout, edge_dropout
        self.first = AttentionConv(in_channels, hidden_channels, heads)
        self.norm = build_norm(norm, heads * hidden_channels)
        self.dropout = Dropout(dropout)
        self.last = AttentionConv(heads * hidden_channels, out_channels)
        self.bias = nn.Parameter(torch.zeros(out_channels))

    @staticmethod
    def adjacency(edge_index: Tensor, num_nodes: int, dtype: torch.dtype = torch.float32) -> Edges:
        return Edges.of(edge_index, num_nodes, dtype)

    @abstractmethod
    def hidden_layers(self, h: Tensor, edges: Edges) -> Tensor:
        """From the first hidden layer to the last, both ``[N, heads * hidden_channels]`` before norm."""

    def forward(self, x: Features, edge_index: Tensor | Edges) -> Tensor:
        x = as_rows(x)
        edges = self._as_adjacency(x, edge_index)
        h = self.norm(self.embed(x, edges)).relu()
        return self.last(self.dropout(h), self.thinned(edges)) + self.bias

    def embed(self, x: Features, edge_index: Tensor | Edges) -> Tensor:
        x = as_rows(x)
        edges = self._as_adjacency(x, edge_index)
        h = self.first(dropout(x, self.input_dropout, self.training), self.thinned(edges))
        return self.hidden_layers(h, edges)

    def thinned(self, edges: Edges) -> Edges:
        """The edges of one convolution: in training, a random part."""
        return edges.without(self.edge_dropout, draw_seed()) if self.training and self.edge_dropout > 0 else edges


def draw_seed() -> int:
    """A seed from PyTorch's global generator, drawn on the CPU to avoid waiting for a GPU."""
    return int(torch.randint(2**62, ()))
