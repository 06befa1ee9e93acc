"""Expert usage: counts of rows per expert that layers keep on request, shown as a table.

>>> import torch, rbm
>>> model = torch.nn.Sequential(torch.nn.Linear(4, 6), rbm.FusedRbMLayer(6, 3, num_experts=4, top_k=2))
>>> rbm.track_usage(model)
>>> y = model(torch.randn(5, 4))
>>> int(rbm.expert_usage(model)["1"].counts.sum())  # five rows, two experts each
10
"""

import math
from typing import NamedTuple

from torch import Tensor, nn

from rbm.nn.memory_router import routed_layers


class LayerUsage(NamedTuple):
    """The rows that a layer's experts have received since counting began.

    Attributes:
        counts: int64 ``[E]``, rows per expert, on the CPU. They add up to ``top_k`` times the layer's rows.
        top_k: experts a row uses.
    """

    counts: Tensor
    top_k: int

    @property
    def rows(self) -> int:
        """Number of rows that the layer routed."""
        return int(self.counts.sum()) // self.top_k

    @property
    def shares(self) -> Tensor:
        """Share of the rows that used each expert, ``[E]``: ``top_k / E`` each if all are used equally."""
        return self.counts / max(1, self.rows)

    @property
    def evenness(self) -> float:
        """Entropy of the counts, relative to equal counts: 1 if all experts are used equally, 0 if only one is."""
        used = self.counts[self.counts > 0].double()
        if len(self.counts) == 1 or len(used) == 0:
            return 1.0
        if len(used) == 1:
            return 0.0
        shares = used / used.sum()
        return float((shares * -shares.log()).sum()) / math.log(len(self.counts))

    @property
    def dead(self) -> list[int]:
        """Experts that received no row."""
        return (self.counts == 0).nonzero().flatten().tolist()


class ExpertUsage(dict[str, LayerUsage]):
    """The :class:`LayerUsage` of each layer by name; ``print`` shows it as a table."""

    def __str__(self) -> str:
        width = max([5, *map(len, self)])
        lines = [f"{'layer':<{width}} {'rows':>11} {'experts':>7} {'least':>6} {'most':>6} {'evenness':>8} {'dead':>5}"]
        for name, layer in self.items():
            least, most = (float(share) for share in (layer.shares.min(), layer.shares.max()))
            lines.append(
                f"{name:<{width}} {layer.rows:>11,} {len(layer.counts):>7} {least:>6.1%} {most:>6.1%}"
                f" {layer.evenness:>8.2f} {len(layer.dead):>5}"
            )
        return "\n".join(lines)


def track_usage(model: nn.Module, enabled: bool = True) -> None:
    """Start counting the rows of each expert in every layer of a model, from zero; or stop counting.

    In training, counting costs one addition per row and chosen expert. In inference, where routing and experts are one
    operator, rows are routed a second time. Counting works under ``torch.compile``, in eval mode, and in copies of the
    model. Forwards that activation checkpointing repeats are not counted.

    Args:
        model: a layer that routes by memory, or any module that contains such layers.
        enabled: False stops counting and keeps the counts.

    Raises:
        ValueError: the model has no such layer.
    """
    for layer in routed_layers(model).values():
        layer.track_usage = enabled
        if enabled:
            layer.reset_usage()


def expert_usage(model: nn.Module) -> ExpertUsage:
    """How many rows each expert of each layer has received since :func:`track_usage`.

    The counts are those of this process. The call synchronises with the device.

    Args:
        model: a layer that routes by memory, or any module that contains such layers.

    Returns:
        A mapping from layer names to :class:`LayerUsage`. It prints as a table with the smallest and the largest share
        of the rows that an expert received.

    Raises:
        ValueError: the model has no such layer, or no layer counts.
    """
    layers = routed_layers(model)
    if not any(layer.track_usage or layer.usage.any() for layer in layers.values()):
        raise ValueError("usage of the model is not counted: call rbm.track_usage(model) before its forwards")
    return ExpertUsage({name: LayerUsage(layer.usage.cpu().clone(), layer.top_k) for name, layer in layers.items()})
