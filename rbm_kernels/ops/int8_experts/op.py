"""``torch.ops.rbm.routed_matmul_int8``: schema, checks, fake implementation; quantisation of its experts."""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from rbm_kernels import checks
from rbm_kernels._library import define, implement_everywhere, implement_fake, inference_call, refuse_derivative
from rbm_kernels._vmap import implement_vmap
from rbm_kernels.ops.cosine_topk.op import check_routing
from rbm_kernels.ops.int8_experts import reference
from rbm_kernels.ops.int8_experts.reference import COLUMNS, GROUP, HEAD, LINE

define(
    "routed_matmul_int8(Tensor x, Tensor? memory, Tensor experts, int out_features, int k=1, float temperature=1.0)"
    " -> Tensor"
)
# A sum of this many products of 127 and 127 fits in 32 bits.
MOST_FEATURES = 2**17


def quantize_experts(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Quantise experts to 8-bit integers for :func:`routed_matmul_int8`, symmetrically, per expert and output.

    ``weight[e, n]`` becomes ``round(weight[e, n] * 127 / m)``, where ``m`` is its largest absolute value; ``m / 127``
    is stored in float32. The format is the same on every processor.

    Args:
        weight: ``[E, N, D]``, float32; ``D`` at most 131,072.
        bias: ``[E, N]``, float32, or None. It stays float32.

    Returns:
        int8 ``[E, ceil(N / 16), 3 + ceil(D / 4), 64]``, containing weights, scales and biases.

    Raises:
        TypeError: another dtype.
        ValueError: shapes that do not match, tensors on different devices, or non-finite numbers.
    """
    op = "quantize_experts"
    checks.check_dtype(op, "weight", weight, (torch.float32,))
    checks.check_shape(op, "weight", weight, (None, None, None), "experts by outputs by features")
    check_features(op, "weight", weight.shape[2])
    checks.check_devices(op, weight=weight, bias=bias)
    checks.check_bias(op, bias, weight)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and not tensor.is_meta and not _all_slices(tensor).isfinite().all():
            raise ValueError(
                f"rbm::{op}: {name} holds numbers that are not finite, and 8 bits have none such: train the model anew"
            )
    with torch.no_grad():
        numbers, scale = reference.quantize(weight)
        return reference.pack(numbers.to(torch.int8), scale.squeeze(-1), None if bias is None else bias.detach())


def _all_slices(tensor: Tensor) -> Tensor:
    """The tensor beneath a batch of ``torch.func.vmap``, in which a condition has no answer of one slice."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def routed_matmul_int8(
    x: Tensor, memory: Tensor | None, experts: Tensor, out_features: int, k: int = 1, temperature: float = 1.0
) -> Tensor:
    """Like :func:`rbm_kernels.routed_matmul` (paper, Eqs. 3 and 5), with 8-bit integer experts.

    For inference. Routing uses the rows unchanged. For the experts, each row is rounded to integers from -127 to 127,
    scaled by its largest absolute value. Products are summed in int32, without rounding; scales, biases and gates are
    applied in float32. A row's result is the same, bit for bit, in every batch and for any number of threads.

    Args:
        x: rows ``[B, D]``, float32. ``B`` may be 0.
        memory: memory vectors ``[E, D]``, float32; or None for a linear layer, with one expert that every row uses.
        experts: result of :func:`quantize_experts` for ``weight [E, N, D]`` and the bias.
        out_features: ``N``.
        k: experts per row, ``1 <= k <= E``.
        temperature: divides the cosines before the softmax; positive.

    Returns:
        ``y [B, N]``, float32. A row with a non-finite number gets NaN in all its outputs. A row in which no absolute
        value reaches 1e-30 gets the gated biases.

    Raises:
        TypeError: a dtype that is not listed above.
        ValueError: shapes that do not match, tensors on different devices, or ``k`` or the temperature out of range.
        RuntimeError: a gradient is needed: gradients are enabled, and an argument requires one.
    """
    if is_compiling():
        return torch.ops.rbm.routed_matmul_int8(x, memory, experts, out_features, k, temperature)
    return _call(x, memory, experts, out_features, k, temperature)


def check_features(op: str, name: str, features: int) -> None:
    """Raise ValueError if a sum over this many features could overflow int32."""
    if isinstance(features, int) and features > MOST_FEATURES:
        raise ValueError(
            f"rbm::{op}: {name} has {features} features, expected at most {MOST_FEATURES}: their products are summed in"
            " int32"
        )


def _check(x, memory, experts, out_features, k=1, temperature=1.0) -> None:
    op = "routed_matmul_int8"
    checks.check_dtype(op, "x", x, (torch.float32,))
    checks.check_shape(op, "x", x, (None, None), "rows by features")
    check_features(op, "x", x.shape[1])
    if memory is not None:
        check_routing(op, "x", x, memory, k, temperature)
        checks.check_dtype(op, "memory", memory, (torch.float32,))
    elif k != 1:
        raise ValueError(f"rbm::{op}: k is {k}, expected 1, since memory is None and there is one expert")
    checks.check_dtype(op, "experts", experts, (torch.int8,))
    checks.check_out_features(op, out_features)
    num_experts = 1 if memory is None else memory.shape[0]
    shape = (num_experts, -(-out_features // COLUMNS), HEAD - (-x.shape[1] // GROUP), LINE)
    why = "what quantize_experts returned for out_features, the features of x and the experts of memory"
    checks.check_shape(op, "experts", experts, shape, why)


@implement_everywhere("routed_matmul_int8")
def _eager(x, memory, experts, out_features, k=1, temperature=1.0) -> Tensor:
    _check(x, memory, experts, out_features, k, temperature)
    return reference.routed_matmul_int8(x, memory, experts, out_features, k, temperature)


def _fake(x, memory, experts, out_features, k=1, temperature=1.0) -> Tensor:
    _check(x, memory, experts, out_features, k, temperature)
    return x.new_empty((x.shape[0], out_features))


implement_fake("routed_matmul_int8", _fake)
refuse_derivative("routed_matmul_int8", "routed_matmul")
_call = inference_call("routed_matmul_int8", _check, refuses=True)
implement_vmap("routed_matmul_int8", rows=("x",))
