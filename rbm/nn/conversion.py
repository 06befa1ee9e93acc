"""What a router's buffers must be after ``to()``, ``half()``, ``to_empty()`` and other conversions of its module."""

import torch
from torch import Tensor, nn


def mend_buffers(layer: nn.Module, before: dict[str, Tensor]) -> None:
    """Mend the buffers of a layer after :meth:`torch.nn.Module._apply`, in place.

    Buffers in half precision become float32, and those that no ``state_dict`` contains are zero after ``to_empty()``. A
    buffer that requires a gradient, such as a trained memory, stays the same tensor, as parameters do.

    Args:
        layer: a layer after the conversion.
        before: its buffers before the conversion.
    """
    for name, buffer in layer._buffers.items():
        old = before[name]
        if buffer.dtype in (torch.float16, torch.bfloat16):
            layer._buffers[name] = old.to(buffer.device, torch.float32)
        # to_empty() leaves any bytes. No state_dict replaces these buffers, and the next forward would use them.
        if name in layer._non_persistent_buffers_set and old.is_meta and not buffer.is_meta:
            buffer.zero_()
        if old.requires_grad:
            layer._buffers[name] = _moved(old, layer._buffers[name].detach())


def _moved(leaf: Tensor, value: Tensor) -> Tensor:
    """The leaf with another value: the same tensor if possible, because an optimizer may hold it."""
    if not torch._has_compatible_shallow_copy_type(leaf, value):  # from or to the meta device
        return value.requires_grad_()
    leaf.data = value
    if leaf.grad is not None:
        leaf.grad.data = leaf.grad.to(value)
    return leaf
