"""Experts that receive no rows, and a new start for them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rbm.nn.memory_router import MemoryRouter
from rbm.nn.routing_record import visit_router_inputs
from rbm.nn.sparse_rows import Rows, SparseRows, cosine_topk
from rbm.utils.arguments import check_probability

# Rows that lie closer to a memory vector than this cosine are its own: a second vector there would tell nothing apart.
_SAME = 1 - 1e-6


def reset_dead_experts(model: nn.Module, inputs: Any, *, min_share: float = 0.0) -> dict[str, list[int]]:
    """Give experts that receive none of the given rows a new memory vector, at the rows that lie farthest from all.

    Layer by layer in the order of the forward: the memory vector of a dead expert becomes the direction of the row
    whose nearest living memory vector is the farthest; the next one then keeps away from that one too. The expert
    starts as a copy of the one that served this row, so that the row's answer changes little. Training calls it where
    ``rbm.reset_dead_experts`` of the configuration asks for it. An optimiser keeps its moments of the old parameters.

    Vector quantisers restart unused codes in the same way (Dhariwal et al., Jukebox, arXiv 2005.00341, section 3.1).

    Args:
        model: any module with layers that route by memory in it, or such a layer.
        inputs: what the model takes: one value, a tuple of arguments, or a mapping of keyword arguments; as many rows
            as tell which experts are dead.
        min_share: an expert is dead that receives fewer rows than this share of an even load, ``B * k / E``, in
            [0, 1); 0 means no row at all.

    Returns:
        The experts that were reset, by the name of their layer; layers without any are left out.

    Raises:
        TypeError: ``min_share`` is no number.
        ValueError: ``min_share`` out of range, or the model has no layer that routes by memory.
    """
    check_probability("min_share", min_share)
    found: dict[str, list[int]] = {}

    def visit(name: str, layer: MemoryRouter, rows: Rows) -> None:
        experts = layer.route(rows).experts.flatten()
        counts = torch.zeros_like(layer.usage).index_add_(0, experts, torch.ones_like(experts, dtype=torch.int64))
        even = rows.shape[0] * layer.top_k / layer.num_experts
        dead = (counts == 0) | (counts < min_share * even)
        if dead.any() and not dead.all():
            renewed = _renew(layer, rows, dead)
            if renewed:
                found[name] = renewed

    visit_router_inputs(model, inputs, visit)
    return found


def _renew(layer: MemoryRouter, rows: Rows, dead: Tensor) -> list[int]:
    """Reset the experts of the mask ``dead [E]``, as far as there are rows away from all others; which they were."""
    living = (~dead).nonzero().flatten()
    _, nearest, cosines = cosine_topk(rows, layer.memory[living], 1)
    served, closeness = living[nearest[:, 0].long()], cosines[:, 0]
    norms = rows.squared_norms() if isinstance(rows, SparseRows) else rows.to(layer.memory.dtype).square().sum(-1)
    # Rows without a direction, and those that are not finite, are not candidates.
    closeness = torch.where((norms > 0) & closeness.isfinite(), closeness, torch.inf)
    renewed = []
    for expert in dead.nonzero().flatten().tolist():
        row = int(closeness.argmin())
        if not closeness[row] < _SAME:
            break
        chosen = rows[torch.tensor([row], device=rows.device)]
        chosen = chosen.to_dense() if isinstance(chosen, SparseRows) else chosen
        direction = F.normalize(chosen.to(layer.memory.dtype), dim=-1)
        layer.memory[expert] = direction[0]
        for parameter in layer.expert_parameters():
            parameter[expert] = parameter[served[row]]
        closeness = torch.fmax(closeness, cosine_topk(rows, direction, 1)[2][:, 0])
        renewed.append(expert)
    return renewed
