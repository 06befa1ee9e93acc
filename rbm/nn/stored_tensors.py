"""Refuses to write into tensors that a layer computes from others, where what is written would be lost."""

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
