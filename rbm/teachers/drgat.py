"""DRGAT: attention with an initial residual whose weight evolves from layer to layer."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rbm.teachers.attention import AttentionConv, AttentionTeacher, Edges, build_norm
from rbm.utils.precision import full_precision, wide


class DRGAT(AttentionTeacher):
    """Graph attention with a gate per node and layer for the share of the first hidden layer (Zhang et al., DRGCN:
    Dynamic Evolving Initial Residual for Deep Graph Convolutional Networks, AAAI 2023).

    A hidden layer is norm, ReLU, dropout and attention; its output ``h`` becomes ``(1 - g) h + g h_0``, with
    ``h_0`` from the first convolution and ``g`` from :class:`EvolvingGate`.

    Public settings for ogbn-arxiv: 3 layers (one of them hidden), 256 channels per head, 3 heads, dropout 0.8, input
    dropout 0.35, edge dropout 0.5. With two layers there is no gated layer.

    Args:
        in_channels, hidden_channels, out_channels, num_layers, dropout, norm, heads, input_dropout, edge_dropout: see
            :class:`~rbm.teachers.attention.AttentionTeacher`.

    Raises:
        ValueError: as its base class.
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
        settings = {"heads": heads, "input_dropout": input_dropout, "edge_dropout": edge_dropout}
        super().__init__(in_channels, hidden_channels, out_channels, num_layers, dropout, norm, **settings)
        width, hidden = heads * hidden_channels, num_layers - 2
        self.norms = nn.ModuleList([build_norm(norm, width) for _ in range(hidden)])
        self.convs = nn.ModuleList([AttentionConv(width, hidden_channels, heads) for _ in range(hidden)])
        self.gate = EvolvingGate(width, hidden_channels) if hidden else None

    def hidden_layers(self, h: Tensor, edges: Edges) -> Tensor:
        initial, state = h, None
        for norm, conv in zip(self.norms, self.convs, strict=True):
            share, state = self.gate(initial, h, state)
            h = conv(self.dropout(norm(h).relu()), self.thinned(edges))
            h = (1 - share) * h + share * initial
        return h


class EvolvingGate(nn.Module):
    """Gate for the share of a node's first hidden layer ``h_0``, from its similarity to the present hidden layer ``h``
    and from the gates of earlier layers.

    ``|RNN(L(n(h_0) * n(h)))|``, with ``n`` scaling rows to length one, ``L`` linear, and a recurrent network of two
    layers with a single tanh unit each that steps from layer to layer.

    In training, the initial state is drawn for each node, uniformly between ``-hidden_channels ** -1/2`` and
    ``hidden_channels ** -1/2``. The released code also draws it in evaluation. Here it is then zero, its mean, so that
    predictions are deterministic and change under input noise only because of that noise.

    Args:
        width: width of hidden layers.
        hidden_channels: width of the recurrent network's input.
    """

    def __init__(self, width: int, hidden_channels: int) -> None:
        super().__init__()
        self.lin = nn.Linear(width, hidden_channels)
        self.rnn = nn.RNN(hidden_channels, 1, num_layers=2)

    def forward(self, initial: Tensor, h: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute the share, ``[N, 1]`` in [0, 1), and the new state, ``[2, N, 1]``, from ``h_0`` and ``h``, both
        ``[N, width]``, and the previous layer's state (None in the first layer).
        """
        if state is None:
            bound = 1 / math.sqrt(self.lin.out_features) if self.training else 0.0
            state = torch.empty(2, h.shape[0], 1, dtype=h.dtype, device=h.device).uniform_(-bound, bound)
        compared = self.lin(F.normalize(initial, dim=-1) * F.normalize(h, dim=-1))
        with full_precision(h.device):
            out, state = self.rnn(wide(compared)[None], state)
        return out[0].abs(), state
