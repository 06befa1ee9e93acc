"""Copies of weights for inference that last until a parameter changes: folded, or packed for the processor.

Folded experts contain the layer's attention and scale. On a CPU, the copy is packed for
:func:`rbm_kernels.routed_matmul_packed`. Packing at each call would take longer than the product of a few rows, and
products with unpacked weights take up to twice as long.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from rbm_kernels import fold_experts, pack_experts
from rbm_kernels.ops.fold_experts import reference

PACKED_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_NAMES = ("weight", "bias", "attention", "log_scale")
# Steps of any optimizer since the first experts were kept. Fused optimizers change parameters without counting
# versions.
_steps = -1
_optimizer_steps = 0


def fold(
    weight: Tensor, bias: Tensor | None, attention: Tensor | None, log_scale: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None]:
    """:func:`rbm_kernels.fold_experts`; the same by PyTorch's operators where they serve better.

    On a GPU, PyTorch's operators take two dozen launches, forward and backward. A compiler fuses them itself, a CPU has
    no launches, and a subclass of Tensor, such as a distributed one, may not know the operator.
    """
    if weight.is_cuda and type(weight) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling():
        return fold_experts(weight, bias, attention, log_scale, dtype=dtype)
    return reference.fold_experts(weight, bias, attention, log_scale, dtype)


class Sources(NamedTuple):
    """The parameters that a copy is made from, and their versions. Take them before the values: if another thread
    writes in between, the copy is recognised as outdated.
    """

    steps: int
    parameters: tuple[tuple[str, Tensor | None, int, int, Tensor | None], ...]

    @classmethod
    def of(cls, layer: nn.Module, parameters: Mapping[str, Tensor | None]) -> "Sources | None":
        """Of attributes of a layer, by name; None if the copy must not be kept.

        This is so if a change could not be detected (see :func:`is_watched`; reparametrised parameters are not in the
        layer's dictionary, and distributed ones are not plain tensors), and while a CUDA graph is captured, when the
        values are not computed yet.
        """
        now, found = steps(), []
        if _capturing():
            return None
        for name, parameter in parameters.items():
            if layer._parameters.get(name) is not parameter or not (parameter is None or is_watched(parameter)):
                return None
            if parameter is None:
                found.append((name, None, 0, 0, None))
            else:
                # The alias keeps the memory alive, so that no other tensor can get the same address.
                found.append((name, parameter, parameter._version, parameter.data_ptr(), parameter.detach()))
        return cls(now, tuple(found))

    def are_still(self, parameters: Mapping[str, Tensor | None]) -> bool:
        """Whether these are the parameters, unchanged. Runs at each call, so it must be fast."""
        if _steps != self.steps:
            return False
        for name, source, version, address, _ in self.parameters:
            if parameters.get(name) is not source:
                return False
            if source is not None and (source._version != version or source.data_ptr() != address):
                return False
        return True


class FoldedExperts(NamedTuple):
    """Folded experts, packed or not, and the parameters that they were made from."""

    weight: Tensor
    bias: Tensor | None
    is_packed: bool  # whether ``weight`` is the result of pack_experts, which includes the bias
    dtype: torch.dtype | None
    sources: Sources | None

    @classmethod
    def of(cls, layer: nn.Module, dtype: torch.dtype | None) -> tuple["FoldedExperts", bool]:
        """Fold the experts of ``layer``, and return whether the result may be kept."""
        parameters = {name: getattr(layer, name) for name in _NAMES}
        sources = Sources.of(layer, parameters)
        weight, bias = fold(*parameters.values(), dtype)
        keep = sources is not None and type(weight) is Tensor
        # Do not pack experts that are used once, nor under autocast, where rows may have another precision.
        is_packed = keep and dtype is None and weight.device.type == "cpu" and weight.dtype in PACKED_DTYPES
        if is_packed:
            weight, bias = pack_experts(weight, bias), None
        return cls(weight, bias, is_packed, dtype, sources), keep

    def is_valid_for(self, parameters: Mapping[str, Tensor | None], dtype: torch.dtype | None) -> bool:
        """Whether these experts were made from these parameters, unchanged. Runs at each call, so it must be fast."""
        return dtype is self.dtype and self.sources.are_still(parameters)


class KeepsCopy(nn.Module):
    """A layer that keeps a copy of its weights for inference, and drops it with what replaces the weights."""

    _copy: Any = None

    def train(self, mode: bool = True) -> "KeepsCopy":
        """Like :meth:`torch.nn.Module.train`; in both modes, the copy of the weights is dropped."""
        self._copy = None
        if not torch.compiler.is_compiling():  # a graph that counts would be compiled anew for each number
            forget()  # the copy in a student that contains this layer
        return super().train(mode)

    def __getstate__(self) -> dict:
        # A copy of the layer has its own parameters: their version counters start again.
        return {**super().__getstate__(), "_copy": None}

    def _apply(self, fn, recurse: bool = True) -> "KeepsCopy":
        self._copy = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._copy = None


def steps() -> int:
    """Number of steps of any optimizer, and of calls of :func:`forget`, since the first call."""
    global _steps
    if _steps < 0:
        _steps = 0
        register_optimizer_step_post_hook(_count)
    return _steps


def optimizer_steps() -> int:
    """Number of steps of any optimizer alone, since the first call of :func:`steps` or this function."""
    steps()
    return _optimizer_steps


def forget() -> None:
    """Invalidate all folded and packed weights, so that they are computed again."""
    global _steps
    if _steps >= 0:
        _steps += 1


def _count(*_) -> None:
    global _optimizer_steps
    _optimizer_steps += 1
    forget()


def is_watched(parameter: Tensor) -> bool:
    """Whether every change increments the version of a parameter. This is not so for tensors of inference mode, for
    memory shared with other processes, for parts of a larger tensor, which ``vector_to_parameters`` assigns and which
    change with the whole, and for wrappers of ``torch.func``, which exist for one call only.
    """
    if type(parameter) not in (Tensor, nn.Parameter) or torch._C._functorch.is_functorch_wrapped_tensor(parameter):
        return False
    if parameter.untyped_storage().nbytes() > parameter.nbytes:
        return False
    return not parameter.is_inference() and (parameter.device.type != "cpu" or not parameter.is_shared())


def _capturing() -> bool:
    """Whether a CUDA graph is being captured, so that kernels do not run yet."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
