"""The package's operator library: everything registered here is available as ``torch.ops.rbm.<name>``.

Schemas, fake (meta) implementations and autograd are written in Python, in each operator's ``op.py``. Implementations
are bound to dispatch keys. The eager reference is bound to ``CompositeExplicitAutograd``, so that every device is
served. The libraries of ``csrc/`` are bound to ``CPU`` and ``CUDA`` and the Triton kernels to ``CUDA``; these take
precedence over the reference. If an operator has both CUDA and Triton kernels, librbm_cuda serves it when the library
was built and can be loaded; otherwise Triton does (:func:`bind_stand_ins`). PyTorch's dispatcher picks the
implementation by the device of the arguments; there is no other selection mechanism.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from importlib.util import find_spec

import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled  # an attribute lookup in torch takes about 30 ns
from torch.autograd import forward_ad

from rbm_kernels import checks

LIBRARY = torch.library.Library("rbm", "FRAGMENT")
# The Triton functions for CUDA, by operator. librbm_cuda implements those in STAND_INS too, and takes precedence.
TRITON_OPERATORS: dict[str, Callable] = {}
STAND_INS: list[str] = []
# Number of combinations of shapes, dtypes and devices that an operator remembers as checked.
_REMEMBERED = 1024
# isinstance takes several times as long to deny that a number is a tensor.
_PLAIN = frozenset((int, float, bool, type(None)))


def define(schema: str) -> None:
    """Declare an operator. ``pt2_compliant_tag`` allows it in compiled graphs; the tests run opcheck."""
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))


def implement_everywhere(name: str) -> Callable[[Callable], Callable]:
    """Bind the eager reference to every device that has no implementation of its own.

    Autocast is disabled inside it, because an operator's precision is part of its contract: routing stays float32.
    """

    def bind(function: Callable) -> Callable:
        @wraps(function)
        def without_autocast(*args, **kwargs):
            _check_devices(name, args)
            with torch._C._DisableAutocast():
                return function(*args, **kwargs)

        LIBRARY.impl(name, without_autocast, "CompositeExplicitAutograd")
        return without_autocast

    return bind


def implement_cuda(name: str, check: Callable, *, stands_in: bool = False) -> Callable[[Callable], Callable]:
    """Bind a Triton implementation to CUDA.

    The function should import its kernels on its first call, so that importing this package stays fast. If Triton is
    not installed, nothing is bound, and the eager reference serves CUDA like any other device. The function calls the
    reference for arguments that its kernels do not support. With ``stands_in``, nothing is bound before
    :func:`bind_stand_ins`, because librbm_cuda takes precedence.

    Arguments are checked here for every caller, once per combination of shapes, dtypes, devices and numbers. All
    tensors must be on one device: a kernel would interpret the address of a tensor on another device as its own. The
    function ``check`` takes the operator's arguments and may raise.
    """

    def bind(function: Callable) -> Callable:
        checked: set[tuple] = set()

        @wraps(function)
        def on_its_device(*args, **kwargs):
            signature = [
                arg if type(arg) in _PLAIN or not isinstance(arg, Tensor) else (arg.shape, arg.dtype, arg.device)
                for arg in args
            ]
            signature = (*signature, *kwargs.values()) if kwargs else tuple(signature)
            if signature not in checked:
                _check_devices(name, args)
                check(*args, **kwargs)
                if len(checked) >= _REMEMBERED:
                    checked.clear()
                checked.add(signature)
            # A kernel runs on the current device, not on the device of its arguments. Only the derivatives of
            # the routing and of folded experts start with optional tensors, two of them.
            device = (args[2] if args[0] is None else args[0]).device
            if device.type != "cuda" or device.index == torch.cuda.current_device():
                return function(*args, **kwargs)
            with torch.cuda.device(device):
                return function(*args, **kwargs)

        if find_spec("triton") is not None:
            TRITON_OPERATORS[name] = on_its_device
            if stands_in:
                STAND_INS.append(name)
            else:
                LIBRARY.impl(name, on_its_device, "CUDA")
        return on_its_device

    return bind


def bind_stand_ins() -> None:
    """Bind Triton to CUDA for the operators of librbm_cuda if that library is missing or could not be loaded."""
    for name in STAND_INS:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"rbm::{name}", "CUDA"):
            LIBRARY.impl(name, TRITON_OPERATORS[name], "CUDA")


def _check_devices(name: str, args: tuple) -> None:
    """Raise ValueError unless all tensors are on one device."""
    names = [argument.name for argument in getattr(torch.ops.rbm, name).default._schema.arguments]
    checks.check_devices(name, **dict(zip(names, args, strict=False)))


def implement_fake(name: str, function: Callable) -> None:
    """Bind the shape-only implementation that tracing, export and the meta device use."""

    @wraps(function)
    def on_one_device(*args, **kwargs):
        _check_devices(name, args)
        return function(*args, **kwargs)

    torch.library.register_fake(f"rbm::{name}", on_one_device, lib=LIBRARY)


def implement_autograd(name: str, backward: Callable, save: Callable, formula: Callable) -> None:
    """Bind the derivatives of every order and mode.

    ``save(ctx, output, *arguments)`` stores what the backward pass needs. It is called with the operator's arguments
    except those equal to their defaults, so it must declare the same defaults. ``backward(ctx, saved, *grads)`` takes
    the saved tensors and returns a gradient or None for each argument. While PyTorch records a backward pass
    (``create_graph=True``), gradients are enabled inside it; it then returns :func:`gradients_of` the formula, which
    are differentiable themselves.

    ``formula(operate, *arguments)`` computes the operator's result with PyTorch operators, which support forward mode
    and the ``torch.func`` transforms; the formula is used for these. ``operate()`` returns the operator's own result
    without a derivative. A formula takes discrete choices from it, so that it differentiates the same branch. Autocast
    is disabled in a formula, except under ``torch.func``, which enables it again for each operator.

    ``torch.library.register_autograd`` would be simpler, but it passes every default to ``save``, and looking those up
    in the schema takes longer than the rest of its work.
    """
    operator = getattr(torch.ops.rbm, name).default

    def forward(ctx, *arguments):
        *args, keyset, kwargs = arguments
        output = _beneath_autograd(operator, keyset, args, kwargs)
        save(ctx, output, *args, **kwargs)
        return output

    def backward_pass(ctx, *grads):
        saved = ctx.saved_tensors  # may recompute them, with autograd (activation checkpointing)
        with _recording(*grads):
            return (*backward(ctx, saved, *grads), None, None)  # one per argument, and None for keyset and kwargs

    # PyTorch names the nodes of the graph when the class is made: anomaly mode and the profiler show this name.
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward_pass)}
    derivative = type(f"rbm_{name}", (torch.autograd.Function,), methods)

    def differentiable(keyset, *args, **kwargs):
        backwards = torch.is_grad_enabled() and torch._C._any_requires_grad(*args)
        if has_tangent(*args) or (backwards and torch._C._are_functorch_transforms_active()):
            with torch._C._DisableAutocast():
                return formula(partial(_beneath_autograd, operator, keyset, args, kwargs), *args, **kwargs)
        if backwards:
            return derivative.apply(*args, keyset, kwargs)
        return _beneath_autograd(operator, keyset, args, kwargs)

    LIBRARY.impl(name, differentiable, "Autograd", with_keyset=True)


def _recording(*grads):
    """Context of a backward pass: gradients enabled if the pass itself is differentiated, otherwise below autograd."""
    if has_tangent(*grads):
        return torch.enable_grad()
    # A compiler that traces a backward pass does not support the context below.
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return nullcontext()
    return torch._C._AutoDispatchBelowAutograd()


def implement_autograd_by_others(name: str, equivalent: Callable) -> None:
    """Call ``equivalent``, composed of differentiable operators, instead of the operator if a derivative is needed."""
    operator = getattr(torch.ops.rbm, name).default

    def differentiable(keyset, *args, **kwargs):
        if _needs_derivative(*args):
            return equivalent(*args, **kwargs)
        return _beneath_autograd(operator, keyset, args, kwargs)

    LIBRARY.impl(name, differentiable, "Autograd", with_keyset=True)


def stop_gradient(name: str) -> None:
    """Make the operator's outputs never require a gradient or carry a tangent."""
    operator = getattr(torch.ops.rbm, name).default

    def constant(keyset, *args, **kwargs):
        return _beneath_autograd(operator, keyset, args, kwargs)

    LIBRARY.impl(name, constant, "Autograd", with_keyset=True)


