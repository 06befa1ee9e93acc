"""Graph attention as the ogbn-arxiv leaderboard's teachers use it: the convolution, and what RevGAT and DRGAT share."""

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
    """The edges of one graph, each once and one self-loop a node, with the scales of symmetric normalisation.

    Attributes:
        index: int64 ``[2, M]``, source and target, in order of the target.
        send: ``outdegree ** -1/2``, ``[N, 1]``.
        receive: ``indegree ** +1/2``, ``[N, 1]``. Attention takes the mean over in-edges where GCN takes the sum
            divided by ``indegree ** 1/2``; this makes the two alike where all weights are equal.
    """

    index: Tensor
    send: Tensor
    receive: Tensor

    @classmethod
    def of(cls, edge_index: Tensor, num_nodes: int, dtype: torch.dtype = torch.float32) -> "Edges":
        """From ``edge_index [2, M]`` as it comes: repeated edges count once, self-loops make no difference."""
        others, _ = remove_self_loops(edge_index)
        index = coalesce(add_self_loops(others, num_nodes=num_nodes)[0], num_nodes=num_nodes, sort_by_row=False)
        out_degree, in_degree = (degree(ends, num_nodes, dtype)[:, None] for ends in index)
        return cls(index, out_degree.rsqrt(), in_degree.sqrt())

    def without(self, share: float, seed: int) -> "Edges":
        """A random part of the edges is left out, each with probability ``share``; the scales stay as they are.

        The seed alone decides which: where a layer is computed again in the backward pass, its edges need not be kept.
        """
        generator = torch.Generator(self.index.device).manual_seed(seed)
        drawn = torch.rand(self.index.shape[1], generator=generator, device=self.index.device)
        return replace(self, index=self.index[:, drawn >= share])


class AttentionConv(MessagePassing):
    """Attention that depends on the sender alone, with symmetric normalisation and a residual.

    With ``m_j = outdegree_j ** -1/2 W h_j``, the score ``e_j = LeakyReLU(a . m_j)``, slope 0.2, and ``alpha`` the
    softmax of the scores over the edges into ``i``: ``h_i' = indegree_i ** 1/2 sum_j alpha_j m_j + R h_i``, each head
    with ``W``, ``a`` and ``R`` of its own. No bias.

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
        """``x [N, in_channels]`` (dense or sparse) to ``[N, heads * out_channels]``, head after head."""
        sent = (self.lin(x) * edges.send).view(-1, self.heads, self.out_channels)
        score = F.leaky_relu((sent * self.att).sum(-1), 0.2)
        source, target = edges.index
        alpha = softmax(score[source], target, num_nodes=x.shape[0])
        received = self.propagate(edges.index, sent=sent, alpha=alpha, size=(x.shape[0], x.shape[0]))
        return received.flatten(1) * edges.receive + self.residual(x)

    def message(self, sent_j: Tensor, alpha: Tensor) -> Tensor:
        return alpha.unsqueeze(-1) * sent_j


class BatchNorm(nn.BatchNorm1d):
    """BatchNorm whose running statistics move only where gradients are recorded.

    A reversible block runs three times in a training step, and one of these runs records gradients; label reuse looks
    at the network's first answer without gradients. Each step shall count once.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not torch.is_grad_enabled():
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        return super().forward(x)


def build_norm(norm: str, channels: int) -> nn.Module:
    """A normalisation over ``channels`` by its name."""
    return (NORMS | {"batch": BatchNorm})[norm](channels)


class AttentionTeacher(Teacher):
    """From input to the first hidden layer, and from the last to the logits; subclasses implement the layers between.

    Input dropout and a convolution; ``hidden_layers``; then norm, ReLU, dropout and a convolution with one head, plus a
    bias. Every convolution leaves out edges of its own in training. ``embed`` gives the last hidden layer, before norm.

    Args:
        in_channels: width of the node features.
        hidden_channels: width of every head; hidden layers are ``heads * hidden_channels`` wide.
        out_channels: number of classes.
        num_layers: number of convolutions one after another, at least 2.
        dropout: probability in [0, 1), of hidden layers in training.
        norm: ``"none"``, ``"batch"`` or ``"layer"``.
        heads: attention heads of all but the last convolution.
        input_dropout: probability in [0, 1), of features in training.
        edge_dropout: probability in [0, 1) with which an edge is left out of a convolution in training.

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
        """From the first hidden layer to the last, ``[N, heads * hidden_channels]`` both, before norm."""

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
        """The edges of one convolution."""
        return edges.without(self.edge_dropout, draw_seed()) if self.training and self.edge_dropout > 0 else edges


def draw_seed() -> int:
    """A seed drawn by PyTorch's own generator, on the CPU: it costs no wait for a GPU."""
    return int(torch.randint(2**62, ()))
