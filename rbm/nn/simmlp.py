"""The student of SimMLP and its parts, with the interface of :mod:`rbm.nn.students`."""

import torch
from torch import Tensor, nn

from rbm.nn.cpu_derivatives import PReLU, unit_rows
from rbm.nn.dropout import dropout
from rbm.nn.packed_student import PackedMixin, all_or_none, network_layer, runs_as_its_class
from rbm.nn.pretrained import HubMixin
from rbm.nn.sparse_rows import Features, Linear, Rows
from rbm.nn.students import build_norm, layer_sizes, rows_for
from rbm.utils.arguments import check_probability, check_sizes
from rbm_kernels import NetworkLayer


class NormalizedMLP(nn.Module):
    """Linear maps, each followed by a norm and, except for the last, PReLU and dropout; the output has unit length.

    Args:
        sizes: ``(in, out)`` of every layer.
        norm: ``none``, ``batch`` or ``layer``.
        dropout: after every activation.
        residual: add the input of every layer except the first to its output.
    """

    def __init__(
        self, sizes: list[tuple[int, int]], *, norm: str = "none", dropout: float = 0.0, residual: bool = False
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(*size) for size in sizes)
        self.norms = nn.ModuleList(build_norm(norm, size) for _, size in sizes)
        self.activation, self.dropout, self.residual = PReLU(), dropout, residual

    def before_last(self, x: Rows) -> Rows:
        """Input of the last linear map."""
        for i, (layer, norm) in enumerate(zip(self.layers[:-1], self.norms, strict=False)):
            before, x = x, dropout(self.activation(norm(layer(x))), self.dropout, self.training)
            if self.residual and i > 0:
                x = x + before
        return x

    def forward(self, x: Rows) -> Tensor:
        """Unit rows ``[B, out]`` of rows ``[B, in]``."""
        before = self.before_last(x)
        x = self.norms[-1](self.layers[-1](before))
        if self.residual and len(self.layers) > 1:
            x = x + before
        return unit_rows(x)


class SimMLPStudent(PackedMixin, HubMixin, nn.Module):
    """An MLP aligned with neighbourhoods, and a linear head: see :mod:`rbm.distillation.methods.simmlp`.

    Args:
        in_channels, hidden_channels, out_channels: sizes of input, hidden layers and output.
        num_layers: layers of the MLP before the head, each of width ``hidden_channels``.
        norm, dropout: as in :class:`NormalizedMLP`.
    """

    _packed_children = ("encoder", "head")

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        *,
        num_layers: int = 2,
        norm: str = "batch",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        hidden_channels, out_channels = check_sizes(hidden_channels=hidden_channels, out_channels=out_channels)
        sizes = layer_sizes(in_channels, hidden_channels, hidden_channels, num_layers)
        self.in_channels, dropout = sizes[0][0], check_probability("dropout", dropout)
        self.encoder = NormalizedMLP(sizes, norm=norm, dropout=dropout, residual=True)
        self.head = Linear(hidden_channels, out_channels)

    @property
    def layers(self) -> nn.ModuleList:
        """The layers of the MLP."""
        return self.encoder.layers

    def forward(self, x: Features) -> Tensor:
        """Logits ``[B, C]`` of rows ``[B, F]``."""
        if isinstance(x, Tensor) and not (self.training or torch.is_grad_enabled()):
            answer = self._answer_at_once(x)
            if answer is not None:
                return answer
        return self.head(self.encoder(rows_for(self, x)))

    def _network_layers(self) -> list[NetworkLayer] | None:
        encoder = self.encoder
        layers, norms, activation = [*encoder.layers], [*encoder.norms], encoder.activation
        classes = (type(encoder), type(activation))
        if classes != (NormalizedMLP, PReLU) or not all(map(runs_as_its_class, (encoder, activation))):
            return None
        slope, last = activation.weight, len(layers) - 1
        if slope.numel() != 1 or slope.dtype != torch.float32 or not slope.is_cpu or len(norms) != len(layers):
            return None
        slope, found = slope.item(), []
        for i, parts in enumerate(zip(layers, norms, strict=True)):
            adds = encoder.residual and i > 0
            found.append(network_layer(*parts, relu=i < last, negative_slope=slope, residual=adds, unit=i == last))
        return all_or_none([*found, network_layer(self.head)])
