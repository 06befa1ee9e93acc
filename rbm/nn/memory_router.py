"""Routing by memory: the base class of layers that send each row to the experts with the closest memory vectors.

:class:`MemoryRouter` stores the memory vectors, routes rows by them, updates them from the rows, and counts the rows
that each expert received. A layer derives from it and adds its experts.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rbm.nn.conversion import mend_buffers
from rbm.nn.repeated_forward import first_forward, is_recomputing
from rbm.nn.sparse_rows import Features, Rows, SparseRows, as_rows, cosine_topk, memory_statistics
from rbm.nn.stored_tensors import check_num_experts, is_stored
from rbm.utils.arguments import (
    check_device_and_dtype,
    check_divisor,
    check_flags,
    check_number,
    check_probability,
    check_sizes,
    check_top_k,
)
from rbm.utils.distributed import world_size
from rbm.utils.precision import autocast_dtype
from rbm.utils.transforms import is_transformed
from rbm_kernels import memory_update_
from rbm_kernels._library import is_exporting
from rbm_kernels.ops.memory_update import reference


class Routing(NamedTuple):
    """Gates, experts and cosines of a layer's rows, each ``[..., k]``. Gates and cosines pass gradients to the rows.

    Experts are int32, as the operators take them; ``torch.gather`` and ``one_hot`` need ``experts.long()``.
    """

    gates: Tensor
    experts: Tensor
    cosines: Tensor


class MemoryRouter(nn.Module):
    """Base class with memory vectors ``[E, in_features]``, routing by them (paper, Eq. 3) and their update (Eq. 4).

    Args:
        in_features: size of a row.
        out_features: size of an output row.
        num_experts: ``E``.
        top_k: experts a row uses, at most ``num_experts``.
        dropout: probability in [0, 1); the derived layer applies it.
        decay: share of the old memory in each update, in [0, 1]. The attribute may be changed during training.
        gate_temperature: divides the cosines before the softmax.
        detach_gates: stop gradients of the output from reaching the row through the gates.
        normalize_memory: normalise the old memory to unit length before averaging.
        normalize_memory_input: normalise rows to unit length before averaging.
        device: of the memory.
        dtype: of the layer's parameters. The memory is float64 for float64 and float32 for every other dtype, because
            a bfloat16 average with a decay near one stops moving.

    Attributes:
        memory: buffer ``[E, in_features]``.
        track_memory: whether training forwards move the memory; set it to False for passes that should not.
        track_usage: whether forwards count in ``usage``, in training and in eval mode; off by default.
        usage: int64 ``[E]``, how many rows each expert has received since :meth:`reset_usage`, in this process. It is
            not part of the ``state_dict``. DDP copies the counts of the first rank to all ranks, like every buffer.

    Raises:
        ValueError: ``top_k > num_experts``, a number is out of range, or the device is not available.
        TypeError: an argument has the wrong type, such as 3.0 for an integer, or ``dtype`` is not floating-point.
    """

    track_memory: bool = True
    track_usage: bool = False
    _accumulates: bool = False
    expert_names: tuple[str, ...] = ()  # of the parameters with one slice per expert

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_experts: int,
        top_k: int,
        *,
        dropout: float,
        decay: float,
        gate_temperature: float,
        detach_gates: bool,
        normalize_memory: bool,
        normalize_memory_input: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.num_experts = check_sizes(
            in_features=in_features, out_features=out_features, num_experts=num_experts
        )
        self.top_k = check_top_k(top_k, self.num_experts)
        self.dropout = check_probability("dropout", dropout)
        self.decay = check_number("decay", decay, lambda share: 0.0 <= share <= 1.0, "between 0 and 1")
        check_flags(
            detach_gates=detach_gates,
            normalize_memory=normalize_memory,
            normalize_memory_input=normalize_memory_input,
        )
        check_device_and_dtype(device, dtype)
        self.detach_gates = detach_gates
        self.normalize_memory, self.normalize_memory_input = normalize_memory, normalize_memory_input

        memory_dtype = torch.float64 if (dtype or torch.get_default_dtype()) == torch.float64 else torch.float32
        self.gate_temperature = check_divisor("gate_temperature", gate_temperature, memory_dtype)
        memory = torch.empty(num_experts, in_features, device=device, dtype=memory_dtype)
        self.register_buffer("memory", memory)
        # Statistics of training forwards that are not yet applied to the memory. A total of zero means none.
        self.register_buffer("pending_sum", torch.zeros_like(memory), persistent=False)
        self.register_buffer("pending_total", torch.zeros_like(memory[:, 0]), persistent=False)
        self.register_buffer("usage", torch.zeros_like(memory[:, 0], dtype=torch.int64), persistent=False)
        self.register_state_dict_pre_hook(_follow_before_saving)

    def expert_parameters(self) -> list[nn.Parameter]:
        """The parameters with one slice per expert, ``[E, ...]`` each, without those that the layer does not have."""
        return [tensor for name in self.expert_names if (tensor := getattr(self, name)) is not None]

    def route(self, h: Features) -> Routing:
        """Route the rows ``[..., in_features]`` by the present memory, without recording or counting them."""
        h = as_rows(h)
        return self._shaped(self._nearest(self._rows(h)), h)

    @torch.no_grad()
    def update_memory(self) -> None:
        """Apply the statistics that the last training forward recorded to the memory (Eq. 4), if there are any."""
        if not torch.compiler.is_compiling() and self.memory.is_inference() and not torch.is_inference_mode_enabled():
            with torch.inference_mode():  # elsewhere its tensors cannot be written to
                self.update_memory()
            return
        self._follow(self.pending_total)
        self.pending_total.zero_()
        if self._accumulates:
            self.pending_sum.zero_()

    def _follow(self, total: Tensor) -> None:
        check_num_experts(self)
        if torch.compiler.is_compiling():
            # The operator's decay would be a constant of the graph, and each of its values would compile another one.
            reference.memory_update_(self.memory, self.pending_sum, total, self.decay, normalize=self.normalize_memory)
            return
        memory_update_(self.memory, self.pending_sum, total, self.decay, normalize=self.normalize_memory)

    @contextmanager
    def accumulate_memory(self) -> Iterator[None]:
        """Treat all training forwards inside the block as one batch, for use with gradient accumulation.

        The memory does not move inside the block, so each micro-batch is routed as the whole batch would be. The
        recorded statistics are added up: both sums of the batch softmax (Eq. 4) run over the rows of all micro-batches,
        which gives the result of one forward over all rows. It is applied at the next training forward, as usual.
        ``eval()``, ``state_dict()`` and :meth:`update_memory` inside the block end the batch at that point.
        """
        if self._accumulates:
            yield
            return
        self.update_memory()
        self.pending_sum.zero_()
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    def reset_usage(self) -> None:
        """Set the counts of rows per expert to zero."""
        self.usage.zero_()

    def __setattr__(self, name: str, value: Any) -> None:
        # In eval mode too: an average of models, for example, copies the buffers of a model that trains.
        if name == "training" and not value:  # by eval(), train(False), or an assignment
            self.update_memory()
        super().__setattr__(name, value)

    def check_memory_is_stored(self, action: str, otherwise: str = "") -> None:
        """RuntimeError if the memory is parametrised: what is written into it in place would be lost.

        Args:
            action: what writes into it, with its verb.
            otherwise: another way out than to parametrise another tensor.
        """
        if not is_stored(self, "memory"):
            raise RuntimeError(
                f"memory is parametrised, expected a buffer, which {action} in place: {otherwise}parametrise another"
                " tensor"
            )

    def _reset_memory(self) -> None:
        """Draw memory vectors of unit length and random direction; clear the recorded statistics and the counts."""
        self.check_memory_is_stored("reset_parameters() writes")
        if self.memory.is_meta:  # it has no numbers, and a norm of it would import PyTorch's compiler
            return
        with torch.no_grad():
            self.memory.copy_(F.normalize(torch.randn_like(self.memory), dim=-1))
            for buffer in (self.pending_sum, self.pending_total, self.usage):
                buffer.zero_()

    def _rows(self, h: Rows) -> Rows:
        """The input of a forward as rows ``[B, in_features]``; ValueError or TypeError if it does not fit."""
        if len(h.shape) == 0 or h.shape[-1] != self.in_features:
            raise ValueError(
                f"input has shape {list(h.shape)}, expected [..., {self.in_features}] (in_features of the layer)"
            )
        dtype, is_sparse = self._dtype, isinstance(h, SparseRows)
        if h.dtype != dtype and (is_sparse or autocast_dtype(h, dtype) is None):
            raise TypeError(
                f"{'sparse rows have' if is_sparse else 'input has'} dtype {h.dtype}, expected {dtype}, that of the"
                f" parameters; use .to({dtype}) on either"
            )
        return h if is_sparse else h.reshape(-1, self.in_features)

    @property
    def _dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        raise NotImplementedError

    def _nearest(self, rows: Rows) -> Routing:
        return Routing(*cosine_topk(rows, self.memory.detach(), self.top_k, temperature=self.gate_temperature))

    def _route(self, rows: Rows) -> Routing:
        """Route the rows ``[B, in_features]`` of a forward: record them in training, count them with track_usage."""
        recomputing = is_recomputing()
        records = self.training and self.track_memory and not recomputing
        first = first_forward(self.memory) if records or self.track_usage else None
        if records:
            _refuse_transformations("the memory moves", "track_memory = False on the layer, or call eval(),")
            self.check_memory_is_stored("training forwards move", "set track_memory = False on the layer, or ")
            if first is None and not self._accumulates:
                self.update_memory()
            elif not self._accumulates:
                # The record stays until a new one replaces it, because a repeated forward records nothing.
                with torch.no_grad():
                    self._follow(torch.where(first, self.pending_total, 0))
        routing = self._nearest(rows)
        if records:
            self._record(rows, routing.gates, routing.experts, first)
        if self.track_usage and not recomputing:
            self._count(routing.experts, first)
        return routing

    def _forward(self, h: Rows, return_routing: bool) -> Tensor | tuple[Tensor, Routing]:
        """Route the rows ``[..., in_features]``, call :meth:`_combine`, and restore the leading dimensions."""
        rows = self._rows(h)
        routing = self._route(rows)
        y = self._combine(rows, routing.gates.detach() if self.detach_gates else routing.gates, routing.experts)
        if len(h.shape) != 2:  # FSDP2 warns about views
            y = y.reshape(*h.shape[:-1], self.out_features)
        return (y, self._shaped(routing, h)) if return_routing else y

    def _combine(self, rows: Rows, gates: Tensor, experts: Tensor) -> Tensor:
        """Output ``[B, out_features]`` of the experts for rows ``[B, in_features]`` with gates ``[B, k]``."""
        raise NotImplementedError

    def _shaped(self, routing: Routing, h: Rows) -> Routing:
        """A routing ``[B, k]`` with the leading dimensions of ``h``."""
        return Routing(*(part.reshape(*h.shape[:-1], self.top_k) for part in routing))

    @torch.no_grad()
    def _record(self, rows: Rows, gates: Tensor, experts: Tensor, first: Tensor | None = None) -> None:
        weighted_sum, total = memory_statistics(
            rows, gates, experts, self.num_experts, normalize=self.normalize_memory_input
        )
        if world_size() > 1:
            torch.distributed.all_reduce(weighted_sum)
            torch.distributed.all_reduce(total)
        for pending, batch_sum in ((self.pending_sum, weighted_sum), (self.pending_total, total)):
            if first is not None:
                batch_sum = torch.where(first, batch_sum, 0 if self._accumulates else pending)
            (pending.add_ if self._accumulates else pending.copy_)(batch_sum)

    @torch.no_grad()
    def _count(self, experts: Tensor, first: Tensor | None = None) -> None:
        if is_exporting():
            return
        _refuse_transformations("the experts' rows are counted", "track_usage = False on the layer")
        experts = experts.flatten()
        # Unlike bincount, this does not synchronise with the host; unlike one-hot, it needs no tensor [B, E].
        ones = torch.ones_like(experts, dtype=torch.int64)
        self.usage.index_add_(0, experts, ones if first is None else ones * first)

    def __prepare_scriptable__(self) -> "MemoryRouter":
        # torch.jit.script calls this first. Its own error is about the syntax of forward.
        raise RuntimeError(
            f"torch.jit.script does not support {type(self).__name__}: use torch.export.export, or torch.jit.trace in"
            " eval mode"
        )

    def __getstate__(self) -> dict:
        # A copy made inside accumulate_memory() would stay in this state for ever.
        return {**super().__getstate__(), "_accumulates": False}

    def _apply(self, fn, recurse: bool = True) -> "MemoryRouter":
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        mend_buffers(self, before)
        return self

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args, **kwargs) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        wide = torch.float64 if self._dtype == torch.float64 else torch.float32
        if self.memory.dtype != wide:  # assign=True, from a state_dict in another precision
            self.memory = self.memory.to(wide)
        # The recorded statistics belong to a memory that has been replaced; strict=False may leave it as it is. Clear
        # them in place if possible: a new tensor made under torch.inference_mode() could not be written to in training.
        writable = torch.is_inference_mode_enabled() or not self.pending_sum.is_inference()
        if writable and (self.pending_sum.device, self.pending_sum.dtype) == (self.memory.device, self.memory.dtype):
            if f"{prefix}memory" in state_dict:
                self.pending_sum.zero_()
                self.pending_total.zero_()
        else:
            self.pending_sum = torch.zeros_like(self.memory)
            self.pending_total = torch.zeros_like(self.memory[:, 0])
        if not writable or self.usage.device != self.memory.device:  # memory was assigned to a layer on "meta"
            self.usage = torch.zeros_like(self.memory[:, 0], dtype=torch.int64)


def routed_layers(model: nn.Module) -> dict[str, MemoryRouter]:
    """The layers of a model that route by memory, each once, by their name in ``named_modules``.

    The names are those before ``torch.compile``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: the model has no such layer.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected a torch.nn.Module")
    layers = {
        ".".join(part for part in name.split(".") if part != "_orig_mod"): module
        for name, module in model.named_modules()
        if isinstance(module, MemoryRouter)
    }
    if not layers:
        raise ValueError(
            f"model is a {type(model).__name__} without a layer that routes by memory, expected one with"
            " rbm.FusedRbMLayer or rbm.RbMFeedForward in it"
        )
    return layers


