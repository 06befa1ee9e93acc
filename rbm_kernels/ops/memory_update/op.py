"""``torch.ops.rbm.memory_statistics`` and ``memory_update_``: schemas, checks, fake implementations, autograd."""

import math

import torch
from torch import Tensor

from rbm_kernels import checks
from rbm_kernels._library import (
    LIBRARY,
    define,
    has_tangent,
    implement_cuda,
    implement_everywhere,
    implement_fake,
    stop_gradient,
)
from rbm_kernels._vmap import implement_vmap
from rbm_kernels.ops.memory_update import reference

define(
    "memory_statistics(Tensor h, Tensor gates, Tensor experts, int num_experts, *, bool normalize=True)"
    " -> (Tensor weighted_sum, Tensor total)"
)
define(
    "memory_update_(Tensor(a!) memory, Tensor weighted_sum, Tensor total, float decay, *, bool normalize=True) -> ()"
)


def memory_statistics(
    h: Tensor, gates: Tensor, experts: Tensor, num_experts: int, *, normalize: bool = True
) -> tuple[Tensor, Tensor]:
    """Sum up what the memory update needs from a batch: both parts of the batch softmax (paper, Eq. 4).

    With ``n(h) = h / max(|h|, 1e-12)``, and each sum over the rows ``b`` and choices ``j`` with
    ``experts[b, j] == i``::

        weighted_sum[i] = sum exp(gates[b, j]) n(h[b])
        total[i]        = sum exp(gates[b, j])

    The softmax-weighted mean of Eq. 4 is ``weighted_sum[i] / total[i]``. Both sums are additive over parts of a batch,
    micro-batches and ranks: add them up (all-reduce) first, then call :func:`memory_update_` once.

    Args:
        h: rows, ``[B, D]``; float64, float32, bfloat16 or float16, of any strides. ``B`` may be 0.
        gates: ``[B, k]``, in [0, 1]; float32 (float64 if ``h`` is float64).
        experts: ``[B, k]``, int32, in ``[0, num_experts)``. On CUDA an expert outside that range is skipped, because
            reporting it would need a synchronisation.
        num_experts: ``E``, at least 1.
        normalize: use ``n(h)`` as in the released code; ``False`` uses ``h``, as in the paper.

    Returns:
        ``weighted_sum [E, D]`` and ``total [E]``; float32 (float64 if ``h`` is float64). Neither ever requires a
        gradient. A row is skipped if one of its gates, or its squared norm in the dtype of the result, is not finite.
        Equal arguments give equal bits, on the CPU for any number of threads.

    Raises:
        TypeError: a dtype that is not listed above.
        ValueError: shapes that do not match, tensors on different devices, or ``num_experts < 1``.
        RuntimeError: on the CPU, an expert out of range.
    """
    try:
        return torch.ops.rbm.memory_statistics(h, gates, experts, num_experts, normalize=normalize)
    except RuntimeError:
        # C++ implementations can only raise RuntimeError, so repeat their checks here to raise the right class.
        _check_statistics(h, gates, experts, num_experts)
        raise


def memory_update_(
    memory: Tensor, weighted_sum: Tensor, total: Tensor, decay: float, *, normalize: bool = True
) -> None:
    """Move the memory vectors, in place, towards the rows routed to them (paper, Eq. 4).

    ``memory[i] = decay n(memory[i]) + (1 - decay) weighted_sum[i] / total[i]`` if ``total[i]`` is finite and positive.
    The memory of all other experts stays unchanged, bit for bit. No gradient flows.

    Args:
        memory: memory vectors, ``[E, D]``, changed in place; float32 or float64, of any strides.
        weighted_sum: ``[E, D]``, from :func:`memory_statistics`; dtype of ``memory``.
        total: ``[E]``, from :func:`memory_statistics`; dtype of ``memory``.
        decay: weight of the old memory, in [0, 1]; the paper's lambda-hat of t.
        normalize: normalise the old memory to unit length first, as in the released code.

    Raises:
        TypeError: a dtype that is not listed above.
        ValueError: shapes that do not match, tensors on different devices, a decay outside [0, 1], or a ``memory``
            whose elements overlap each other or another argument.
        RuntimeError: ``memory`` requires a gradient while gradients are enabled, or carries a tangent.
    """
    try:
        torch.ops.rbm.memory_update_(memory, weighted_sum, total, decay, normalize=normalize)
    except (RuntimeError, AttributeError):
        _check_update(memory, weighted_sum, total, decay)
        if not torch._C._are_functorch_transforms_active():  # their tensors have no addresses
            _check_memory(memory, weighted_sum, total)
        raise


def _check_statistics(h: Tensor, gates: Tensor, experts: Tensor, num_experts: int, **_: bool) -> None:
    op = "memory_statistics"
    checks.check_dtype(op, "h", h, checks.FLOATING)
    checks.check_dtype(op, "gates", gates, (checks.accumulation_dtype(h),))
    checks.check_dtype(op, "experts", experts, (torch.int32,))
    checks.check_shape(op, "h", h, (None, None), "rows by features")
    checks.check_shape(op, "gates", gates, (h.shape[0], None), "one row for each row of h")
    checks.check_shape(op, "experts", experts, (h.shape[0], gates.shape[1]), "one expert for each gate")
    checks.check_num_experts(op, num_experts)


