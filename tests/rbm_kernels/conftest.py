"""Triton kernels without a GPU: they run in Triton's interpreter (tests/conftest.py turns it on), on CPU tensors."""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run in this session: on the GPU, or on the CPU under the interpreter."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        _mend_bfloat16()
        return "cpu"
    return "cuda"


@pytest.fixture
def poisoned_empty(monkeypatch) -> None:
    """``torch.empty`` and ``empty_like`` return NaN, or a huge negative integer: an element left unwritten shows."""

    def poison(allocate):
        def allocate_poisoned(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else -(2**30))

        return allocate_poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))


def _mend_bfloat16() -> None:
    """The interpreter keeps bfloat16 in 16-bit integers; ``tl.dot`` multiplies those, and casts cut, not round."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl
    if getattr(multiply, "knows_bfloat16", False):
        return

    def widened(handle: TensorHandle) -> TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, *args):
        return multiply(self, widened(a), widened(b), *args)

    def cast_impl(self, src, dst_type):
        if src.dtype.scalar == tl.bfloat16 and dst_type.scalar == tl.float32:
            return widened(src)
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(src.data)).to(torch.bfloat16)
            return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
        return cast(self, src, dst_type)

    create_dot.knows_bfloat16 = True
    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl
