"""Tensors of two devices kept apart where all of them are on the CPU: a GPU's errors, in a rehearsal.

A tensor that was made with the device ``cpu:0``, the name of :class:`benchmarks.measure.device.Rehearsal`, or moved to
it, stands for a tensor of the GPU. All others stand for the host's. :class:`TwoDevices` watches every call of PyTorch
and raises where a GPU's tensor meets a host's, as CUDA would; ``.cpu()`` and ``.to(...)`` copy, and ``.device`` tells
the two apart. Inside one call of PyTorch, an operator or a backward pass, nothing is watched.
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
# Storages that are remembered before those that were freed are forgotten.
PURGE_AT = 10_000
# What may take tensors of both: copies, look-ups by indices of the host, and what only asks or binds.
_MAY_MIX = {
    *("copy_", "set_", "__getitem__", "__setitem__", "__set__", "__get__", "is_set_to"),
    *("_has_compatible_shallow_copy_type", "to", "cpu"),
}
# What a GPU's tensor refuses: the host cannot read it.
_HOST_ALONE = ("numpy", "__array__")
_MOVES = ("to", "cpu")
_DEVICE_OF = Tensor.device.__get__


class TwoDevices(TorchFunctionMode):
    """Keeps a GPU's tensors and the host's apart while it is entered.

    Raises:
        RuntimeError: a call was given a tensor of the GPU and one of the host that has dimensions.
        TypeError: NumPy was given a tensor of the GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        # By the address of a storage. A weak reference keeps the address from being used again while it is held.
        self._on_gpu: dict[int, StorageWeakRef] = {}
        self._purge_at = PURGE_AT

    def is_on_gpu(self, tensor: Tensor) -> bool:
        """Whether a tensor stands for one of the GPU."""
        return any(storage._cdata in self._on_gpu for storage in _storages(tensor))

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Check what a call is given, make it, and note where its results are."""
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
        if name == "__get__" or (name.endswith("_") and given):  # a view, or what was changed in place
            to_gpu = on_gpu[:1] == [True]
        else:
            to_gpu = target == GPU if target is not None else any(on_gpu)
        self.note(result, to_gpu=to_gpu)
        return result

    def note(self, result: Any, *, to_gpu: bool) -> None:
        """Note where all tensors of a result are."""
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                for storage in _storages(leaf):
                    if to_gpu:
                        self._on_gpu.setdefault(storage._cdata, StorageWeakRef(storage))
        if len(self._on_gpu) > self._purge_at:
            self._on_gpu = {address: held for address, held in self._on_gpu.items() if not held.expired()}
            self._purge_at = max(PURGE_AT, 2 * len(self._on_gpu))

    def unwatched(self, function: Callable) -> Callable:
        """A function that runs without the watch, its results noted: what PyTorch's compiler has made."""

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
        else:  # .to(dtype) stays; .to(other) goes where the other is
            to_gpu = on_gpu[-1]
        if to_gpu != on_gpu[0] and any(s._cdata in _addresses(given[0]) for s in _storages(result)):
            result = result.clone()  # as a copy to another device is
        self.note(result, to_gpu=to_gpu)
        return result


@contextmanager
def two_devices() -> Iterator[TwoDevices]:
    """Keep devices apart, compiled functions included.

    ``torch.compile`` traces in full but generates no machine code, which for the CPU would be another than the GPU's.
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
    """The device that a call names."""
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
