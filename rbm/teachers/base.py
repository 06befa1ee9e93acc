"""The interface and the settings of all teachers."""

import itertools
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from rbm.nn.dropout import Dropout
from rbm.nn.sparse_rows import Features, Rows, as_rows
from rbm.nn.students import BatchNorm

# A sampled batch may be a single node without neighbours, which PyTorch's BatchNorm refuses.
NORMS = {"none": nn.Identity, "batch": BatchNorm, "layer": nn.LayerNorm}


class Teacher(nn.Module, ABC):
    """A graph neural network that returns class logits and its last hidden layer.

    Attributes:
        hops: size of the neighbourhood, in hops, that the logits of a node depend on; None if it is the number of
            layers.
    """

    hops: int | None = None

    def reach(self, num_layers: int) -> int:
        """Size of the neighbourhood, in hops, that a node's logits depend on, for a teacher of ``num_layers``."""
        return num_layers if self.hops is None else self.hops

    @staticmethod
    @abstractmethod
    def adjacency(edge_index: Tensor, num_nodes: int, dtype: torch.dtype = torch.float32) -> Any:
        """The edges of one graph in the form that the teacher uses, with self-loops.

        Pass it instead of ``edge_index`` to build it once for many epochs.
        """

    @abstractmethod
    def forward(self, x: Features, edge_index: Tensor) -> Tensor:
        """Class logits.

        Args:
            x: floating ``[N, F]``, dense or sparse (see :func:`rbm.nn.sparse_rows.as_rows`).
            edge_index: int64 ``[2, M]`` without self-loops, messages flow from row 0 to row 1; or its ``adjacency``.

        Returns:
            Logits ``[N, C]``.
        """

    @abstractmethod
    def embed(self, x: Features, edge_index: Tensor) -> Tensor:
        """The last hidden layer ``[N, H]``, before norm; arguments as in ``forward``."""

    def _as_adjacency(self, x: Rows, edge_index: Any) -> Any:
        if isinstance(edge_index, Tensor) and edge_index.layout == torch.strided:
            return self.adjacency(edge_index, x.shape[0], x.dtype)
        return edge_index


class ConvTeacher(Teacher):
    """A stack of graph convolutions; subclasses define the convolutions and what follows them in a hidden layer.

    Args:
        in_channels: width of the node features.
        hidden_channels: width of every hidden layer.
        out_channels: number of classes.
        num_layers: number of convolutions, at least 2 (the last one gives the logits).
        dropout: probability in [0, 1), applied to hidden layers in training; the input is never dropped.
        norm: ``"none"``, ``"batch"`` or ``"layer"``.

    Raises:
        ValueError: a size is below its minimum, ``dropout`` is outside [0, 1), or ``norm`` is unknown.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 2,
        dropout: float = 0.0,
        norm: str = "none",
    ) -> None:
        super().__init__()
        check_settings(in_channels, hidden_channels, out_channels, num_layers, norm, dropout=dropout)
        widths = [in_channels, *[hidden_channels] * (num_layers - 1), out_channels]
        *hidden, last = itertools.pairwise(widths)
        self.convs = nn.ModuleList([*(self.make_conv(*pair) for pair in hidden), self.make_last_conv(*last)])
        self.norms = nn.ModuleList([NORMS[norm](hidden_channels) for _ in range(num_layers - 1)])
        self.dropout = Dropout(dropout)

    @staticmethod
    @abstractmethod
    def make_conv(in_channels: int, out_channels: int) -> nn.Module:
        """One convolution that takes ``(x, adjacency)``."""

    @classmethod
    def make_last_conv(cls, in_channels: int, out_channels: int) -> nn.Module:
        """The convolution that returns the logits; by default like all others."""
        return cls.make_conv(in_channels, out_channels)

    @staticmethod
    @abstractmethod
    def adjacency(edge_index: Tensor, num_nodes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The normalised adjacency of one graph with self-loops, sparse CSR ``[N, N]``, row = target node.

        Pass it instead of ``edge_index`` to build it once for many epochs.
        """

    @abstractmethod
    def hidden(self, layer: int, h: Tensor) -> tuple[Tensor, Tensor]:
        """From the output ``h [N, H]`` of a convolution: what ``embed`` returns for this layer, and the input of the
        next layer before dropout.
        """

    def forward(self, x: Features, edge_index: Tensor) -> Tensor:
        x = as_rows(x)
        adjacency = self._as_adjacency(x, edge_index)
        h, _ = self._run_hidden(x, adjacency)
        return self.convs[-1](h, adjacency)

    def embed(self, x: Features, edge_index: Tensor) -> Tensor:
        x = as_rows(x)
        return self._run_hidden(x, self._as_adjacency(x, edge_index))[1]

    def _run_hidden(self, x: Rows, adjacency: Tensor) -> tuple[Tensor, Tensor]:
        h = shown = x
        for layer, conv in enumerate(self.convs[:-1]):
            shown, h = self.hidden(layer, conv(h, adjacency))
            h = self.dropout(h)
        return h, shown


def check_settings(
    in_channels: int, hidden_channels: int, out_channels: int, num_layers: int, norm: str, **dropouts: float
) -> None:
    """Raise ValueError, with the name of the argument, if a teacher cannot have these settings."""
    sizes = {"in_channels": in_channels, "hidden_channels": hidden_channels, "out_channels": out_channels}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: got {size}, expected at least 1")
    if num_layers < 2:
        raise ValueError(f"num_layers: got {num_layers}, expected at least 2: hidden layers and one for the logits")
    for name, share in dropouts.items():
        if not 0.0 <= share < 1.0:
            raise ValueError(f"{name}: got {share}, expected a probability in [0, 1)")
    if norm not in NORMS:
        raise ValueError(f"norm: got {norm!r}, expected one of {', '.join(NORMS)}")
