"""The parameters of a model: their number, their dtype, and groups for weight decay."""

import itertools
from typing import Any

import torch
from torch import nn

from rbm.nn.memory_router import MemoryRouter
from rbm.utils.arguments import check_weight


def count_parameters(student: nn.Module) -> tuple[int, int]:
    """Number of parameters of a student, and of those that the prediction of one node uses: ``(total, active)``.

    Memory vectors count in both, because a router compares every row with all of them. Of the weights, biases and
    attentions of a layer's ``num_experts`` experts, those of ``top_k`` experts are active.
    """
    total = sum(parameter.numel() for parameter in student.parameters())
    idle = 0
    for layer in student.modules():
        if not hasattr(layer, "num_experts"):
            continue
        if isinstance(layer, MemoryRouter):
            total += layer.memory.numel()
            experts = layer.expert_parameters()
        else:
            experts = [layer.weight, layer.bias]
        idle += (layer.num_experts - layer.top_k) * sum(p[0].numel() for p in experts)
    return total, total - idle


def dtype_of(module: nn.Module) -> torch.dtype:
    """Dtype of a module's input: that of its first floating-point parameter or buffer, or float32 if it has none. An
    exported or quantised student has only buffers.
    """
    tensors = itertools.chain(module.parameters(), module.buffers())
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters in two groups for an optimiser: with and without weight decay.

    ``log_scale`` and ``attention`` are logarithms of factors, which weight decay would pull towards one; biases and the
    scales of norms are excluded by common practice. The usual rule, to exclude parameters with one dimension, does not
    find these in layers of experts, where they have one more dimension. ::

        optimizer = torch.optim.AdamW(rbm.parameter_groups(model, weight_decay=0.01), lr=1e-3)

    Args:
        model: any module.
        weight_decay: of the first group, at least 0.

    Returns:
        ``[{"params": [...], "weight_decay": weight_decay}, {"params": [...], "weight_decay": 0.0}]``: matrices, and
        everything else. Every parameter that requires a gradient is in one of them, once.

    Raises:
        TypeError: ``model`` is not a module, or ``weight_decay`` is not a number.
        ValueError: ``weight_decay`` is negative, infinite or NaN.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected a torch.nn.Module, not its parameters")
    check_weight("weight_decay", weight_decay)
    exempt = set()
    for layer in model.modules():
        if isinstance(layer, MemoryRouter):
            names = ("bias", "bias_in", "bias_out", "attention", "log_scale")
            exempt |= {id(getattr(layer, name, None)) for name in names}
            # What pruning and parametrisations compute these tensors from.
            exempt |= {id(getattr(layer, f"{name}_orig", None)) for name in names}
            parametrized = getattr(layer, "parametrizations", {})
            exempt |= {id(p) for name in names if name in parametrized for p in parametrized[name].parameters()}
        elif hasattr(layer, "num_experts") and isinstance(getattr(layer, "bias", None), nn.Parameter):
            exempt.add(id(layer.bias))
    decayed, kept = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (kept if id(parameter) in exempt or parameter.dim() < 2 else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
