"""Tutel's dispatch: rows to a dense block an expert, one batched product, and back with their gates. Read, not tried.

Every expert's block is as long as the longest, so its product takes more operations than ``expert_matmul``'s the less
even the routing is: that is the method, and is what is measured. The length is decided on the host, for which each
call waits. Nothing is dropped (``capacity_factor=0``).
"""

import torch
from torch import Tensor
from tutel.moe import extract_critical, fast_decode, fast_encode

from benchmarks.peers.experts import gate_of_expert


def experts(x: Tensor, weight: Tensor, bias: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """Its router is given the gates as scores, of which the k largest are the gates again."""
    scores = gate_of_expert(gates, experts, weight.shape[0])
    k = experts.shape[1]
    routing, _ = extract_critical(scores, k, loss_fn=None, capacity_factor=0, normalize_gate=False, alignment=8)
    blocks = fast_encode(x.contiguous(), routing)
    return fast_decode(torch.baddbmm(bias[:, None], blocks, weight.transpose(1, 2)), routing)
