"""Simulates two devices with CPU tensors, to find a GPU's errors in a rehearsal.

A tensor that was created on the device ``cpu:0`` (the name of :class:`benchmarks.measure.device.Rehearsal`), or moved
to it, represents a GPU tensor. All others are host tensors. :class:`TwoDevices` watches every call of PyTorch and
raises if GPU and host tensors are mixed, as CUDA would. ``.cpu()`` and ``.to(...)`` copy, and ``.device`` distinguishes
the two. Nothing is watched inside a call of PyTorch, such as an operator or a backward pass.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves

GPU, HOST = torch.device("cpu:0"), torch.device("cpu")
# Number of recorded storages from which freed ones are removed.
PURGE_AT = 10_000
# Functions that accept tensors of both devices: copies, indexing with host indices, and those that only query or bind.
_MAY_MIX = {
    *("copy_", "set_", "__getitem__", "__setitem__", "__set__", "__get__", "is_set_to"),
    *("_has_compatible_shallow_copy_type", "to", "cpu"),
}
# Methods that GPU tensors do not support, because the host cannot read them.
_HOST_ALONE = ("numpy", "__array__")
_MOVES = ("to", "cpu")
_DEVICE_OF = Tensor.device.__get__


class TwoDevices(TorchFunctionMode):
    """Keeps GPU and host tensors apart while it is active.

    Raises:
        RuntimeError: a call got a GPU tensor together with a host tensor that has dimensions.
        TypeError: NumPy got a GPU tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        # By storage address. A weak reference prevents the address from being reused as long as it is held.
        self._on_gpu: dict[int, StorageWeakRef] = {}
        self._purge_at = PURGE_AT

    def is_on_gpu(self, tensor: Tensor) -> bool:
        """Whether a tensor represents a GPU tensor."""
        return any(storage._cdata in self._on_gpu for storage in _storages(tensor))

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Check the arguments of a call, make the call, and record where its results are."""
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if function == _DEVICE_OF:
            return GPU if self.is_on_gpu(args[0]) else function(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_gpu = [self.is_on_gpu(tensor) for tensor in given]
        if any(on_gpu):
            self._refuse(name, given, on_gpu)
        result = function(*args, **kwargs)
        target = _device_in(args, kwargs)
        if name in _MOVES and given:
            return self._moved(name, result, given, on_gpu, target)
        if name == "__get__" or (name.endswith("_") and given):  # a view, or changed in place
            to_gpu = on_gpu[:1] == [True]
        else:
            to_gpu = target == GPU if target is not None else any(on_gpu)
        self.note(result, to_gpu=to_gpu)
        return result

    def note(self, result: Any, *, to_gpu: bool) -> None:
        """Record the device of all tensors in a result."""
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                for storage in _storages(leaf):
                    if to_gpu:
                        self._on_gpu.setdefault(storage._cdata, StorageWeakRef(storage))
        if len(self._on_gpu) > self._purge_at:
            self._on_gpu = {address: held for address, held in self._on_gpu.items() if not held.expired()}
            self._purge_at = max(PURGE_AT, 2 * len(self._on_gpu))

    def unwatched(self, function: Callable) -> Callable:
        """Wrap a function to run it unwatched and record its results: for code of PyTorch's compiler."""

        def run(*args: Any, **kwargs: Any) -> Any:
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            on_gpu = [self.is_on_gpu(tensor) for tensor in given]
            if any(on_gpu):
                self._refuse(getattr(function, "__name__", "a compiled function"), given, on_gpu)
            with _pop_mode_temporarily():
                result = function(*args, **kwargs)
            self.note(result, to_gpu=any(on_gpu))
            return result

        return run

    def _refuse(self, name: str, given: list[Tensor], on_gpu: list[bool]) -> None:
        if name in _HOST_ALONE:
            raise TypeError("can't convert a tensor of the rehearsed GPU to numpy: copy it with .cpu() first")
        if name in _MAY_MIX or all(on_gpu):
            return
        if any(tensor.dim() > 0 for tensor, there in zip(given, on_gpu, strict=True) if not there):
            about = [f"{'GPU' if there else 'host'} {tuple(t.shape)}" for t, there in zip(given, on_gpu, strict=True)]
            raise RuntimeError(f"{name}: tensors of two devices meet, as CUDA does not allow: {', '.join(about)}")

    def _moved(self, name: str, result: Any, given: list[Tensor], on_gpu: list[bool], target: Any) -> Any:
        if name == "cpu":
            to_gpu = False
        elif target is not None:
            to_gpu = target == GPU
        else:  # .to(dtype) keeps the device; .to(other) uses the device of the other tensor
            to_gpu = on_gpu[-1]
        if to_gpu != on_gpu[0] and any(s._cdata in _addresses(given[0]) for s in _storages(result)):
            result = result.clone()  # like a copy to another device
        self.note(result, to_gpu=to_gpu)
        return result


@contextmanager
def two_devices() -> Iterator[TwoDevices]:
    """Keep devices apart, also for compiled functions.

    ``torch.compile`` traces completely but generates no machine code, which would differ between CPU and GPU.
    """
    watch, compile_ = TwoDevices(), torch.compile

    def compiled(model: Any = None, **options: Any) -> Any:
        found = compile_(model, **{**options, "backend": "eager"})
        if isinstance(found, torch.nn.Module):
            found.forward = watch.unwatched(found.forward)
            return found
        return watch.unwatched(found)

    torch.compile = compiled
    try:
        with watch:
            yield watch
    finally:
        torch.compile = compile_


def _device_in(args: tuple, kwargs: dict) -> torch.device | None:
    """The device named in a call."""
    named = kwargs.get("device")
    if named is None:
        named = next(
            (a for a in args if isinstance(a, torch.device) or (isinstance(a, str) and a in ("cpu:0", "cpu"))), None
        )
    return None if named is None else torch.device(named)


def _addresses(tensor: Tensor) -> set[int]:
    return {storage._cdata for storage in _storages(tensor)}


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    with torch._C.DisableTorchFunction():
        if tensor.layout == torch.sparse_csr:
            parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
        elif tensor.layout == torch.sparse_coo:
            parts = (tensor._indices(), tensor._values())
        else:
            parts = (tensor,)
        return [part.untyped_storage() for part in parts if part.device.type == "cpu"]