def refuse_derivative(name: str, differentiable: str) -> None:
    """Make an operator raise if a derivative of it is needed, and name ``differentiable`` as the operator to use."""
    operator = getattr(torch.ops.rbm, name).default

    def refusing(keyset, *args, **kwargs):
        if _needs_derivative(*args):
            raise RuntimeError(
                f"rbm::{name} has no derivative of its own: differentiate rbm::{differentiable} (with"
                " create_graph=True for a second time), or detach the arguments"
            )
        return _beneath_autograd(operator, keyset, args, kwargs)

    LIBRARY.impl(name, refusing, "Autograd", with_keyset=True)


def inference_call(name: str, check: Callable, *, refuses: bool = False) -> Callable[..., Tensor]:
    """A function that calls an inference operator, with positional arguments, when no derivative is needed.

    It bypasses the operator's autograd implementation, which is Python and takes longer than routing one row. In
    inference mode PyTorch bypasses it anyway.

    Args:
        name: name of the operator.
        check: takes the operator's arguments and raises for invalid ones. It runs only after the operator has raised
            a RuntimeError, the only error that C++ can raise: checking every call would take too long.
        refuses: whether the derivative was bound by :func:`refuse_derivative`. It is then called whenever gradients
            are enabled, and decides. It always decides in forward mode and in transformations of ``torch.func``, where
            a batch of ``vmap`` hides whether it requires a gradient.
    """
    packet = getattr(torch.ops.rbm, name)
    operator = packet.default._op  # the overload's own function: the object around it costs time in every call

    def call(*args) -> Tensor:
        try:
            if is_inference_mode_enabled():
                return operator(*args)
            may_need = is_grad_enabled() and (refuses or torch._C._are_functorch_transforms_active())
            if may_need or forward_ad._current_level >= 0:
                return packet(*args)
            with torch._C._AutoDispatchBelowAutograd():
                return operator(*args)
        except RuntimeError:
            check(*args)
            raise

    return call


