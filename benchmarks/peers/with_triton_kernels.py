"""triton_kernels, the kernels from Triton's repository: a ragged matmul that gathers rows, gates and scatters.

It computes what ``expert_matmul`` computes, with as many operations, but has no backward pass. Three generations are
supported: ``matmul``, and two of its predecessor ``matmul_ogs``, which also sums each row's experts. The registry has
no wheel of it (the package of that name is unrelated); vLLM's wheel contains a copy of the oldest generation.
"""

import torch
from torch import Tensor

from benchmarks.peers.experts import inverse, sort_pairs
from benchmarks.peers.libraries import multiplies_as_tf32

try:
    from triton_kernels.matmul import PrecisionConfig, matmul

    matmul_ogs = None
except ImportError:
    from triton_kernels.matmul_ogs import GatherIndx, PrecisionConfig, RoutingData, ScatterIndx, matmul_ogs
try:
    from triton_kernels.tensor import make_ragged_tensor_metadata
except ImportError:
    from triton_kernels.routing import compute_expt_data

    def make_ragged_tensor_metadata(counts: Tensor, pairs: int) -> object:
        return compute_expt_data(counts, len(counts), pairs)


def experts(x: Tensor, weight: Tensor, bias: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """One ragged matmul over the sorted pairs."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, weight, bias, gates)):
        raise NotImplementedError("triton_kernels has no backward pass")
    num_experts, k = weight.shape[0], experts.shape[1]
    pairs, ends = sort_pairs(experts, num_experts)
    counts = ends.diff(prepend=ends.new_zeros(1))
    gate, ragged = gates.flatten()[pairs], make_ragged_tensor_metadata(counts, len(pairs))
    precision, bias = PrecisionConfig(allow_tf32=multiplies_as_tf32()), bias.float()  # it takes no 16-bit biases
    by_column = weight.transpose(1, 2)
    if matmul_ogs is None:
        sources = {"gather_indx": (pairs // k).int(), "scatter_indx": pairs.int()}
        out = matmul(x, by_column, bias, ragged, **sources, precision_config=precision, gammas=gate)
        return out.view(*experts.shape, -1).sum(1)
    to, back = pairs.int(), inverse(pairs).int()
    routing = RoutingData(gate, counts, num_experts, k, ragged)
    places = {"gather_indx": GatherIndx(to, back), "scatter_indx": ScatterIndx(back, to)}
    return matmul_ogs(x, by_column, bias, routing, **places, precision_config=precision, gammas=gate)
