"""Resetting experts that receive no rows."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rbm.nn.memory_router import MemoryRouter, routed_layers
from rbm.nn.routing_record import visit_router_inputs
from rbm.nn.sparse_rows import Rows, SparseRows, cosine_topk, to_dense
from rbm.nn.stored_tensors import check_stored
from rbm.utils.arguments import check_probability

# If the cosine of a row and a memory vector is at least this, a second memory vector at the row would be a duplicate.
_SAME = 1 - 1e-6


def reset_dead_experts(model: nn.Module, inputs: Any, *, min_share: float = 0.0) -> dict[str, list[int]]:
    """Move the memory vectors of experts that receive none of the given rows to rows that are far from all others.

    Layers are processed in the order of the forward. The memory vector of a dead expert becomes the direction of the
    row whose nearest living memory vector is the farthest away; the next dead expert takes the new vector into account.
    The expert becomes a copy of the nearest living expert of this row, so that the row's output changes little.
    Training calls this function if ``rbm.reset_dead_experts`` of the configuration is set. An optimiser keeps its
    moments of the old parameters.

    Vector quantisers restart unused codes in the same way (Dhariwal et al., Jukebox, arXiv 2005.00341, section 3.1).

    Args:
        model: a layer that routes by memory, or any module that contains such layers.
        inputs: input of the model: one value, a tuple of arguments, or a mapping of keyword arguments, with enough rows
            to determine which experts are dead. In a distributed process group, the same on all ranks.
        min_share: an expert is dead if it receives fewer rows than this share of an even load, ``B * k / E``, in
            [0, 1); 0 means no row at all.

    Returns:
        The experts that were reset, by the name of their layer, without layers that have none.

    Raises:
        TypeError: ``min_share`` is not a number.
        ValueError: ``min_share`` is out of range, or the model has no layer that routes by memory.
        RuntimeError: the memory of a layer, or a tensor of its experts, is parametrised or pruned.
    """
    check_probability("min_share", min_share)
    for layer in routed_layers(model).values():
        layer.check_memory_is_stored("reset_dead_experts() writes")
        check_stored(layer, layer.expert_names, "reset_dead_experts() writes")
    sources: dict[str, list[int]] = {}

    def visit(name: str, layer: MemoryRouter, rows: Rows) -> None:
        experts = layer.route(rows).experts.flatten()
        counts = torch.zeros_like(layer.usage).index_add_(0, experts, torch.ones_like(experts, dtype=torch.int64))
        even = rows.shape[0] * layer.top_k / layer.num_experts
        dead = (counts == 0) | (counts < min_share * even)
        if dead.any() and not dead.all():
            sources[name] = _renew(layer, rows, dead)
            _copy_experts(layer, sources[name])

    visit_router_inputs(model, inputs, visit)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _copy_sharded(model, sources)
    found = {name: [e for e, source in enumerate(chosen) if source != e] for name, chosen in sources.items()}
    return {name: renewed for name, renewed in found.items() if renewed}


@torch.no_grad()
def _copy_experts(layer: MemoryRouter, sources: list[int]) -> None:
    """Make expert ``i`` a copy of the expert ``sources[i]``."""
    if sources == list(range(layer.num_experts)):
        return
    for parameter in layer.expert_parameters():
        # Written as a whole, because an assignment to one expert of a sharded parameter has no effect.
        parameter.copy_(torch.stack([parameter[source] for source in sources]))


def _copy_sharded(model: nn.Module, sources: dict[str, list[int]]) -> None:
    """Copy the experts again if FSDP2 shards the model: during the forward, a layer that is sharded together with
    others has temporary parameters.
    """
    from torch.distributed.fsdp import FSDPModule  # imported here because only models of several ranks need it

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.reshard()
    if sharded:
        layers = routed_layers(model)
        for name, chosen in sources.items():
            _copy_experts(layers[name], chosen)


def _renew(layer: MemoryRouter, rows: Rows, dead: Tensor) -> list[int]:
    """Move the memory vectors of the mask ``dead [E]`` while there are rows far from all others.

    Returns:
        For each expert, the one that it must become a copy of: itself, or for a moved one a living expert.
    """
    living = (~dead).nonzero().flatten()
    _, nearest, cosines = cosine_topk(rows, layer.memory[living], 1)
    served, closeness = living[nearest[:, 0].long()], cosines[:, 0]
    norms = rows.squared_norms() if isinstance(rows, SparseRows) else rows.to(layer.memory.dtype).square().sum(-1)
    # Rows without a direction, and those that are not finite, are not candidates.
    closeness = torch.where((norms > 0) & closeness.isfinite(), closeness, torch.inf)
    sources = list(range(layer.num_experts))
    for expert in dead.nonzero().flatten().tolist():
        row = int(closeness.argmin())
        if not closeness[row] < _SAME:
            break
        chosen = to_dense(rows[torch.tensor([row], device=rows.device)])
        direction = F.normalize(chosen.to(layer.memory.dtype), dim=-1)
        layer.memory[expert] = direction[0]
        sources[expert] = int(served[row])
        closeness = torch.fmax(closeness, cosine_topk(rows, direction, 1)[2][:, 0])
    return sources