def _needs_derivative(*args) -> bool:
    """Whether gradients are enabled and one of ``args`` requires one, or forward-mode differentiation is active."""
    return (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)) or has_tangent(*args)


def is_exporting() -> bool:
    """``torch.compiler.is_exporting()``, which is always true in code that ``torch.compile`` of torch 2.11 traces."""
    return torch.compiler._is_exporting_flag


def has_tangent(*args) -> bool:
    """Whether forward-mode differentiation (``torch.func.jvp``, dual numbers) is active for one of ``args``."""
    if forward_ad._current_level < 0:
        return False
    return any(isinstance(arg, Tensor) and _tangent(arg) is not None for arg in args)


def _tangent(tensor: Tensor) -> Tensor | None:
    # PyTorch has no rule for the tangent of a batch of vmap, so ask the tensor with all its slices.
    while torch._C._functorch.is_batchedtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return forward_ad.unpack_dual(tensor).tangent


def gradients_of(
    formula: Callable, inputs: Sequence[Tensor | None], needed: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Differentiable gradients of ``formula(*inputs)``, one tensor or several, for the inputs that need one.

    ``grads`` has a gradient, or None, for each of the formula's outputs.
    """
    # Views, because a tensor that is passed twice has two gradients.
    inputs = [tensor.view_as(tensor) if need else tensor for tensor, need in zip(inputs, needed, strict=True)]
    sought = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
    with torch._C._DisableAutocast():
        outputs = formula(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [pair for pair in zip(outputs, grads, strict=True) if pair[1] is not None and pair[0].requires_grad]
        if not pairs:
            return [None] * len(inputs)
        outputs, grads = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, sought, grads, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in needed]


def _beneath_autograd(operator, keyset, args: tuple, kwargs: dict):
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)
