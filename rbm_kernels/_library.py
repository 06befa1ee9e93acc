"""The one operator library of this package: everything registered here is reached as ``torch.ops.rbm.<name>``.

Schemas, fake (meta) implementations and autograd are written in Python, in each operator's ``op.py``. Implementations
are bound to dispatch keys: the eager reference to ``CompositeExplicitAutograd``, so that every device is served; the
libraries of ``csrc/`` to ``CPU`` and ``CUDA``, and the Triton kernels to ``CUDA``, where they take precedence.
PyTorch's dispatcher picks by the device of the arguments; nothing else chooses.
"""

from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec

import torch

LIBRARY = torch.library.Library("rbm", "FRAGMENT")
# Operators that Triton serves on CUDA.
TRITON_OPERATORS: set[str] = set()


def define(schema: str) -> None:
    """Declare an operator. ``pt2_compliant_tag`` says that it may stand in a compiled graph: the tests run opcheck."""
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))


def implement_everywhere(name: str, function: Callable) -> None:
    """Bind the eager reference to every device that has no implementation of its own.

    Autocast is off inside it: an operator's arithmetic is part of its contract, and routing stays float32.
    """

    @wraps(function)
    def without_autocast(*args, **kwargs):
        with torch._C._DisableAutocast():
            return function(*args, **kwargs)

    LIBRARY.impl(name, without_autocast, "CompositeExplicitAutograd")


def implement_cuda(name: str, function: Callable) -> None:
    """Bind an implementation in Triton to CUDA. ``function`` imports its kernels itself, at its first call.

    Importing this package stays quick thereby. Where Triton is not installed nothing is bound, and the eager reference
    serves CUDA as it serves any device.
    """
    if find_spec("triton") is None:
        return

    @wraps(function)
    def on_its_device(*args, **kwargs):
        # A kernel runs on the current device, whatever the device of its arguments.
        device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
        with torch._C._DisableAutocast(), torch.cuda.device(device):
            return function(*args, **kwargs)

    LIBRARY.impl(name, on_its_device, "CUDA")
    TRITON_OPERATORS.add(name)


def implement_fake(name: str, function: Callable) -> None:
    """Bind the shape-only implementation that tracing, export and the meta device use."""
    torch.library.register_fake(f"rbm::{name}", function, lib=LIBRARY)


def implement_autograd(name: str, backward: Callable, setup_context: Callable) -> None:
    """Bind the derivative."""
    torch.library.register_autograd(f"rbm::{name}", backward, setup_context=setup_context, lib=LIBRARY)


def stop_gradient(name: str, num_outputs: int) -> None:
    """Give the operator outputs that never require a gradient, whatever its inputs require."""

    def mark_outputs(ctx, inputs, output, keyword_only_inputs=None) -> None:
        outputs = output if num_outputs > 1 else (output,)
        ctx.mark_non_differentiable(*outputs)

    def no_gradients(ctx, *grads):
        return (None,) * len(ctx.needs_input_grad)

    implement_autograd(name, no_gradients, mark_outputs)
