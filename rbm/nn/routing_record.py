"""Records the routing of all layers in any model, however deeply nested.

>>> import torch, rbm
>>> model = torch.nn.Sequential(torch.nn.Linear(4, 6), rbm.FusedRbMLayer(6, 3, num_experts=4, top_k=2))
>>> with rbm.record_routing(model) as routing:
...     y = model(torch.randn(5, 4))
>>> routing["1"].experts.shape
torch.Size([5, 2])
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from rbm.nn.evaluation import evaluating
from rbm.nn.memory_router import MemoryRouter, Routing, routed_layers
from rbm.nn.repeated_forward import is_recomputing
from rbm.nn.sparse_rows import Rows, as_rows

# Active records, the innermost last.
_open: list["RoutingRecord"] = []
# Blocks that run eagerly at present, and what restores the mode of before.
_eager_blocks = 0
_eager_mode: AbstractContextManager | None = None
_eager_lock = threading.Lock()


class RoutingRecord(Mapping[str, Routing]):
    """Result of :func:`record_routing`: a mapping from the name of each layer that was called to its :class:`Routing`.

    For a layer that was called once, the tensors have the leading dimensions of its input, ``[..., k]``. For a layer
    that was called several times, they contain the rows of all calls in order, ``[rows, k]``.

    Attributes:
        layers: every layer of the model that routes by memory, by name, whether it was called or not.
        calls: the routings of each layer that was called, one per call.
    """

    def __init__(self, layers: Mapping[str, MemoryRouter]) -> None:
        self.layers = dict(layers)
        self.calls: dict[str, list[Routing]] = {}

    def __getitem__(self, name: str) -> Routing:
        calls = self.calls[name]
        if len(calls) == 1:
            return calls[0]
        return Routing(*(torch.cat([part.flatten(0, -2) for part in parts]) for parts in zip(*calls, strict=True)))

    def __iter__(self) -> Iterator[str]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __repr__(self) -> str:
        rows = {name: sum(call.experts[..., 0].numel() for call in calls) for name, calls in self.calls.items()}
        return f"RoutingRecord({', '.join(f'{name!r}: {count} rows' for name, count in rows.items())})"


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingRecord]:
    """Record the routing of every layer of a model inside the block, in training and in eval mode.

    Layers are found at any depth, also under ``torch.compile`` or DDP. The outputs of the model do not change. The
    routing is that of the rows that a layer is called with, also if a subclass changes them in its ``forward``. Gates
    and cosines keep their gradients and thus the graph of the forward, so leave the block after each training step, or
    record under ``torch.no_grad()``. A forward that activation checkpointing repeats is recorded once, but without
    gradients for ``use_reentrant=True``. Compiled models run eagerly inside the block and need no recompilation after
    it; if what a checkpoint calls is compiled, call ``backward()`` in the block too. There is no overhead outside the
    block.

    Args:
        model: a layer that routes by memory, or any module that contains such layers.

    Yields:
        A mapping from layer names to routings, which is filled by the calls.

    Raises:
        ValueError: the model has no such layer.
        RuntimeError: a layer is called inside a transformation of ``torch.func``, whose tensors are not valid outside;
            or the block begins inside a compiled function.
    """
    record = RoutingRecord(routed_layers(model))
    with ExitStack() as stack:
        stack.enter_context(_eagerly())
        for name, layer in record.layers.items():
            hook = layer.register_forward_hook(_Listener(record, name), with_kwargs=True)
            stack.callback(hook.remove)
        _open.append(record)
        try:
            yield record
        finally:
            _open[:] = [other for other in _open if other is not record]


def open_record(model: nn.Module) -> RoutingRecord:
    """The innermost active record that contains all layers of the model.

    Raises:
        ValueError: there is no such record.
    """
    layer_ids = {id(layer) for layer in routed_layers(model).values()}
    for record in reversed(_open):
        if layer_ids <= {id(layer) for layer in record.layers.values()}:
            return record
    raise ValueError(
        "routing of the model is not recorded: call the model and this function inside"
        " `with rbm.record_routing(model):`, or pass what that yields as routing="
    )


class _Listener:
    """A forward hook that does nothing in copied or unpickled models."""

    def __init__(self, record: RoutingRecord | None = None, name: str = "") -> None:
        self.record, self.name = record, name

    def __call__(self, layer: MemoryRouter, args: tuple, kwargs: dict, output: Any) -> None:
        if self.record is None:
            return
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                "routing is recorded inside a transformation of torch.func (grad, jvp, vmap, ...), whose tensors end"
                " with it: call the transformation outside of record_routing, or ask the layer by return_routing=True"
            )
        if is_recomputing():
            return
        # The memory has not moved since the forward, so the routing is the same.
        # A subclass or a hook may return any other tuple.
        if isinstance(output, tuple) and len(output) > 1 and isinstance(output[1], Routing):
            routing = output[1]
        else:
            # Activation checkpointing counts the tensors that a forward saves through its hooks, and its repetition
            # after the record has ended would save fewer.
            with saved_tensors_hooks(_with_version, _of_version):
                routing = layer.route(args[0] if args else kwargs["h"])
        self.record.calls.setdefault(self.name, []).append(routing)

    def __reduce__(self) -> tuple:
        return _Listener, ()


def _with_version(tensor: Tensor) -> tuple[Tensor, int]:
    # A result that refers to the node that made it would never be freed.
    return tensor.detach(), tensor._version


def _of_version(saved: tuple[Tensor, int]) -> Tensor:
    """The saved tensor, which PyTorch itself does not check if there are hooks."""
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor {list(tensor.shape)} that the recorded routing was computed from has been modified in place"
            " since, and the gradient needs its old values: modify a copy"
        )
    return tensor


@torch.no_grad()
def visit_router_inputs(model: nn.Module, inputs: Any, visit: Callable[[str, MemoryRouter, Rows], None]) -> None:
    """Run a model in eval mode, and call ``visit(name, layer, rows)`` before a layer routes its rows ``[B, D]``.

    Changes that ``visit`` makes to the layer affect its output and thus the rows of the layers after it. A layer that
    is called several times is visited only the first time.

    Args:
        model: any module that contains layers that route by memory.
        inputs: input of the model: one value, a tuple of positional arguments, or a mapping of keyword arguments. A
            pair of sparse and dense columns is one value (:mod:`rbm.nn.sparse_rows`).
        visit: called once per layer, in the order of the model's forward.

    Raises:
        ValueError: the model has no such layer, or its forward calls none of them.
    """
    layers, seen = routed_layers(model), set()

    def hook(name: str) -> Callable:
        def before(layer: MemoryRouter, args: tuple, kwargs: dict) -> None:
            if name not in seen:
                seen.add(name)
                visit(name, layer, layer._rows(as_rows(args[0] if args else kwargs["h"])))

        return before

    with ExitStack() as stack:
        stack.enter_context(_eagerly())
        for name, layer in layers.items():
            stack.callback(layer.register_forward_pre_hook(hook(name), with_kwargs=True).remove)
        stack.enter_context(evaluating(model))
        call(model, inputs)
    if not seen:
        raise ValueError(f"forward of the {type(model).__name__} calls none of its layers {', '.join(layers)}")


def call(model: nn.Module, inputs: Any) -> Any:
    """``model(inputs)``, with a tuple as positional and a mapping as keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) and not is_sparse_pair(inputs) else model(inputs)


