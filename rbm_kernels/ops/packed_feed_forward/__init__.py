"""Feed-forward experts packed once for the processor, routed and multiplied in one call: inference on the CPU."""

from rbm_kernels.ops.packed_feed_forward.op import packed_feed_forward
from rbm_kernels.ops.packed_feed_forward.reference import ACTIVATIONS

__all__ = ["ACTIVATIONS", "packed_feed_forward"]
