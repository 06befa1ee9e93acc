"""Tracks which bytes of PyTorch's tensors have been written: the bytes of a new ``torch.empty`` have not."""

import ctypes

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ptx_executor.build import core

_EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}


def extent(tensor: Tensor) -> tuple[int, int]:
    """Address of the first byte of a tensor's elements, and the address after the last."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


class WatchedMemory(TorchDispatchMode):
    """While active, records which tensors were created uninitialised and which operators of PyTorch wrote to them.

    The tensors are kept alive as long as this object, so that their memory is not reused for another tensor.
    """

    def __init__(self):
        super().__init__()
        self.memory = core().GlobalMemory()
        self._kept: list[Tensor] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function._schema.name.removeprefix("aten::") in _EMPTY:
            self._kept.append(result)
            begin, end = extent(result)
            # Unwritten elements are then visible in the result too: NaN, or -1.
            ctypes.memset(begin, 0xFF, end - begin)
            self.memory.mark_unwritten(begin, end - begin)
            return result
        given = {
            **dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)),
            **(kwargs or {}),
        }
        for argument in function._schema.arguments:
            value = given.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                begin, end = extent(value)
                self.memory.mark_written(begin, end - begin)
        return result

    def pass_to_kernel(self, tensors: dict[str, Tensor]) -> None:
        """Start a launch, which may access only these tensors."""
        regions = []
        for name, tensor in tensors.items():
            if tensor.device != torch.device("cpu"):
                raise ValueError(
                    f"{name} is on {tensor.device}, expected a CPU tensor: kernels are executed on the CPU"
                )
            begin, end = extent(tensor)
            regions.append((begin, end, f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"))
        self.memory.begin_launch(regions)
