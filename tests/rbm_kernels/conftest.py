"""Triton kernels without a GPU: they run in Triton's interpreter, on CPU tensors."""

import os

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    # Triton decides when a kernel is defined, that is when a kernels.py is first imported: this must come before.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run in this session: on the GPU, or on the CPU under the interpreter."""
    if INTERPRETED:
        _multiply_bfloat16_as_numbers()
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


def _multiply_bfloat16_as_numbers() -> None:
    """Mend the interpreter: it keeps bfloat16 in 16-bit integers, and ``tl.dot`` multiplies those."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply = InterpreterBuilder.create_dot
    if getattr(multiply, "knows_bfloat16", False):
        return

    def widened(handle: TensorHandle) -> TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, *args):
        return multiply(self, widened(a), widened(b), *args)

    create_dot.knows_bfloat16 = True
    InterpreterBuilder.create_dot = create_dot
