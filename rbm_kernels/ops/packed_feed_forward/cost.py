"""Operations of :func:`rbm_kernels.packed_feed_forward`."""

from rbm_kernels.ops.packed_feed_forward.reference import ACTIVATIONS


def _counted(x, memory, packed_in, _packed_out, hidden_features, out_features, k, activation, *_, **__) -> int:
    """``2 B E D + 2 B k I (D + N)``: products with memory vectors and with experts; ``2 I`` in the first if gated."""
    (rows, features), (_, numbers) = x.shape, ACTIVATIONS[activation]
    experts = k * hidden_features * (numbers * features + out_features)
    return 2 * rows * (memory.shape[0] * features + experts)


FLOP_FORMULAS = {"packed_feed_forward": _counted}
