"""Students: models that classify a node from its own row. They share one interface.

``student(x)`` returns logits ``[B, C]``. ``x`` is dense ``[B, F]``, a CSR tensor, or a pair of CSR and dense columns
(features and encodings), which is not converted to a dense tensor; ``student.in_channels`` is ``F``. Students that are
trained with losses on intermediate results return ``(logits, trace)`` from ``student(x, return_trace=True)``; the
:class:`Trace` holds what these losses need. :mod:`rbm.nn.pretrained` uploads and downloads students.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rbm.nn.dropout import dropout
from rbm.nn.half_rows import HalfPrecisionRows
from rbm.nn.memory_router import Routing
from rbm.nn.packed_student import PackedMixin
from rbm.nn.parameters import dtype_of
from rbm.nn.pretrained import HubMixin
from rbm.nn.rbm_layer import FusedRbMLayer
from rbm.nn.sparse_rows import Features, Linear, Rows, as_rows, to_dense
from rbm.utils.arguments import check_choice, check_flags, check_probability, check_sizes
from rbm.utils.chunks import CHUNK_ROWS
from rbm.utils.defaults import NUM_EXPERTS, TOP_K
from rbm.utils.distributed import all_reduce_sum, world_size

NORMS = ("none", "batch", "layer")


def build_norm(norm: str, channels: int) -> nn.Module:
    """The normalisation over ``channels`` with this name in the configuration.

    Raises:
        ValueError: the name is not one of ``none``, ``batch``, ``layer``.
    """
    check_choice("norm", norm, NORMS)
    if norm == "none":
        return nn.Identity()
    return BatchNorm(channels) if norm == "batch" else nn.LayerNorm(channels)


class BatchNorm(nn.BatchNorm1d):
    """BatchNorm that uses its running statistics, instead of raising, when a batch has fewer than two rows.

    When several ranks train together, the statistics are those of the joint batch, also on CPUs
    (:class:`torch.nn.SyncBatchNorm` needs GPUs).
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 2:  # BatchNorm1d would take the second dimension for the channels
            return self(x.reshape(-1, x.shape[-1])).reshape(x.shape)
        if self.training and world_size() > 1:
            return self._forward_jointly(x)
        if self.training and x.shape[0] < 2:
            return self._forward_running(x)
        return super().forward(x)

    def affine(self) -> tuple[Tensor, Tensor]:
        """Scale and shift that eval mode applies, ``[channels]`` each."""
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return scale, self.bias - self.running_mean * scale

    def _forward_running(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)

    def _forward_jointly(self, x: Tensor) -> Tensor:
        rows = x.to(self.weight.dtype)  # 8 bits do not even hold the number of rows
        sums = all_reduce_sum(torch.cat([rows.sum(0), rows.new_tensor([len(rows)])]))
        count = sums[-1].detach()
        if count < 2:
            return self._forward_running(x)
        mean = sums[:-1] / count
        variance = all_reduce_sum((rows - mean).square().sum(0)) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        return ((rows - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias).to(x.dtype)


def layer_sizes(in_channels: int, hidden_channels: int, out_channels: int, num_layers: int) -> list[tuple[int, int]]:
    """``(in, out)`` of every layer; TypeError or ValueError if a size is not a positive integer."""
    in_channels, num_layers, out_channels = check_sizes(
        in_channels=in_channels, num_layers=num_layers, out_channels=out_channels
    )
    if num_layers > 1:  # otherwise there is no hidden layer
        [hidden_channels] = check_sizes(hidden_channels=hidden_channels)
    sizes = [in_channels, *[hidden_channels] * (num_layers - 1), out_channels]
    return list(itertools.pairwise(sizes))


class Trace(NamedTuple):
    """Intermediate results of a student's forward that losses use.

    Attributes:
        routings: the routing of each mixture layer; empty for an MLP or during pretraining.
        first, last: outputs of the first and of the last hidden layer, before norm and activation, ``[B, H]``. Without
            hidden layers, both are the logits.
    """

    routings: list[Routing]
    first: Tensor
    last: Tensor


def width_of_last(student: nn.Module) -> int:
    """Width of :attr:`Trace.last`: of the last hidden layer, or of the logits without hidden layers."""
    return (student.layers[:-1] or student.layers)[-1].out_features


def rows_for(student: HubMixin, x: Features) -> Rows:
    """Rows of a student's input; ValueError if their width is wrong, TypeError for integers and unexpected float64."""
    rows = rows_of_width(student, x)
    if rows.dtype is not torch.float32:
        _check_dtype(student, rows.dtype)
    return rows


def rows_of_width(student: HubMixin, x: Features) -> Rows:
    """Rows of a student's input in any dtype; ValueError if their width is wrong."""
    rows = as_rows(x)
    width = rows.shape[-1] if len(rows.shape) > 0 else 0
    if width != student.in_channels:
        raise ValueError(
            f"rows of x hold {width} numbers (shape {list(rows.shape)}), expected {student.in_channels}: {student.row}"
        )
    return rows


def _check_dtype(student: nn.Module, given: torch.dtype) -> None:
    """Reject integers and float64, NumPy's defaults. Other floating-point types may come from autocast or FSDP."""
    expected = dtype_of(student)
    if given != expected and (given == torch.float64 or not given.is_floating_point):
        raise TypeError(f"rows of x have dtype {given}, expected {expected}, that of the student; use x.to({expected})")


def _trace(routings: list[Routing], outputs: list[Tensor]) -> Trace:
    hidden = outputs[:-1] or outputs
    return Trace(routings, hidden[0], hidden[-1])


class MLPStudent(PackedMixin, HubMixin, nn.Module):
    """Multi-layer perceptron: linear, norm, ReLU, dropout. The last layer is only linear.

    Args:
        in_channels, hidden_channels, out_channels: sizes of input, hidden layers and output.
        num_layers: number of linear layers.
        norm: ``none``, ``batch`` or ``layer``.
        dropout: probability of zeroing a hidden activation.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        *,
        num_layers: int = 2,
        norm: str = "none",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = layer_sizes(in_channels, hidden_channels, out_channels, num_layers)
        self.in_channels = sizes[0][0]
        self.layers = nn.ModuleList(Linear(*size) for size in sizes)
        self.norms = nn.ModuleList(build_norm(norm, size) for _, size in sizes[:-1])
        self.dropout = check_probability("dropout", dropout)

    def forward(
        self, x: Features, *, return_trace: bool = False, first: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Trace]:
        """Logits ``[B, C]`` of rows ``[B, F]``; with ``return_trace`` also the :class:`Trace`. ``first`` is the output
        of the first layer, if it is already known.
        """
        is_plain = isinstance(x, Tensor) and first is None
        if is_plain and not (self.training or return_trace or torch.is_grad_enabled()):
            answer = self._answer_at_once(x)
            if answer is not None:
                return answer
        x, outputs = rows_for(self, x), []
        for i, layer in enumerate(self.layers):
            if i > 0:
                x = dropout(F.relu(self.norms[i - 1](x)), self.dropout, self.training)
            x = layer(x) if i > 0 or first is None else first
            outputs.append(x)
        return (x, _trace([], outputs)) if return_trace else x


class EnsembleStudent(HubMixin, nn.Module):
    """Ensemble of :class:`MLPStudent`: its logits are the logarithm of the members' mean probabilities.

    Args:
        members: number of members.
        arguments: arguments of each member.
    """

    def __init__(self, members: int, **arguments) -> None:
        super().__init__()
        self.members = nn.ModuleList(MLPStudent(**arguments) for _ in range(*check_sizes(members=members)))
        self.in_channels = self.members[0].in_channels

    def forward(self, x: Features) -> Tensor:
        """Logits ``[B, C]`` of rows ``[B, F]``."""
        rows = rows_for(self, x)
        votes = torch.stack([F.log_softmax(member(rows), dim=-1) for member in self.members])
        return votes.logsumexp(0) - math.log(len(self.members))


class MixtureStudent(PackedMixin, HubMixin, nn.Module):
    """Stack of mixture layers: layer, norm, ReLU. The last layer has no norm and activation.

    A layer has ``in_features``, ``num_experts``, ``top_k``, ``weight [E, N, D]``, ``bias [E, N]``, and the methods
    ``forward(x, return_routing=...)``, ``expert_forward`` and ``clone_expert``, like
    :class:`~rbm.nn.rbm_layer.FusedRbMLayer`.

    Args:
        layers: the layers in order.
        norm: ``none``, ``batch`` or ``layer``.

    Attributes:
        pretraining: while true, no rows are routed: each layer runs ``expert_forward``.
    """

    def __init__(self, layers: Iterable[nn.Module], norm: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        if not self.layers:
            raise ValueError("layers are empty, expected at least one")
        self.in_channels = self.layers[0].in_features
        self.norms = nn.ModuleList(build_norm(norm, layer.out_features) for layer in self.layers[:-1])
        self.pretraining = False

    def forward(
        self, x: Features, *, return_trace: bool = False, first: tuple[Tensor, Routing] | None = None
    ) -> Tensor | tuple[Tensor, Trace]:
        """Logits ``[B, C]`` of rows ``[B, F]``; with ``return_trace`` also the :class:`Trace`. ``first`` is the output
        of the first layer with its routing, if it is already known.
        """
        is_plain = isinstance(x, Tensor) and first is None
        if is_plain and not (self.training or return_trace or self.pretraining or torch.is_grad_enabled()):
            answer = self._answer_at_once(x)
            if answer is not None:
                return answer
        x, routings, outputs = rows_for(self, x), [], []
        for i, layer in enumerate(self.layers):
            if i > 0:
                x = F.relu(self.norms[i - 1](x))
            if self.pretraining:
                x = layer.expert_forward(x)
            elif return_trace or (i == 0 and first is not None):
                x, routing = layer(x, return_routing=True) if i > 0 or first is None else first
                routings.append(routing)
            else:
                x = layer(x)
            outputs.append(x)
        return (x, _trace(routings, outputs)) if return_trace else x

    @torch.no_grad()
    def router_inputs(self, x: Features) -> Iterator[tuple[nn.Module, Rows]]:
        """Yield each layer, in order, with the rows that its router sees. A layer runs when the next is requested."""
        x = rows_for(self, x)
        for i, layer in enumerate(self.layers):
            if i > 0:
                x = F.relu(self.norms[i - 1](x))
            yield layer, x
            x = layer(x)

    def clone_experts(self) -> None:
        """Copy each layer's first expert to all its experts and leave pretraining."""
        for layer in self.layers:
            layer.clone_expert(0)
        self.pretraining = False


class RbMStudent(MixtureStudent):
    """Stack of :class:`~rbm.nn.rbm_layer.FusedRbMLayer` (paper, section 4).

    Args:
        in_channels, hidden_channels, out_channels: sizes of input, hidden layers and output.
        num_layers: number of RbM layers.
        num_experts, top_k: of every layer.
        norm: ``none``, ``batch`` or ``layer``.
        dropout: probability of zeroing a feature of the experts' input.
        dropout_first_layer: whether dropout is applied in the first layer too. The released code does, the paper does
            not.
        layer_options: further keyword arguments of :class:`~rbm.nn.rbm_layer.FusedRbMLayer`.
    """

    layer_type = FusedRbMLayer

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        *,
        num_layers: int = 2,
        num_experts: int = NUM_EXPERTS,
        top_k: int = TOP_K,
        norm: str = "none",
        dropout: float = 0.0,
        dropout_first_layer: bool = True,
        **layer_options,
    ) -> None:
        check_flags(dropout_first_layer=dropout_first_layer)
        sizes = layer_sizes(in_channels, hidden_channels, out_channels, num_layers)
        layers = (
            self.layer_type(
                *size,
                num_experts,
                top_k,
                dropout=dropout if dropout_first_layer or i > 0 else 0.0,
                **layer_options,
            )
            for i, size in enumerate(sizes)
        )
        super().__init__(layers, norm)

    def memories(self) -> list[Tensor]:
        """The memory vectors of every layer, ``[E, in_features]`` each."""
        return [layer.memory for layer in self.layers]

    def set_track_memory(self, track: bool) -> None:
        """Set whether training forwards move the memory of the layers."""
        for layer in self.layers:
            layer.track_memory = track

    def set_decay(self, decay: float) -> None:
        """Set the decay of every layer's memory."""
        for layer in self.layers:
            layer.decay = decay


