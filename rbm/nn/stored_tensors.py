"""Refuses tensors of a layer that were replaced by hand: by computed ones, into which what is written would be lost, or
by those of another number of experts.
"""

from collections.abc import Iterable

from torch import nn


def is_stored(layer: nn.Module, name: str) -> bool:
    """Whether an attribute is a tensor of the layer itself, and not computed from others at each access."""
    return name in layer._parameters or name in layer._buffers


def check_stored(layer: nn.Module, names: Iterable[str], action: str) -> None:
    """RuntimeError if one of these tensors of a layer is parametrised or pruned.

    Args:
        layer: any module.
        names: attributes that are a tensor or None.
        action: what writes into them, with its verb.
    """
    for name in names:
        if is_stored(layer, name) or getattr(layer, name) is None:
            continue
        raise RuntimeError(
            f"{name} is parametrised or pruned, expected a parameter, which {action} in place: first make it one again,"
            f" by torch.nn.utils.parametrize.remove_parametrizations(layer, {name!r}) or prune.remove(layer, {name!r})"
        )


def check_num_experts(layer: nn.Module) -> None:
    """ValueError if a tensor of a layer that routes by memory has another number of experts than the layer."""
    made = layer.pending_total.shape[0]
    numbers = {"num_experts": layer.num_experts}
    for name in ("memory", *layer.expert_names):
        tensor = layer._buffers.get(name, layer._parameters.get(name))
        if tensor is not None and tensor.dim() > 1:  # FSDP1 and DeepSpeed keep a part of a parameter, without its shape
            numbers[name] = tensor.shape[0]
    if any(number != made for number in numbers.values()):
        found = ", ".join(f"{name}: {number}" for name, number in numbers.items())
        raise ValueError(
            f"the numbers of experts are {found}; expected {made} for all, with which the {type(layer).__name__} was"
            " made: make one with another num_experts and copy the tensors into it"
        )
