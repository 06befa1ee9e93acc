"""``torch.ops.rbm.packed_feed_forward``: schema, checks, fake implementation."""

from torch import Tensor

from rbm_kernels import checks
from rbm_kernels._library import LIBRARY, implement_everywhere, implement_fake, inference_call, refuse_derivative
from rbm_kernels._vmap import implement_vmap
from rbm_kernels.ops.cosine_topk.op import check_routing
from rbm_kernels.ops.packed_experts.op import DTYPES, check_packed
from rbm_kernels.ops.packed_feed_forward import reference
from rbm_kernels.ops.packed_feed_forward.reference import ACTIVATIONS

# Without pt2_compliant_tag, which would allow it in compiled graphs: the packed format depends on the processor.
LIBRARY.define(
    "packed_feed_forward(Tensor x, Tensor memory, Tensor packed_in, Tensor packed_out, int hidden_features,"
    " int out_features, int k, str activation, float temperature=1.0) -> Tensor"
)


def packed_feed_forward(
    x: Tensor,
    memory: Tensor,
    packed_in: Tensor,
    packed_out: Tensor,
    hidden_features: int,
    out_features: int,
    k: int,
    activation: str = "gelu",
    temperature: float = 1.0,
) -> Tensor:
    r"""Route each row and send it through its feed-forward experts: the whole forward of a layer at inference.

    ``y_b = sum_j gates[b, j] (V_e activation(W_e x_b + b_e) + c_e)`` with ``e = experts[b, j]``. Gates and experts are
    those of ``cosine_topk(x, memory, k, temperature=temperature)`` (paper, Eq. 3). For the CPU, if the experts do not
    change between calls. A row's result is the same, bit for bit, in every batch.

    Args:
        x: rows ``[B, D]``; float64, float32 or bfloat16. ``B`` may be 0.
        memory: memory vectors ``[E, D]``; float32, or float64 if ``x`` is float64.
        packed_in: result of :func:`rbm_kernels.pack_experts` for ``W [E, I, D]`` (``[E, 2 I, D]`` for ``swiglu``) and
            the bias, dtype of ``x``.
        packed_out: result of :func:`rbm_kernels.pack_experts` for ``V [E, N, I]`` and the bias, dtype of ``x``.
        hidden_features: ``I``.
        out_features: ``N``.
        k: experts per row, ``1 <= k <= E``.
        activation: ``relu``, ``gelu``, ``silu`` or ``swiglu``.
        temperature: divides the cosines before the softmax; positive.

    Returns:
        ``y [B, N]`` in the dtype of ``x``, routed and accumulated in at least float32. Hidden features are rounded to
        the dtype of ``x`` at most once.

    Raises:
        TypeError: a dtype that is not listed above.
        ValueError: shapes that do not match, tensors on different devices, an unknown activation, or ``k`` or the
            temperature out of range.
        RuntimeError: a gradient is needed (gradients are enabled, and an argument requires one); or an argument was
            packed on another processor.
    """
    return _call(x, memory, packed_in, packed_out, hidden_features, out_features, k, activation, temperature)


def _check(
    x: Tensor,
    memory: Tensor,
    packed_in: Tensor,
    packed_out: Tensor,
    hidden_features: int,
    out_features: int,
    k: int,
    activation: str,
    temperature: float = 1.0,
) -> None:
    op = "packed_feed_forward"
    checks.check_dtype(op, "x", x, DTYPES)
    check_routing(op, "x", x, memory, k, temperature)
    checks.check_dtype(op, "memory", memory, (checks.accumulation_dtype(x),))
    if activation not in ACTIVATIONS:
        raise ValueError(f"rbm::{op}: activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}")
    most = checks.MOST_SIZE // 2
    if not checks.is_within(op, "hidden_features", hidden_features, 0, most):
        raise ValueError(f"rbm::{op}: hidden_features is {hidden_features}, expected between 0 and {most}")
    checks.check_out_features(op, out_features)
    parts = ACTIVATIONS[activation][1]  # gates and values, or values alone
    check_packed(op, "packed_in", packed_in, x.dtype, memory.shape[0], x.shape[1])
    most = packed_in.shape[2] // parts
    if hidden_features > most:
        raise ValueError(
            f"rbm::{op}: hidden_features is {hidden_features}, expected between 0 and {most} with {activation}, by the"
            " columns of packed_in"
        )
    check_packed(op, "packed_out", packed_out, x.dtype, memory.shape[0], hidden_features, out_features)


@implement_everywhere("packed_feed_forward")
def _eager(x, memory, packed_in, packed_out, hidden_features, out_features, k, activation, temperature=1.0) -> Tensor:
    arguments = (x, memory, packed_in, packed_out, hidden_features, out_features, k, activation, temperature)
    _check(*arguments)
    return reference.packed_feed_forward(*arguments)


def _fake(x, memory, packed_in, packed_out, hidden_features, out_features, k, activation, temperature=1.0) -> Tensor:
    _check(x, memory, packed_in, packed_out, hidden_features, out_features, k, activation, temperature)
    return x.new_empty((x.shape[0], out_features))


implement_fake("packed_feed_forward", _fake)
refuse_derivative("packed_feed_forward", "expert_matmul")
_call = inference_call("packed_feed_forward", _check, refuses=True)
implement_vmap("packed_feed_forward", rows=("x",))
