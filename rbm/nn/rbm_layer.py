"""The Routing-by-Memory layer: a sparse mixture of linear experts, routed by memory vectors that follow the rows."""

import math

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from rbm.nn.folded_weights import FoldedExperts, KeepsCopy, fold
from rbm.nn.memory_router import MemoryRouter, Routing, copy_expert, draw_experts
from rbm.nn.scaled_experts import scaled_expert_matmul
from rbm.nn.sparse_rows import Features, Rows, as_rows, dropout, linear
from rbm.nn.stored_tensors import check_stored
from rbm.utils.arguments import check_flags, check_positive
from rbm.utils.defaults import NUM_EXPERTS, TOP_K
from rbm.utils.precision import autocast_dtype
from rbm_kernels import NetworkLayer, cosine_topk, expert_matmul, routed_matmul, routed_matmul_packed


class FusedRbMLayer(KeepsCopy, MemoryRouter):
    r"""Routing-by-Memory layer (paper, Eqs. 3 to 5): a module from ``[..., in_features]`` to ``[..., out_features]``.

    Each row goes to the ``top_k`` of ``num_experts`` linear experts whose memory vectors are closest to it in cosine
    similarity. Its output is :math:`\exp(s) \sum_i G_i f_i(\exp(a_i) \odot h)`: ``G`` is the softmax over the selected
    cosines, ``s`` and ``a_i`` are learned. As in the released code, no factor ``exp(s)`` or ``exp(a)`` exceeds 100.

    The memory vectors follow the rows by a moving average, without an extra call, like the running statistics of
    BatchNorm. A training forward only *records* its statistics; the memory moves at the next training forward, on
    ``eval()``, on ``state_dict()`` or in :meth:`update_memory`. A forward that activation checkpointing repeats during
    the backward pass therefore sees the same memory and counts once, compiled or not. A checkpointed layer that is
    called several times before a backward pass must run inside :meth:`accumulate_memory`: otherwise the memory moves
    before the repetition, and gradients are wrong. In a distributed process group (the default one), even one
    initialised after the layer, the statistics are summed over the ranks when they are recorded. All ranks must
    therefore run the forward, even without rows, and memories that start equal stay equal. DDP makes them equal at the
    start; with FSDP2 (``fully_shard``), use one seed on all ranks or load one ``state_dict``.

    In eval mode, with gradients disabled and without ``return_routing``, a forward is one operator. It uses a second
    copy of the experts, with ``exp(a)`` and ``exp(s)`` folded in and, on a CPU, packed for its vector units. The copy
    is kept between calls until a parameter changes: by an optimizer step, an in-place operation, loading, conversion or
    assignment (also of ``.data``). PyTorch does not track values written *into* ``.data``, through NumPy, or by a
    collective of ``torch.distributed``, such as ``broadcast``: after that, call ``eval()`` or ``train()``, which drop
    the copy. No copy is kept while compiling, exporting or tracing, nor of parameters that are parts of a larger
    tensor, as after ``torch.nn.utils.vector_to_parameters``.

    Args:
        in_features: size of a row.
        out_features: size of an output row.
        num_experts: ``E``.
        top_k: experts a row uses, at most ``num_experts``.
        bias: whether the experts have a bias.
        input_attention: learn a scale for each expert and feature, ``exp(a_i)``.
        decay: share of the old memory in each update, in [0, 1]. The attribute may be changed during training.
        dropout: probability of zeroing a feature of the experts' input, with one mask per row. The router sees the row
            without dropout.
        gate_temperature: divides the cosines before the softmax.
        detach_gates: stop gradients of the output from reaching the row through the gates, as in the released code.
            Gradients of losses on a :class:`Routing` still reach it.
        normalize_memory: normalise the old memory to unit length before averaging.
        normalize_memory_input: normalise rows to unit length before averaging.
        init_scale: initial ``exp(s)``.
        init_attention: initial ``exp(a)``.
        device, dtype: of the parameters, as in :class:`torch.nn.Linear`. ``memory`` stays float32 (float64 with
            ``dtype=torch.float64``) because a bfloat16 average with a decay near one stops moving.

    Attributes:
        track_memory: whether training forwards move the memory; set it to False for passes that should not.
        track_usage: whether forwards count in ``usage``, in training and in eval mode; off by default.
        usage: int64 ``[E]``, how many rows each expert has received since :meth:`reset_usage`, in this process.
        weight: ``[E, out_features, in_features]``.
        bias: ``[E, out_features]``, or None.
        attention: ``[E, in_features]``, the logarithm ``a``, or None.
        log_scale: ``s``, ``[1]``, because FSDP2 cannot shard scalars.
        memory: buffer ``[E, in_features]``.

    Raises:
        ValueError: a size is below one, ``top_k > num_experts``, a number is out of range, or the device is not
            available.
        TypeError: an argument has the wrong type, such as 3.0 for an integer, or ``dtype`` is not floating-point.
    """

    expert_names = ("weight", "bias", "attention")
    _copy: FoldedExperts | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_experts: int = NUM_EXPERTS,
        top_k: int = TOP_K,
        *,
        bias: bool = True,
        input_attention: bool = True,
        decay: float = 0.9,
        dropout: float = 0.0,
        gate_temperature: float = 1.0,
        detach_gates: bool = True,
        normalize_memory: bool = True,
        normalize_memory_input: bool = True,
        init_scale: float = 2.0,
        init_attention: float = 1.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_flags(bias=bias, input_attention=input_attention)
        factory = {"device": device, "dtype": dtype}
        super().__init__(
            in_features,
            out_features,
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
        self.init_scale = check_positive("init_scale", init_scale)
        self.init_attention = check_positive("init_attention", init_attention)
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features, **factory))
        self.bias = nn.Parameter(torch.empty(num_experts, out_features, **factory)) if bias else None
        self.attention = nn.Parameter(torch.empty(num_experts, in_features, **factory)) if input_attention else None
        self.log_scale = nn.Parameter(torch.empty(1, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the experts as :class:`torch.nn.Linear` does, and memory vectors of unit length and random direction."""
        check_stored(self, (*self.expert_names, "log_scale"), "reset_parameters() writes")
        draw_experts(self.weight, self.bias)
        with torch.no_grad():
            if self.attention is not None:
                self.attention.fill_(math.log(self.init_attention))
            self.log_scale.fill_(math.log(self.init_scale))
        self._reset_memory()

    def forward(self, h: Features, *, return_routing: bool = False) -> Tensor | tuple[Tensor, Routing]:
        """Map rows ``[..., in_features]`` to ``[..., out_features]``; with ``return_routing`` also return the routing.

        Sparse rows are a CSR tensor ``[B, in_features]``, a pair of CSR and dense columns, or a
        :class:`~rbm.nn.sparse_rows.SparseRows`, in float32 or float64. They are not converted to dense rows and give
        the same results.

        Raises:
            ValueError: the last dimension of ``h`` is not ``in_features``.
            TypeError: ``h`` and the parameters differ in dtype, outside autocast.
            RuntimeError: a training forward would move the memory inside a transformation of ``torch.func``.
        """
        is_dense = isinstance(h, Tensor) and h.layout is torch.strided and not h.is_nested
        derives = torch.is_grad_enabled() or forward_ad._current_level >= 0
        # A trace of TorchScript would contain the packed experts, whose format depends on the processor.
        if is_dense and not (self.training or return_routing or derives or torch._C._get_tracing_state()):
            if self.track_usage:
                self._count(self.route(h).experts)
            return self._answer(h)
        return self._forward(as_rows(h), return_routing)

    def expert_forward(self, h: Features, expert: int = 0) -> Tensor:
        """Apply one expert without routing, attention, scale or memory, as the paper pretrains (section 4.3)."""
        bias = None if self.bias is None else self.bias[expert]
        return linear(dropout(as_rows(h), self.dropout, self.training), self.weight[expert], bias)

    def clone_expert(self, expert: int = 0) -> None:
        """Copy the weight and bias of one expert to all experts; RuntimeError if they are parametrised or pruned."""
        check_stored(self, ("weight", "bias"), "clone_expert() writes")
        copy_expert(self.weight, self.bias, expert)

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"bias={self.bias is not None}, input_attention={self.attention is not None}, decay={self.decay}, "
            f"dropout={self.dropout}"
        )

    def network_layer(self) -> NetworkLayer | None:
        """The layer in the form that :func:`rbm_kernels.packed_network` takes; None with ``track_usage``."""
        if self.track_usage:
            return None
        weight, bias = self._fold(None)
        sizes = (self.out_features, self.in_features)
        return NetworkLayer(weight, bias, *sizes, self.memory, self.top_k, self.gate_temperature)

    @property
    def _dtype(self) -> torch.dtype:
        return self.weight.dtype

    def _combine(self, rows: Rows, gates: Tensor, experts: Tensor) -> Tensor:
        parameters = (self.weight, self.bias, self.attention, self.log_scale)
        return scaled_expert_matmul(rows, *parameters, gates, experts, self.dropout, self.training)

    def _answer(self, h: Tensor) -> Tensor:
        """The forward of inference. One row may take only microseconds, so nothing is looked up or reshaped twice."""
        dtype = autocast_dtype(h, self.weight.dtype) if torch._C._is_any_autocast_enabled() else None
        if torch.compiler.is_compiling():
            return self._answer_by(h, dtype, *self._fold(dtype))
        folded = self._copy
        if folded is None or not folded.is_valid_for(self._parameters, dtype):
            folded, keep = FoldedExperts.of(self, dtype)
            self._copy = folded if keep else None
        if not folded.is_packed:
            return self._answer_by(h, dtype, folded.weight, folded.bias)
        rows = h if h.dim() == 2 else self._rows(h)
        try:
            y = routed_matmul_packed(
                rows, self._buffers["memory"], folded.weight, self.out_features, self.top_k, self.gate_temperature
            )
        except (RuntimeError, TypeError, ValueError, KeyError):
            # What packed experts do not serve: a memory in float64, a memory that is not a buffer but parametrised or a
            # parameter. Bad input is refused there.
            return self._answer_by(h, dtype, *self._fold(dtype))
        return y if rows is h else y.reshape(*h.shape[:-1], self.out_features)

    def _answer_by(self, h: Tensor, dtype: torch.dtype | None, weight: Tensor, bias: Tensor | None) -> Tensor:
        memory, temperature = self.memory, self.gate_temperature
        served = h.dim() == 2 and h.shape[1] == self.in_features and (dtype is not None or h.dtype == weight.dtype)
        rows = h if served else self._rows(h)
        if dtype is None or rows.dtype == dtype:
            y = routed_matmul(rows, memory, weight, bias, self.top_k, temperature=temperature)
        else:
            # The router sees the row in its own precision, the experts see it in that of autocast.
            gates, experts, _ = cosine_topk(rows, memory, self.top_k, temperature=temperature)
            y = expert_matmul(rows.to(dtype), weight, bias, gates, experts)
        return y if rows is h else y.reshape(*h.shape[:-1], self.out_features)

    def _fold(self, dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
        return fold(self.weight, self.bias, self.attention, self.log_scale, dtype)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args, **kwargs) -> None:
        scale = state_dict.get(f"{prefix}log_scale")
        if scale is not None and scale.dim() == 0:  # saved by an earlier version
            state_dict[f"{prefix}log_scale"] = scale.reshape(1)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