class CoHOpStudent(HubMixin, nn.Module):
    """The student of CoHOp: one linear layer; with two layers, BatchNorm, linear, ReLU, BatchNorm, dropout, linear."""

    def __init__(
        self, in_channels: int, hidden_channels: int, out_channels: int, *, num_layers: int = 1, dropout: float = 0.0
    ) -> None:
        super().__init__()
        [num_layers] = check_sizes(num_layers=num_layers)
        if num_layers > 2:
            raise ValueError(f"num_layers is {num_layers}, expected 1 or 2")
        sizes = layer_sizes(in_channels, hidden_channels, out_channels, num_layers)
        self.in_channels, self.linear = sizes[0][0], num_layers == 1
        if self.linear:
            self.layers = nn.ModuleList([Linear(in_channels, out_channels)])
            return
        self.layers = nn.ModuleList([Linear(in_channels, hidden_channels), Linear(hidden_channels, out_channels)])
        self.norms = nn.ModuleList([BatchNorm(in_channels), BatchNorm(hidden_channels)])
        self.dropout = check_probability("dropout", dropout)

    def forward(self, x: Features) -> Tensor:
        """Logits ``[B, C]`` of rows ``[B, F]``."""
        rows = rows_for(self, x)
        if self.linear:
            return self.layers[0](rows)
        hidden = self.norms[1](self.layers[0](self.norms[0](to_dense(rows))).relu())
        return self.layers[1](dropout(hidden, self.dropout, self.training))


class SIGNStudent(MLPStudent):
    """An MLP on features and stored hops (:mod:`rbm.datasets.encodings.hops`). Arguments as in :class:`MLPStudent`."""

    beside = "stored means of its neighbours' features, hop by hop"


def predict(
    student: nn.Module,
    x: Rows | HalfPrecisionRows,
    rows: slice | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Logits of all rows of ``x [N, F]``, or of a slice of them.

    Many rows are processed in chunks, so that neither the hidden layers nor the stored features of all rows must fit
    into memory. ``reduce`` maps the logits of each chunk to what is kept, such as classes, with one row per logit row.
    """
    count = x.shape[0]
    rows, reduce = rows or slice(0, count), reduce or (lambda logits: logits)
    if rows == slice(0, count) and count <= CHUNK_ROWS:
        return reduce(student(x))
    found: Tensor | None = None
    for start in range(rows.start, max(rows.stop, rows.start + 1), CHUNK_ROWS):
        stop = min(start + CHUNK_ROWS, rows.stop)
        part = reduce(student(x[start:stop]))
        if found is None:  # allocated once: joining the parts at the end would need their memory twice
            found = part.new_empty(rows.stop - rows.start, *part.shape[1:])
        found[start - rows.start : stop - rows.start] = part
    return found
