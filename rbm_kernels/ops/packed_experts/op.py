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
from rbm_kernels.ops.cosine_topk.op import check_routing
from rbm_kernels.ops.packed_experts import reference

# No tag that says that they may stand in a compiled graph: what is packed depends on the processor that runs it.
LIBRARY.define("pack_experts(Tensor weight, Tensor? bias) -> Tensor")
LIBRARY.define(
    "routed_matmul_packed(Tensor x, Tensor memory, Tensor packed, int out_features, int k, float temperature=1.0)"
    " -> Tensor"
)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def pack_experts(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Pack experts for :func:`routed_matmul_packed`, in this process, on the device of ``weight``.

    What is packed is for the vectors of this processor: keep it in memory, never in a file, and pack anew after a
    change of ``weight`` or ``bias``.

    Args:
        weight: ``[E, N, D]``; float64, float32 or bfloat16.
        bias: ``[E, N]``, dtype of ``weight``, or None.

    Returns:
        ``[E, D + 1, P]`` in the dtype of ``weight``, ``P`` at least ``N``: on the CPU ``N`` rounded up to whole
        vectors, in an order of its own.

    Raises:
        TypeError: another dtype.
        ValueError: shapes that do not fit.
        RuntimeError: a gradient is wanted: gradients are enabled, and ``weight`` or ``bias`` requires one.
    """
    try:
        return torch.ops.rbm.pack_experts(weight, bias)
    except RuntimeError:
        _check_pack(weight, bias)
        raise


def routed_matmul_packed(
    x: Tensor, memory: Tensor, packed: Tensor, out_features: int, k: int, temperature: float = 1.0
) -> Tensor:
    """Answer as :func:`rbm_kernels.routed_matmul` does (paper, Eqs. 3 and 5), with experts that were packed before.

    For inference on a CPU, where the experts do not change from call to call. A row's answer is the same, bit for bit,
    in every batch.

    Args:
        x: rows ``[B, D]``; float64, float32 or bfloat16. ``B`` may be 0.
        memory: memory vectors ``[E, D]``; float32, or float64 where ``x`` is float64.
        packed: what :func:`pack_experts` returned for ``weight [E, N, D]`` and the bias, dtype of ``x``.
        out_features: ``N``.
        k: experts a row uses, ``1 <= k <= E``.
        temperature: divides the cosines before the softmax; positive.

    Returns:
        ``y [B, N]`` in the dtype of ``x``, routed and accumulated in float32 at least. Numbers that are not
        finite in an expert stay with the rows that use it.

    Raises:
        TypeError: a dtype that is not listed above.
        ValueError: shapes that do not fit, ``k`` out of range, or a temperature that is not positive.
        RuntimeError: a gradient is wanted: gradients are enabled, and an argument requires one; or ``packed`` was made
            on another processor.
    """
    return _call(x, memory, packed, out_features, k, temperature)


def _check_pack(weight: Tensor, bias: Tensor | None) -> None:
    op = "pack_experts"
    checks.check_dtype(op, "weight", weight, DTYPES)
    checks.check_shape(op, "weight", weight, (None, None, None), "experts by outputs by features")
    if bias is not None:
        checks.check_dtype(op, "bias", bias, (weight.dtype,))
        checks.check_shape(op, "bias", bias, weight.shape[:2], "experts by outputs, as in weight")


def _check(x: Tensor, memory: Tensor, packed: Tensor, out_features: int, k: int, temperature: float = 1.0) -> None:
    op = "routed_matmul_packed"
    checks.check_dtype(op, "x", x, DTYPES)
    check_routing(op, "x", x, memory, k, temperature)
    checks.check_dtype(op, "memory", memory, (checks.accumulation_dtype(x),))
    checks.check_dtype(op, "packed", packed, (x.dtype,))
    checks.check_out_features(op, out_features)
    shape = (memory.shape[0], x.shape[1] + 1, None)
    checks.check_shape(op, "packed", packed, shape, "what pack_experts returned for the experts of memory")
    if out_features > packed.shape[2]:
        raise ValueError(
            f"rbm::{op}: out_features is {out_features}, expected between 0 and {packed.shape[2]}, the columns of"
            " packed"
        )


@implement_everywhere("pack_experts")
def _eager_pack(weight, bias) -> Tensor:
    _check_pack(weight, bias)
    return reference.pack_experts(weight, bias)


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
