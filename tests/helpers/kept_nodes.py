"""Whether a part of an autograd graph outlives its step."""

from torch import Tensor


def gradient_node_is_kept(leaf: Tensor) -> bool:
    """Whether something keeps the node that accumulates the leaf's gradient, which otherwise ends with its graph.

    The node belongs to the stream on which it was made. If it lives on, a step cannot be captured in a CUDA graph.
    """
    _accumulator(leaf).metadata["seen"] = True
    return "seen" in _accumulator(leaf).metadata


def _accumulator(leaf: Tensor):
    return leaf.expand_as(leaf).grad_fn.next_functions[0][0]
