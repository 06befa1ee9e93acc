"""RevGAT: attention in reversible blocks, with which training memory does not grow with depth."""

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch_geometric.nn import GroupAddRev

from rbm.nn.dropout import dropout
from rbm.teachers.attention import AttentionConv, AttentionTeacher, Edges, build_norm, draw_seed
from rbm.utils.precision import autocast_dtype


class RevGAT(AttentionTeacher):
    """Graph attention with reversible hidden layers (Li et al., Training Graph Neural Networks with 1000 Layers, ICML
    2021), which the paper calls RevGNN.

    The channels of a hidden layer are split into groups ``x_1 .. x_g``. A layer computes ``y_1 = x_1 + f_1(x_2 + ... +
    x_g)`` and ``y_i = x_i + f_i(y_{i-1})``, from which the ``x_i`` can be recovered. Layers therefore store nothing for
    the backward pass, which recomputes them. Each ``f`` is norm, ReLU, dropout and attention on a group's channels. All
    hidden layers of a forward share one dropout mask, and all groups of a layer drop the same edges.

    Public settings for ogbn-arxiv: 5 layers (3 of them reversible), 256 channels per head, 3 heads, 2 groups, dropout
    0.75, input dropout 0.25, edge dropout 0.3. With two layers there is no reversible layer.

    Args:
        in_channels, hidden_channels, out_channels, dropout, norm, heads, input_dropout, edge_dropout: see
            :class:`~rbm.teachers.attention.AttentionTeacher`.
        num_layers: number of consecutive convolutions, at least 2: the first, the reversible ones, the last.
        groups: number of groups of channels, at least 2; it must divide ``hidden_channels``.
        reversible: False stores activations for the backward pass, like any other network. A step is then faster, with
            the same gradients.

    Raises:
        ValueError: as its base class, or ``groups`` is not valid.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 5,
        dropout: float = 0.0,
        norm: str = "batch",
        *,
        heads: int = 3,
        groups: int = 2,
        input_dropout: float = 0.0,
        edge_dropout: float = 0.0,
        reversible: bool = True,
    ) -> None:
        settings = {"heads": heads, "input_dropout": input_dropout, "edge_dropout": edge_dropout}
        super().__init__(in_channels, hidden_channels, out_channels, num_layers, dropout, norm, **settings)
        if groups < 2 or hidden_channels % groups:
            raise ValueError(
                f"groups: got {groups}, expected at least 2 and a divisor of hidden_channels={hidden_channels}"
            )
        self.blocks = nn.ModuleList()
        for _ in range(num_layers - 2):
            parts = [Block(hidden_channels // groups, heads, norm, edge_dropout) for _ in range(groups)]
            self.blocks.append(GroupAddRev(nn.ModuleList(parts), disable=not reversible))

    def hidden_layers(self, h: Tensor, edges: Edges) -> Tensor:
        mask = None
        if self.training and self.dropout.p > 0 and self.blocks:
            mask = dropout(torch.ones_like(h), self.dropout.p)
        dtype = autocast_dtype(h, h.dtype)
        for block in self.blocks:
            # Blocks get everything random as arguments, for the recomputation in the backward pass. The seed replaces
            # the dropped edges. The backward pass runs without autocast, so they also get its dtype.
            h = block(h, edges, mask, draw_seed() if self.training and self.edge_dropout > 0 else None, dtype)
        return h


class Block(nn.Module):
    """``f`` of one group: norm, ReLU, dropout with a given mask, and attention along the edges that a seed selects.

    Args:
        out_channels: width of each head; input and output are ``heads * out_channels`` wide.
        heads: attention heads.
        norm: ``"none"``, ``"batch"`` or ``"layer"``.
        edge_dropout: probability of dropping an edge.
    """

    def __init__(self, out_channels: int, heads: int, norm: str, edge_dropout: float) -> None:
        super().__init__()
        self.norm = build_norm(norm, heads * out_channels)
        self.conv = AttentionConv(heads * out_channels, out_channels, heads)
        self.edge_dropout = edge_dropout

    def forward(
        self, x: Tensor, edges: Edges, mask: Tensor | None, seed: int | None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Rows of the shape of ``x``; ``dtype`` is that of autocast, or None."""
        h = self.norm(x).relu()
        if mask is not None:
            h = h * mask
        with nullcontext() if dtype is None else torch.autocast(x.device.type, dtype=dtype):
            return self.conv(h, edges if seed is None else edges.without(self.edge_dropout, seed))
