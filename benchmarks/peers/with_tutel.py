"""Tutel's dispatch: rows to a dense block per expert, one batched product, and back with gates. Not tested.

Every expert's block is as long as the longest. So the more uneven the routing is, the more operations its product takes
compared with ``expert_matmul``; this is part of the method and is measured. The host determines the length, so each
call waits. Nothing is dropped (``capacity_factor=0``).
"""

import torch
from torch import Tensor
from tutel.moe import extract_critical, fast_decode, fast_encode

from benchmarks.peers.experts import gate_of_expert


def experts(x: Tensor, weight: Tensor, bias: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """Passes the gates as scores to its router, whose k largest scores are then the gates."""
    scores = gate_of_expert(gates, experts, weight.shape[0])
    k = experts.shape[1]
    routing, _ = extract_critical(scores, k, loss_fn=None, capacity_factor=0, normalize_gate=False, alignment=8)
    blocks = fast_encode(x.contiguous(), routing)
    return fast_decode(torch.baddbmm(bias[:, None], blocks, weight.transpose(1, 2)), routing)
