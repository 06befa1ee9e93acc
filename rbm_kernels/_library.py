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
from torch import Tensor

LIBRARY = torch.library.Library("rbm", "FRAGMENT")
# What Triton serves on CUDA: the function that is registered for each operator.
TRITON_OPERATORS: dict[str, Callable] = {}
# Combinations of shapes, dtypes and devices that an operator remembers as checked.
_REMEMBERED = 1024


def define(schema: str) -> None:
    """Declare an operator. ``pt2_compliant_tag`` says that it may stand in a compiled graph: the tests run opcheck."""
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))


def implement_everywhere(name: str) -> Callable[[Callable], Callable]:
    """Bind the eager reference to every device that has no implementation of its own.

    Autocast is off inside it: an operator's arithmetic is part of its contract, and routing stays float32.
    """

    def bind(function: Callable) -> Callable:
        @wraps(function)
        def without_autocast(*args, **kwargs):
            with torch._C._DisableAutocast():
                return function(*args, **kwargs)

        LIBRARY.impl(name, without_autocast, "CompositeExplicitAutograd")
        return without_autocast

    return bind


def implement_cuda(name: str, check: Callable | None = None) -> Callable[[Callable], Callable]:
    """Bind an implementation in Triton to CUDA. The function imports its kernels itself, at its first call.

    Importing this package stays quick thereby. Where Triton is not installed nothing is bound, and the eager reference
    serves CUDA as it serves any device. What kernels do not serve they leave to the reference, which knows no autocast.

    Arguments are checked here, for every caller, once for each combination of shapes, dtypes, devices and
    numbers: tensors on two devices, which a kernel would take for addresses of one; and by ``check``, which takes the
    operator's arguments and may raise.
    """

    def bind(function: Callable) -> Callable:
        checked: set[tuple] = set()

        @wraps(function)
        def on_its_device(*args, **kwargs):
            signature = (
                *[(arg.shape, arg.dtype, arg.device) if isinstance(arg, Tensor) else arg for arg in args],
                *kwargs.values(),
            )
            if signature not in checked:
                _check_devices(name, args)
                if check is not None:
                    check(*args, **kwargs)
                if len(checked) >= _REMEMBERED:
                    checked.clear()
                checked.add(signature)
            # A kernel runs on the current device, not on that of its arguments. Only the derivative of the
            # routing begins with optional tensors, two of them.
            device = (args[2] if args[0] is None else args[0]).device
            if device.type != "cuda" or device.index == torch.cuda.current_device():
                return function(*args, **kwargs)
            with torch.cuda.device(device):
                return function(*args, **kwargs)

        if find_spec("triton") is not None:
            LIBRARY.impl(name, on_its_device, "CUDA")
            TRITON_OPERATORS[name] = on_its_device
        return on_its_device

    return bind


def _check_devices(name: str, args: tuple) -> None:
    """Raise ValueError unless all tensors are on one device."""
    names = [argument.name for argument in getattr(torch.ops.rbm, name).default._schema.arguments]
    tensors = [(said, arg) for said, arg in zip(names, args, strict=False) if isinstance(arg, Tensor)]
    first_name, first = tensors[0]
    for other_name, other in tensors[1:]:
        if other.device != first.device:
            raise ValueError(
                f"rbm::{name}: {other_name} is on {other.device} and {first_name} on {first.device}, expected all"
                f" tensors on one device: move one, as {other_name}.to({first_name}.device) does"
            )


def implement_fake(name: str, function: Callable) -> None:
    """Bind the shape-only implementation that tracing, export and the meta device use."""
    torch.library.register_fake(f"rbm::{name}", function, lib=LIBRARY)


def implement_autograd(name: str, backward: Callable, save: Callable) -> None:
    """Bind the derivative.

    ``save(ctx, output, *arguments)`` keeps what the backward pass needs. It is called with the operator's arguments,
    those left out that have their default value: it declares the same defaults. ``backward(ctx, *grads)`` returns a
    gradient or None for each argument.

    ``torch.library.register_autograd`` does the same with a ``save`` that gets every default; to look those up in the
    schema takes it 27 µs of each call's forward, more than all the rest of its work.
    """
    operator = getattr(torch.ops.rbm, name).default

    class Derivative(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):
            *args, keyset, kwargs = arguments
            with torch._C._AutoDispatchBelowAutograd():
                output = operator.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)
            save(ctx, output, *args, **kwargs)
            return output

        @staticmethod
        def backward(ctx, *grads):
            return (*backward(ctx, *grads), None, None)  # one for each argument, and for what follows them

    Derivative.__name__ = Derivative.__qualname__ = f"rbm_{name}"

    def differentiable(keyset, *args, **kwargs):
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return Derivative.apply(*args, keyset, kwargs)
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    LIBRARY.impl(name, differentiable, "Autograd", with_keyset=True)


def stop_gradient(name: str, num_outputs: int) -> None:
    """Give the operator outputs that never require a gradient."""

    def mark_outputs(ctx, output, *_, **__) -> None:
        ctx.mark_non_differentiable(*(output if num_outputs > 1 else (output,)))

    def no_gradients(ctx, *grads):
        return (None,) * (len(ctx.needs_input_grad) - 2)

    implement_autograd(name, no_gradients, mark_outputs)
