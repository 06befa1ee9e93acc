"""MegaBlocks' dropless experts with its grouped GEMM: gather, multiply, scatter with gates. For 0.11, not tested.

Its layers have two products. This uses the operators that they consist of, with one product, so that the number of
operations is that of ``expert_matmul``. PyTorch adds the biases, which MegaBlocks does not have. Its grouped GEMM only
supports bfloat16 and counts on the host, so each call waits.
"""

import torch
from megablocks import grouped_gemm_util, ops
from torch import Tensor

from benchmarks.peers.experts import gate_of_expert

grouped_gemm_util.assert_grouped_gemm_is_available()


def experts(x: Tensor, weight: Tensor, bias: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """Follows its ``grouped_forward_once``."""
    if x.dtype != torch.bfloat16:
        raise NotImplementedError("megablocks' grouped GEMM only takes bfloat16")
    num_experts, k = weight.shape[0], experts.shape[1]
    flat, gate = experts.flatten(), gates.to(x.dtype)
    with torch.no_grad():
        by_expert, pairs = ops.sort(flat, max(1, (num_experts - 1).bit_length()))
        counts = ops.histogram(flat, num_experts)
        ends = ops.inclusive_cumsum(counts, 0).view(-1)
    rows = ops.gather(x, pairs, by_expert, ends, k)
    out = grouped_gemm_util.ops.gmm(rows, weight, counts.cpu().long(), trans_b=True)
    y = ops.scatter(out, pairs, by_expert, gate.flatten(), ends, k)
    return y + gate_of_expert(gate, experts, num_experts) @ bias
