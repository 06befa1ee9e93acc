"""A mixture of feed-forward experts, routed by memory, that replaces the feed-forward network of a transformer."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from rbm.nn.cpu_derivatives import swiglu
from rbm.nn.dropout import dropout as drop
from rbm.nn.folded_weights import PACKED_DTYPES, KeepsCopy, Sources
from rbm.nn.memory_router import MemoryRouter, Routing, draw_experts
from rbm.nn.sparse_rows import refuse_nested, refuse_symbols
from rbm.nn.stored_tensors import check_stored
from rbm.utils.arguments import check_choice, check_flags, check_sizes
from rbm.utils.defaults import NUM_EXPERTS, TOP_K
from rbm.utils.precision import autocast_dtype
from rbm_kernels import expert_matmul, pack_experts, packed_feed_forward
from rbm_kernels._library import is_exporting
from rbm_kernels.ops.expert_matmul.config import holds
from rbm_kernels.ops.expert_matmul.op import order_for
from rbm_kernels.ops.packed_feed_forward import ACTIVATIONS


class PackedPair(NamedTuple):
    """Experts of both products, packed for a CPU, and the parameters that they were made from."""

    weight_in: Tensor
    weight_out: Tensor
    sources: Sources


class RbMFeedForward(KeepsCopy, MemoryRouter):
    r"""Mixture of feed-forward experts, routed by memory: from ``[..., in_features]`` to ``[..., out_features]``.

    Each row goes to the ``top_k`` of ``num_experts`` experts whose memory vectors are closest to it in cosine
    similarity. Its output is :math:`\sum_i G_i (V_i \, \sigma(W_i h + b_i) + c_i)`; the gates ``G`` are the softmax
    over the selected cosines (paper, Eq. 3). A row is routed once, for both products. Routing and memory work as in
    :class:`~rbm.nn.rbm_layer.FusedRbMLayer`: the memory follows the rows of training forwards without an extra call.
    The layer has no scale and attention (Eq. 5), because a transformer has residual connections and norms.

    The products run on :func:`rbm_kernels.expert_matmul`, with one call for each product and each of a row's ``top_k``
    choices. Rows are not copied for their experts, neither in the forward nor in the backward pass, unless there are so
    few that the copies are smaller than the weights. At inference on a CPU, the layer keeps a packed copy of its
    weights, of their size, from the first forward without gradients until a parameter changes. The description of
    :class:`~rbm.nn.rbm_layer.FusedRbMLayer` names the changes that are not noticed.

    Args:
        in_features: size of a row.
        hidden_features: ``I``, the hidden width of each expert. A row uses ``top_k`` times as many.
        num_experts: ``E``.
        top_k: experts a row uses, at most ``num_experts``.
        out_features: size of an output row; ``in_features`` by default.
        activation: ``relu``, ``gelu``, ``silu`` or ``swiglu``, which is gated: SiLU of one half of the first product
            times the other (Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202).
        bias: whether both products have a bias.
        dropout: probability of zeroing a hidden feature.
        decay: share of the old memory in each update, in [0, 1]. The attribute may be changed during training.
        gate_temperature: divides the cosines before the softmax.
        detach_gates: stop gradients of the output from reaching the row through the gates. Gradients of losses on a
            :class:`~rbm.nn.memory_router.Routing` still reach it.
        normalize_memory: normalise the old memory to unit length before averaging.
        normalize_memory_input: normalise rows to unit length before averaging.
        device, dtype: of the parameters. ``memory`` stays float32 (float64 with ``dtype=torch.float64``).

    Attributes:
        track_memory: whether training forwards move the memory; set it to False for passes that should not.
        track_usage: whether forwards count in ``usage``, in training and in eval mode; off by default.
        usage: int64 ``[E]``, how many rows each expert has received since :meth:`reset_usage`, in this process.
        weight_in: ``W``, ``[E, I, in_features]``; ``[E, 2 I, in_features]`` for ``swiglu``.
        bias_in: ``b``, ``[E, I]`` or ``[E, 2 I]``, or None.
        weight_out: ``V``, ``[E, out_features, I]``.
        bias_out: ``c``, ``[E, out_features]``, or None.
        memory: buffer ``[E, in_features]``.

    Raises:
        ValueError: a size is below one, ``top_k > num_experts``, the activation is unknown, a number is out of range,
            or the device is not available.
        TypeError: an argument has the wrong type, such as 3.0 for an integer, or ``dtype`` is not floating-point.
    """

    expert_names = ("weight_in", "bias_in", "weight_out", "bias_out")

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        num_experts: int = NUM_EXPERTS,
        top_k: int = TOP_K,
        *,
        out_features: int | None = None,
        activation: str = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
        decay: float = 0.9,
        gate_temperature: float = 1.0,
        detach_gates: bool = True,
        normalize_memory: bool = True,
        normalize_memory_input: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        [hidden_features] = check_sizes(hidden_features=hidden_features)
        check_choice("activation", activation, tuple(ACTIVATIONS))
        check_flags(bias=bias)
        factory = {"device": device, "dtype": dtype}
        super().__init__(
            in_features,
            in_features if out_features is None else out_features,
            num_experts,
            top_k,
            dropout=dropout,
            decay=decay,
            gate_temperature=gate_temperature,
            detach_gates=detach_gates,
            normalize_memory=normalize_memory,
            normalize_memory_input=normalize_memory_input,
            **factory,
        )
        self.hidden_features, self.activation = hidden_features, activation
        wide = ACTIVATIONS[activation][1] * hidden_features
        self.weight_in = nn.Parameter(torch.empty(num_experts, wide, in_features, **factory))
        self.bias_in = nn.Parameter(torch.empty(num_experts, wide, **factory)) if bias else None
        self.weight_out = nn.Parameter(torch.empty(num_experts, self.out_features, hidden_features, **factory))
        self.bias_out = nn.Parameter(torch.empty(num_experts, self.out_features, **factory)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the experts as :class:`torch.nn.Linear` does, and memory vectors of unit length and random direction."""
        check_stored(self, self.expert_names, "reset_parameters() writes")
        draw_experts(self.weight_in, self.bias_in)
        draw_experts(self.weight_out, self.bias_out)
        self._reset_memory()

    def forward(self, h: Tensor, *, return_routing: bool = False) -> Tensor | tuple[Tensor, Routing]:
        """Map rows ``[..., in_features]`` to ``[..., out_features]``; with ``return_routing`` also return the routing.

        Raises:
            ValueError: the last dimension of ``h`` is not ``in_features``.
            TypeError: ``h`` is not dense, or ``h`` and the parameters differ in dtype, outside autocast.
            RuntimeError: a training forward would move the memory inside a transformation of ``torch.func``.
        """
        if not isinstance(h, Tensor):
            refuse_symbols(h)
            raise TypeError(f"input is a {type(h).__name__}, expected a dense tensor")
        if not (self.training or return_routing or torch.is_grad_enabled()):
            y = self._answer(h)
            if y is not None:
                return y
        refuse_nested(h)
        if h.layout is not torch.strided:
            raise TypeError(f"input is {h.layout}, expected a dense tensor; use .to_dense()")
        return self._forward(h, return_routing)

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.hidden_features}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"out_features={self.out_features}, activation={self.activation!r}, bias={self.bias_in is not None}, "
            f"decay={self.decay}, dropout={self.dropout}"
        )

    def _combine(self, rows: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
        parameters = (self.weight_in, self.bias_in, self.weight_out, self.bias_out)
        dtype = autocast_dtype(rows, self._dtype)
        if dtype is not None:
            rows, *parameters = (None if t is None else t.to(dtype) for t in (rows, *parameters))
        dropout = self.dropout if self.training else 0.0
        return expert_feed_forward(rows, *parameters, gates, experts, activation=self.activation, dropout=dropout)

    def _answer(self, h: Tensor) -> Tensor | None:
        """The forward of inference by packed experts, if they serve. One row may take only microseconds."""
        packed = self._packed(h)
        if packed is None:
            return None
        if self.track_usage:
            self._count(self.route(h).experts)
        rows = h if h.dim() == 2 else self._rows(h)
        y = packed_feed_forward(
            rows,
            self._buffers["memory"],
            packed.weight_in,
            packed.weight_out,
            self.hidden_features,
            self.out_features,
            self.top_k,
            self.activation,
            self.gate_temperature,
        )
        return y if rows is h else y.reshape(*h.shape[:-1], self.out_features)

    def _packed(self, rows: Tensor) -> PackedPair | None:
        """Packed experts for plain rows on a CPU, without gradients, where nothing is traced; or None."""
        if forward_ad._current_level >= 0 or torch.compiler.is_compiling() or torch._C._get_tracing_state():
            return None
        if type(rows) is not Tensor or not rows.is_cpu or rows.layout is not torch.strided or rows.is_nested:
            return None
        dtype, memory, weight = rows.dtype, self._buffers.get("memory"), self._parameters.get("weight_in")
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        if memory is None or memory.dtype != wide or weight is None or weight.dtype != dtype:
            return None
        if dtype not in PACKED_DTYPES or rows.shape[-1:] != memory.shape[-1:]:
            return None
        if torch._C._is_any_autocast_enabled() and autocast_dtype(rows, dtype) is not None:
            return None
        packed = self._copy
        if packed is None or not packed.sources.are_still(self._parameters):
            parameters = {name: getattr(self, name) for name in self.expert_names}
            sources = Sources.of(self, parameters)
            if sources is None:
                return None
            weight_in, bias_in, weight_out, bias_out = parameters.values()
            packed = PackedPair(pack_experts(weight_in, bias_in), pack_experts(weight_out, bias_out), sources)
            self._copy = packed
        return packed

    @property
    def _dtype(self) -> torch.dtype:
        return self.weight_in.dtype


def expert_feed_forward(
    x: Tensor,
    weight_in: Tensor,
    bias_in: Tensor | None,
    weight_out: Tensor,
    bias_out: Tensor | None,
    gates: Tensor,
    experts: Tensor,
    *,
    activation: str = "gelu",
    dropout: float = 0.0,
) -> Tensor:
    """Apply each row's feed-forward experts and sum their outputs, weighted by the gates.

    Args:
        x: rows ``[B, D]``.
        weight_in: ``[E, I, D]``; ``[E, 2 I, D]`` for ``swiglu``.
        bias_in: ``[E, I]`` or ``[E, 2 I]``, or None.
        weight_out: ``[E, N, I]``.
        bias_out: ``[E, N]``, or None.
        gates: ``[B, k]``; float32, float64 for float64 rows.
        experts: int32 ``[B, k]``, each in ``[0, E)``.
        activation: one of :data:`ACTIVATIONS`.
        dropout: probability of zeroing a hidden feature, with one mask for each of a row's experts.

    Returns:
        ``[B, N]`` in the dtype of ``x``. Gradients flow into all tensors except ``experts``.
    """
    (rows, k), (num_experts, wide, _) = experts.shape, weight_in.shape
    activate = swiglu if activation == "swiglu" else ACTIVATIONS[activation][0]
    # The activation comes before the sum over a row's experts, so each choice needs its own product.
    if k > 1 and not is_exporting() and holds(rows * k <= num_experts * wide):
        # The copied rows are smaller than the weights, which would otherwise be read and packed once for each choice.
        x, gates, experts = x.repeat_interleave(k, 0), gates.reshape(-1, 1), experts.reshape(-1, 1)
        order = order_for(x, weight_in, experts)
        hidden = activate(expert_matmul(x, weight_in, bias_in, torch.ones_like(gates), experts, order))
        parts = expert_matmul(drop(hidden, dropout), weight_out, bias_out, gates, experts, order)
        return parts.unflatten(0, (rows, k)).sum(1)
    ones, parts = torch.ones_like(gates[:, :1]), []
    for choice in range(k):
        chosen, gate = experts[:, choice : choice + 1], gates[:, choice : choice + 1]
        order = order_for(x, weight_in, chosen)
        hidden = activate(expert_matmul(x, weight_in, bias_in, ones, chosen, order))
        parts.append(expert_matmul(drop(hidden, dropout), weight_out, bias_out, gate, chosen, order))
    return sum(parts[1:], parts[0])
