"""Definition of the order in plain eager PyTorch: a stable sort by the rank of each row's set of experts."""

from math import comb

import torch
from torch import Tensor


def set_rank(experts: Tensor, num_experts: int) -> Tensor:
    """Rank of each row's set of experts in revolving-door order, int64 ``[B]``.

    Sets with adjacent ranks differ by one expert, so a tile that spans two sets needs only one more expert. With the
    experts ``t_1 < ... < t_k`` counted from one, the rank is ``C(t_k, k) - C(t_{k-1}, k-1) + ... ± C(t_1, 1)``, minus
    one if ``k`` is odd (Kreher and Stinson, *Combinatorial Algorithms*, 1999, section 2.3.3).
    """
    k = experts.shape[1]
    binomials = torch.tensor(
        [[comb(n, size) * (-1) ** (k - size) for size in range(1, k + 1)] for n in range(1, num_experts + 1)],
        dtype=torch.int64,
        device=experts.device,
    )
    ascending = experts.long().sort(dim=-1).values
    terms = binomials.gather(0, ascending)
    return terms.sum(-1) - k % 2


def expert_order(experts: Tensor, num_experts: int, block_m: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order of the rows, and the experts used by each tile of ``block_m`` ordered rows."""
    rows = experts.shape[0]
    order = torch.argsort(set_rank(experts, num_experts), stable=True)

    tiles = -(-rows // block_m)
    used = torch.zeros(tiles * num_experts, dtype=torch.bool, device=experts.device)
    tile_of_row = torch.arange(rows, device=experts.device) // block_m
    used.index_fill_(0, (tile_of_row[:, None] * num_experts + experts[order].long()).flatten(), True)
    used = used.view(tiles, num_experts)

    # A stable sort brings the used experts to the front and keeps them ascending; the rest becomes -1.
    listed, tile_experts = torch.sort(used, dim=-1, descending=True, stable=True)
    tile_experts = torch.where(listed, tile_experts, -1)
    return order.to(torch.int32), tile_experts.to(torch.int32), used.sum(-1, dtype=torch.int32)
