"""Students: models that classify a node from its own features. All of them share one interface.

``x`` is dense ``[B, F]``, a CSR tensor, or a pair of CSR and dense columns (features and encodings), which is never
made dense. ``student(x)`` gives logits ``[B, C]``, and ``student.in_channels`` is ``F``. Those that losses on their
inside teach give ``(logits, trace)`` by ``student(x, return_trace=True)``: the :class:`Trace` holds what these need.
They go to the Hugging Face Hub and come from there: see :mod:`rbm.nn.pretrained`.
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
from rbm.nn.packed_student import PackedMixin
from rbm.nn.pretrained import HubMixin
from rbm.nn.rbm_layer import FusedRbMLayer, Routing
from rbm.nn.sparse_rows import Features, Linear, Rows, SparseRows, as_rows
from rbm.utils.arguments import check_choice, check_flags, check_probability, check_sizes
from rbm.utils.defaults import NUM_EXPERTS, TOP_K
from rbm.utils.distributed import all_reduce_sum, world_size

NORMS = ("none", "batch", "layer")
CHUNK_ROWS = 2**18


def build_norm(norm: str, channels: int) -> nn.Module:
    """A normalisation over ``channels`` by its name in the configuration.

    Raises:
        ValueError: the name is not one of ``none``, ``batch``, ``layer``.
    """
    check_choice("norm", norm, NORMS)
    if norm == "none":
        return nn.Identity()
    return BatchNorm(channels) if norm == "batch" else nn.LayerNorm(channels)


class BatchNorm(nn.BatchNorm1d):
    """BatchNorm that uses its running statistics where a batch has fewer than two rows, instead of raising.

    Where ranks train together, the batch is the joint one, on CPUs too (:class:`torch.nn.SyncBatchNorm` needs GPUs).
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.training and world_size() > 1:
            return self._forward_jointly(x)
        if self.training and x.shape[0] < 2:
            return self._forward_running(x)
        return super().forward(x)

    def affine(self) -> tuple[Tensor, Tensor]:
        """Scale and shift of eval mode, ``[channels]`` each."""
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return scale, self.bias - self.running_mean * scale

    def _forward_running(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)

    def _forward_jointly(self, x: Tensor) -> Tensor:
        sums = all_reduce_sum(torch.cat([x.sum(0), x.new_tensor([x.shape[0]])]))
        count = sums[-1].detach()
        if count < 2:
            return self._forward_running(x)
        mean = sums[:-1] / count
        variance = all_reduce_sum((x - mean).square().sum(0)) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        return (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias


def layer_sizes(in_channels: int, hidden_channels: int, out_channels: int, num_layers: int) -> list[tuple[int, int]]:
    """``(in, out)`` of every layer; TypeError or ValueError for sizes that are no positive whole numbers."""
    in_channels, num_layers, out_channels = check_sizes(
        in_channels=in_channels, num_layers=num_layers, out_channels=out_channels
    )
    if num_layers > 1:  # else there is no hidden layer
        [hidden_channels] = check_sizes(hidden_channels=hidden_channels)
    sizes = [in_channels, *[hidden_channels] * (num_layers - 1), out_channels]
    return list(itertools.pairwise(sizes))


class Trace(NamedTuple):
    """Intermediate results of a student's forward, on which losses depend.

    Attributes:
        routings: of every layer that routed; none for an MLP or while pretraining.
        first, last: outputs of the first and of the last hidden layer, before norm and activation, ``[B, H]``.
    """

    routings: list[Routing]
    first: Tensor
    last: Tensor


def rows_for(student: HubMixin, x: Features) -> Rows:
    """Rows of a student's input; ValueError where their width is another, TypeError for integers and float64."""
    rows = as_rows(x)
    if rows.shape[-1] != student.in_channels:
        raise ValueError(
            f"rows of x hold {rows.shape[-1]} numbers (shape {list(rows.shape)}), expected {student.in_channels}:"
            f" {student.row}"
        )
    if rows.dtype is not torch.float32:
        _check_dtype(student, rows.dtype)
    return rows


def _check_dtype(student: nn.Module, given: torch.dtype) -> None:
    """Other floating-point numbers may be autocast's or FSDP's; of these two NumPy makes tensors by default."""
    tensors = itertools.chain(student.parameters(), student.buffers())  # those of an exported student are all buffers
    expected = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
    if given != expected and (given == torch.float64 or not given.is_floating_point):
        raise TypeError(f"rows of x have dtype {given}, expected {expected}, that of the student; use x.to({expected})")


def _trace(routings: list[Routing], outputs: list[Tensor]) -> Trace:
    hidden = outputs[:-1] or outputs
    return Trace(routings, hidden[0], hidden[-1])


class MLPStudent(PackedMixin, HubMixin, nn.Module):
    """Multi-layer perceptron: linear, norm, ReLU, dropout; the last layer plain.

    Args:
        in_channels, hidden_channels, out_channels: sizes of input, hidden layers and output.
        num_layers: linear layers.
        norm: ``none``, ``batch`` or ``layer``.
        dropout: after every hidden activation.
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
        """Logits ``[B, C]`` of rows ``[B, F]``, and on request how they came about. ``first`` is the first layer's
        output where it is known.
        """
        if not (self.training or return_trace or torch.is_grad_enabled()) and first is None:
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
    """Several :class:`MLPStudent` that vote: its logits are logarithms of the mean of their probabilities.

    Args:
        members: how many.
        arguments: those of every member.
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
    """Stack of mixture layers: layer, norm, ReLU; the last layer plain.

    A layer has ``in_features``, ``num_experts``, ``top_k``, ``weight [E, N, D]``, ``bias [E, N]``, and methods
    ``forward(x, return_routing=...)``, ``expert_forward`` and ``clone_expert``, as
    :class:`~rbm.nn.rbm_layer.FusedRbMLayer`.

    Args:
        layers: in order.
        norm: ``none``, ``batch`` or ``layer``.

    Attributes:
        pretraining: while true, nothing is routed: layers do what their ``expert_forward`` does.
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
        """Logits ``[B, C]`` of rows ``[B, F]``, and on request how they came about. ``first`` is what the first layer
        gives, with its routing, where it is known.
        """
        if not (self.training or return_trace or self.pretraining or torch.is_grad_enabled()) and first is None:
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
        """Each layer with the rows that its router sees, in order. A layer runs only when the next one is asked for."""
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
        num_layers: RbM layers.
        num_experts, top_k: of every layer.
        norm: ``none``, ``batch`` or ``layer``.
        dropout: on the experts' input.
        dropout_first_layer: whether the first layer has that dropout too. The released code says yes, the paper no.
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
            FusedRbMLayer(
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
        """The memory of every layer, ``[E, in_features]`` each."""
        return [layer.memory for layer in self.layers]

    def set_track_memory(self, track: bool) -> None:
        """Whether training forwards move the memory of the layers from here on."""
        for layer in self.layers:
            layer.track_memory = track

    def set_decay(self, decay: float) -> None:
        """Set the decay of every layer's memory."""
        for layer in self.layers:
            layer.decay = decay


class CoHOpStudent(HubMixin, nn.Module):
    """The student of CoHOp: a linear map; or, with two layers, BatchNorm, linear, ReLU, BatchNorm, dropout, linear."""

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
        rows = rows.to_dense() if isinstance(rows, SparseRows) else rows
        hidden = self.norms[1](self.layers[0](self.norms[0](rows)).relu())
        return self.layers[1](dropout(hidden, self.dropout, self.training))


def predict(
    student: nn.Module,
    x: Rows | HalfPrecisionRows,
    rows: slice | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Logits of all rows of ``x [N, F]``, or of a slice of them; many rows go a chunk at a time, so that neither hidden
    layers nor stored features of all of them need to fit into memory. ``reduce`` maps each chunk's logits to what is
    kept of them, such as classes, with as many rows.
    """
    count = x.shape[0]
    rows, reduce = rows or slice(0, count), reduce or (lambda logits: logits)
    if rows == slice(0, count) and count <= CHUNK_ROWS:
        return reduce(student(x))
    found: Tensor | None = None
    for start in range(rows.start, max(rows.stop, rows.start + 1), CHUNK_ROWS):
        stop = min(start + CHUNK_ROWS, rows.stop)
        part = reduce(student(x[start:stop]))
        if found is None:  # once: to join the parts at the end would take their memory twice
            found = part.new_empty(rows.stop - rows.start, *part.shape[1:])
        found[start - rows.start : stop - rows.start] = part
    return found