def is_sparse_pair(inputs: Any) -> bool:
    """Whether a tuple is the pair of sparse and dense columns that students take as one value."""
    first = inputs[0] if isinstance(inputs, tuple | list) and len(inputs) == 2 else None
    return isinstance(first, Tensor) and first.layout == torch.sparse_csr


@contextmanager
def _eagerly() -> Iterator[None]:
    """Run eagerly inside the block, because compiled code ignores hooks that were added after compilation.

    The mode is that of the process, and blocks of several threads end in any order: the last one restores it.

    Raises:
        RuntimeError: inside a compiled function, where PyTorch cannot change to eager mode.
    """
    global _eager_blocks, _eager_mode
    if torch.compiler.is_compiling():
        _refuse_compilation()
    # If torch._dynamo is not imported, nothing was compiled; importing it takes a second.
    imported = "torch._dynamo" in sys.modules
    if imported and torch._C._dynamo.eval_frame.get_eval_frame_callback() not in (None, False):
        _refuse_compilation()
    with _eager_lock:
        _eager_blocks += 1
        if imported and _eager_mode is None:
            _eager_mode = torch.compiler.set_stance("force_eager")
    try:
        yield
    finally:
        with _eager_lock:
            _eager_blocks -= 1
            if _eager_blocks == 0 and _eager_mode is not None:
                _eager_mode.__exit__(None, None, None)
                _eager_mode = None


def _refuse_compilation() -> None:
    raise RuntimeError(
        "routing is read inside a compiled function, but layers must run eagerly for it: compile the model instead of"
        " the function that calls record_routing, or ask the layers by return_routing=True"
    )
