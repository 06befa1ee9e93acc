"""``torch.ops.rbm.pack_experts`` and ``torch.ops.rbm.routed_matmul_packed``: schemas, checks, fake implementation."""

import torch
from torch import Tensor

from rbm_kernels import checks
from rbm_kernels._library import (
    LIBRARY,
    implement_everywhere,
    implement_fake,
    inference_call,
    refuse_derivative,
)
from rbm_kernels._vmap import implement_vmap
from rbm_kernels.ops.cosine_topk.op import check_routing
from rbm_kernels.ops.packed_experts import reference

# Without pt2_compliant_tag, which would allow them in compiled graphs: the packed format depends on the processor.
LIBRARY.define("pack_experts(Tensor weight, Tensor? bias) -> Tensor")
LIBRARY.define(
    "routed_matmul_packed(Tensor x, Tensor memory, Tensor packed, int out_features, int k, float temperature=1.0)"
    " -> Tensor"
)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def pack_experts(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Pack experts for :func:`routed_matmul_packed`, in this process, on the device of ``weight``; also those of one
    product for :func:`rbm_kernels.packed_feed_forward`.

    The packed format depends on the vector width of this processor: keep it in memory, never in a file, and pack again
    after changing ``weight`` or ``bias``.

    Args:
        weight: ``[E, N, D]``; float64, float32 or bfloat16.
        bias: ``[E, N]``, dtype of ``weight``, or None.

    Returns:
        ``[E, D + 1, P]`` in the dtype of ``weight``, with ``P`` at least ``N``. On the CPU, ``P`` is ``N`` rounded up
        to whole vectors, and the elements are in an internal order; a processor that multiplies pairs of bfloat16
        (AVX512-BF16) needs an even number of features, and one more row if ``D`` is odd.

    Raises:
        TypeError: another dtype.
        ValueError: shapes that do not match, or tensors on different devices.
        RuntimeError: a gradient is needed: gradients are enabled, and ``weight`` or ``bias`` requires one.
    """
    try:
        return torch.ops.rbm.pack_experts(weight, bias)
    except RuntimeError:
        _check_pack(weight, bias)
        raise


def routed_matmul_packed(
    x: Tensor, memory: Tensor, packed: Tensor, out_features: int, k: int, temperature: float = 1.0
) -> Tensor:
    """Like :func:`rbm_kernels.routed_matmul` (paper, Eqs. 3 and 5), with prepacked experts.

    For inference on the CPU, if the experts do not change between calls. A row's result is the same, bit for bit, in
    every batch.

    Args:
        x: rows ``[B, D]``; float64, float32 or bfloat16. ``B`` may be 0.
        memory: memory vectors ``[E, D]``; float32, or float64 if ``x`` is float64.
        packed: result of :func:`pack_experts` for ``weight [E, N, D]`` and the bias, dtype of ``x``.
        out_features: ``N``.
        k: experts per row, ``1 <= k <= E``.
        temperature: divides the cosines before the softmax; positive.

    Returns:
        ``y [B, N]`` in the dtype of ``x``, routed and accumulated in at least float32. Non-finite numbers in an expert
        only affect the rows that use it.

    Raises:
        TypeError: a dtype that is not listed above.
        ValueError: shapes that do not match, tensors on different devices, or ``k`` or the temperature out of range.
        RuntimeError: a gradient is needed (gradients are enabled, and an argument requires one); or ``packed`` was
            made on another processor.
    """
    return _call(x, memory, packed, out_features, k, temperature)


def _check_pack(weight: Tensor, bias: Tensor | None) -> None:
    op = "pack_experts"
    checks.check_dtype(op, "weight", weight, DTYPES)
    checks.check_shape(op, "weight", weight, (None, None, None), "experts by outputs by features")
    checks.check_bias(op, bias, weight)


@implement_everywhere("pack_experts")
def _eager_pack(weight, bias) -> Tensor:
    _check_pack(weight, bias)
    return reference.pack_experts(weight, bias)


def _check(x: Tensor, memory: Tensor, packed: Tensor, out_features: int, k: int, temperature: float = 1.0) -> None:
    op = "routed_matmul_packed"
    checks.check_dtype(op, "x", x, DTYPES)
    check_routing(op, "x", x, memory, k, temperature)
    checks.check_dtype(op, "memory", memory, (checks.accumulation_dtype(x),))
    checks.check_out_features(op, out_features)
    check_packed(op, "packed", packed, x.dtype, memory.shape[0], x.shape[1], out_features)


def check_packed(
    op: str, name: str, packed: Tensor, dtype: torch.dtype, num_experts: int, features: int, outputs: int = 0
) -> None:
    """Raise TypeError or ValueError unless ``packed`` may be what pack_experts returned for these sizes."""
    checks.check_dtype(op, name, packed, (dtype,))
    # A processor that multiplies pairs of features pads an odd number of them.
    pads = dtype == torch.bfloat16 and packed.dim() == 3 and packed.shape[1] == 1 + features + features % 2
    shape = (num_experts, packed.shape[1] if pads else features + 1, None)
    checks.check_shape(op, name, packed, shape, "what pack_experts returned for the experts of memory")
    if outputs > packed.shape[2]:
        raise ValueError(
            f"rbm::{op}: out_features is {outputs}, expected between 0 and {packed.shape[2]}, the columns of {name}"
        )


@implement_everywhere("routed_matmul_packed")
def _eager(x, memory, packed, out_features, k, temperature=1.0) -> Tensor:
    _check(x, memory, packed, out_features, k, temperature)
    return reference.routed_matmul_packed(x, memory, packed, out_features, k, temperature)


def _fake(x, memory, packed, out_features, k, temperature=1.0) -> Tensor:
    _check(x, memory, packed, out_features, k, temperature)
    return x.new_empty((x.shape[0], out_features))


implement_fake("routed_matmul_packed", _fake)
refuse_derivative("pack_experts", "routed_matmul")
refuse_derivative("routed_matmul_packed", "routed_matmul")
_call = inference_call("routed_matmul_packed", _check, refuses=True)
implement_vmap("pack_experts")
implement_vmap("routed_matmul_packed", rows=("x",))
