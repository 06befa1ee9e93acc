"""ScatterMoE's ``parallel_linear``: scatters rows to sorted experts and back in one kernel, with biases. Tested: 0.3.0.

It computes what ``expert_matmul`` computes, with as many operations, and keeps every pair's result for the gates'
gradient. Its own ``flatten_sort_count`` uses ``bincount``, for which the host waits; this adapter does not wait.
"""

from scattermoe.kernels import ops
from scattermoe.parallel_experts import parallel_linear
from torch import Tensor

from benchmarks.peers.experts import sort_pairs
from benchmarks.peers.libraries import multiplies_as_tf32
from rbm_kernels.ops.packed_feed_forward.reference import swiglu


def experts(x: Tensor, weight: Tensor, bias: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """A single ``parallel_linear`` that applies the gates and sums."""
    by_expert, gate = _order(experts, weight.shape[0]), gates.to(x.dtype)
    return parallel_linear(x, weight.transpose(1, 2), experts.shape[1], *by_expert, expert_biases=bias, gates=gate)


def ffn(x: Tensor, up: Tensor, down: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """Its ``GLUMLP`` without the module: the hidden pairs stay in the order of their experts."""
    by_expert, gate = _order(experts, up.shape[0]), gates.to(x.dtype)
    hidden = parallel_linear(x, up.transpose(1, 2), experts.shape[1], *by_expert, grouped_out=True)
    return parallel_linear(swiglu(hidden), down.transpose(1, 2), 1, *by_expert, grouped_in=True, gates=gate)


def _order(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorted experts, indices of the pairs, and the end of each expert; sets TensorFloat-32 like PyTorch's switch."""
    ops.ALLOW_TF32 = multiplies_as_tf32()
    pairs, ends = sort_pairs(experts, num_experts)
    return experts.flatten()[pairs], pairs, ends