@contextmanager
def accumulate_memory(model: nn.Module) -> Iterator[None]:
    """Apply :meth:`MemoryRouter.accumulate_memory` to every layer of a model that routes by memory.

    ::

        with rbm.accumulate_memory(model):
            for x, labels in micro_batches:
                (F.cross_entropy(model(x), labels) * len(x) / batch_size).backward()
        optimizer.step()

    Raises:
        ValueError: the model has no such layer.
    """
    with ExitStack() as stack:
        for layer in routed_layers(model).values():
            stack.enter_context(layer.accumulate_memory())
        yield


@torch.no_grad()
def draw_experts(weight: Tensor, bias: Tensor | None) -> None:
    """Draw the experts' weights ``[E, N, D]`` and biases ``[E, N]`` in place, as :class:`torch.nn.Linear` does."""
    bound = 1 / math.sqrt(weight.shape[2])
    weight.uniform_(-bound, bound)
    if bias is not None:
        bias.uniform_(-bound, bound)


@torch.no_grad()
def copy_expert(weight: Tensor, bias: Tensor | None, expert: int) -> None:
    """Copy the weight and bias of one expert to all experts, in place: ``[E, N, D]`` and ``[E, N]``."""
    for parameter in (weight, bias):
        if parameter is not None:
            parameter.copy_(parameter[expert].clone().expand_as(parameter))


def _follow_before_saving(layer: MemoryRouter, prefix: str, keep_vars: bool) -> None:
    layer.update_memory()


def _refuse_transformations(what: str, remedy: str) -> None:
    if is_transformed():
        raise RuntimeError(
            f"{what} in place in a forward, which no transformation of torch.func (grad, jvp, vmap, ...) follows: set"
            f" {remedy} before the transformation"
        )
