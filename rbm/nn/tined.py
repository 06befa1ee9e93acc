"""The student of TINED, with the interface of :mod:`rbm.nn.students`."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rbm.nn.dropout import dropout
from rbm.nn.sparse_rows import Linear, Rows
from rbm.nn.students import MLPStudent, build_norm, layer_sizes
from rbm.utils.arguments import check_choice, check_probability, check_sizes


class TINEDStudent(MLPStudent):
    """An MLP with one layer per operation of a GNN: see :mod:`rbm.distillation.methods.tined`.

    Args:
        in_channels, hidden_channels, out_channels: sizes of input, hidden layers and output.
        num_layers: number of layers of the GNN.
        propagation: where the GNN propagates: after or before each linear map (``layers``), at the ``end``, or
            not at all (``none``).
        features: width of the GNN's input; the columns after it are encodings.
        norm, dropout: after every layer except the last.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        *,
        num_layers: int = 2,
        propagation: str = "layers",
        features: int | None = None,
        norm: str = "none",
        dropout: float = 0.0,
    ) -> None:
        nn.Module.__init__(self)
        self.dropout = check_probability("dropout", dropout)
        check_choice("propagation", propagation, ("layers", "end", "none"))
        [self.in_channels] = check_sizes(in_channels=in_channels)
        features = self.in_channels if features is None else features
        self.kinds, sizes = self.plan(features, hidden_channels, out_channels, num_layers, propagation)
        sizes[0] = (in_channels, sizes[0][1])
        self.layers = nn.ModuleList(Linear(*size) for size in sizes)
        self.norms = nn.ModuleList(build_norm(norm, size) for _, size in sizes[:-1])

    @staticmethod
    def plan(
        features: int, hidden_channels: int, out_channels: int, num_layers: int, propagation: str
    ) -> tuple[list[str], list[tuple[int, int]]]:
        """Kinds (``transform`` or ``propagate``) and ``(in, out)`` of all layers.

        With ``layers``, propagation is on the narrower side of each linear map.
        """
        kinds, sizes = [], []
        for fan_in, fan_out in layer_sizes(features, hidden_channels, out_channels, num_layers):
            steps = [("transform", (fan_in, fan_out))]
            if propagation == "layers" and fan_in > fan_out:
                steps.append(("propagate", (fan_out, fan_out)))
            elif propagation == "layers":
                steps.insert(0, ("propagate", (fan_in, fan_in)))
            kinds += [kind for kind, _ in steps]
            sizes += [size for _, size in steps]
        if propagation == "end":
            kinds.append("propagate")
            sizes.append((out_channels, out_channels))
        return kinds, sizes

    def transformations(self) -> list[nn.Module]:
        """The layers that receive the teacher's weights, in order."""
        return [layer for kind, layer in zip(self.kinds, self.layers, strict=True) if kind == "transform"]

    @torch.no_grad()
    def inject(self, weights: list[tuple[Tensor, Tensor]], *, identity: bool) -> None:
        """Copy weight ``[out, in]`` and bias of each transformation, and optionally make propagations the identity."""
        for layer, (weight, bias) in zip(self.transformations(), weights, strict=True):
            layer.weight[:, : weight.shape[1]] = weight
            layer.bias.copy_(bias)
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            if identity and kind == "propagate":
                layer.weight.copy_(torch.eye(*layer.weight.shape))
                layer.bias.zero_()

    def operations(self, x: Rows) -> Iterator[tuple[Rows, Tensor]]:
        """Input and output of every layer, in order."""
        for i, layer in enumerate(self.layers):
            if i > 0:
                x = dropout(F.relu(self.norms[i - 1](x)), self.dropout, self.training)
            before, x = x, layer(x)
            yield before, x