@implement_everywhere("memory_statistics")
def _eager_statistics(
    h: Tensor, gates: Tensor, experts: Tensor, num_experts: int, *, normalize: bool = True
) -> tuple[Tensor, Tensor]:
    _check_statistics(h, gates, experts, num_experts)
    checks.check_indices("memory_statistics", "experts", experts, num_experts)
    return reference.memory_statistics(h, gates, experts, num_experts, normalize)


def _fake_statistics(
    h: Tensor, gates: Tensor, experts: Tensor, num_experts: int, *, normalize: bool = True
) -> tuple[Tensor, Tensor]:
    _check_statistics(h, gates, experts, num_experts)
    return gates.new_empty(num_experts, h.shape[1]), gates.new_empty(num_experts)


@implement_cuda("memory_statistics", _check_statistics, stands_in=True)
def _cuda_statistics(
    h: Tensor, gates: Tensor, experts: Tensor, num_experts: int, *, normalize: bool = True
) -> tuple[Tensor, Tensor]:
    from rbm_kernels.ops.memory_update import launch

    return launch.memory_statistics(h, gates, experts, num_experts, normalize)


def _check_update(memory: Tensor, weighted_sum: Tensor, total: Tensor, decay: float, **_: bool) -> None:
    op = "memory_update_"
    checks.check_dtype(op, "memory", memory, (torch.float32, torch.float64))
    checks.check_dtype(op, "weighted_sum", weighted_sum, (memory.dtype,))
    checks.check_dtype(op, "total", total, (memory.dtype,))
    checks.check_shape(op, "memory", memory, (None, None), "experts by features")
    checks.check_shape(op, "weighted_sum", weighted_sum, tuple(memory.shape), "the shape of memory")
    checks.check_shape(op, "total", total, (memory.shape[0],), "one for each row of memory")
    if not checks.is_within(op, "decay", decay, 0, 1, "a number"):
        raise ValueError(f"rbm::{op}: decay is {decay}, expected between 0 and 1")


def _check_memory(memory: Tensor, weighted_sum: Tensor, total: Tensor) -> None:
    """Raise ValueError if memory overlaps itself or an argument: the result would depend on the order of evaluation."""
    op, (rows, columns), (row, column) = "memory_update_", memory.shape, memory.stride()
    common = math.gcd(row, column)
    meets = rows > 1 and columns > 1 and common > 0 and column // common < rows and row // common < columns
    if memory.numel() > 0 and ((rows > 1 and row == 0) or (columns > 1 and column == 0) or meets):
        raise ValueError(
            f"rbm::{op}: memory has several elements at one address (strides {row} and {column}), and is written to:"
            " pass memory.clone()"
        )
    for name, other in (("weighted_sum", weighted_sum), ("total", total)):
        begins, ends = zip(_addresses(memory), _addresses(other), strict=True)
        if 0 not in (memory.numel(), other.numel()) and max(begins) < min(ends):
            raise ValueError(
                f"rbm::{op}: {name} lies in the same memory as memory, which is written to: pass {name}.clone()"
            )


def _addresses(tensor: Tensor) -> tuple[int, int]:
    """Address of the first byte, and the address after the last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


@implement_everywhere("memory_update_")
def _eager_update(memory: Tensor, weighted_sum: Tensor, total: Tensor, decay: float, *, normalize: bool = True) -> None:
    _check_update(memory, weighted_sum, total, decay)
    _check_memory(memory, weighted_sum, total)
    reference.memory_update_(memory, weighted_sum, total, decay, normalize)


def _fake_update(memory: Tensor, weighted_sum: Tensor, total: Tensor, decay: float, *, normalize: bool = True) -> None:
    _check_update(memory, weighted_sum, total, decay)


@implement_cuda("memory_update_", _check_update, stands_in=True)
def _cuda_update(memory: Tensor, weighted_sum: Tensor, total: Tensor, decay: float, *, normalize: bool = True) -> None:
    from rbm_kernels.ops.memory_update import launch

    _check_memory(memory, weighted_sum, total)
    launch.memory_update_(memory, weighted_sum, total, decay, normalize)


def _count_the_change(keyset, memory: Tensor, *args, **kwargs) -> None:
    """Increment the version of ``memory``, like PyTorch's own in-place operators.

    Otherwise a backward pass would silently use the moved memory instead of the one that its forward pass saved. A
    memory that is being differentiated is rejected for the same reason.
    """
    if (torch.is_grad_enabled() and memory.requires_grad) or has_tangent(memory):
        raise RuntimeError(
            "rbm::memory_update_: memory is being differentiated, and no derivative follows the update: pass"
            " memory.detach(), or call it under torch.no_grad()"
        )
    with torch._C._AutoDispatchBelowADInplaceOrView():
        below = keyset & torch._C._after_ADInplaceOrView_keyset
        torch.ops.rbm.memory_update_.default.redispatch(below, memory, *args, **kwargs)
    torch.autograd.graph.increment_version(memory)


implement_fake("memory_statistics", _fake_statistics)
implement_fake("memory_update_", _fake_update)
stop_gradient("memory_statistics")
LIBRARY.impl("memory_update_", _count_the_change, "ADInplaceOrView", with_keyset=True)
implement_vmap("memory_statistics")
