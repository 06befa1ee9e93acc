"""Limits on how far apart experts move while they train.

After pretraining all experts of a layer are copies of one. The closer they stay, the nearer the student is to a plain
MLP. Two means of the configuration are here, ``rbm.expert_pull`` and ``rbm.shared_expert``. Layer, inference, export
and checkpoints do not depend on them.
"""

from typing import Any

import torch
from torch import Tensor, nn


def expert_parameters(layers: list[nn.Module]) -> list[nn.Parameter]:
    """What each expert of mixture layers has of its own: weight, bias, attention, each ``[E, ...]``."""
    return [
        parameter
        for layer in layers
        for name in ("weight", "bias", "attention")
        if (parameter := getattr(layer, name, None)) is not None
    ]


def mean_expert(experts: Tensor) -> Tensor:
    """Mean over the first dimension of ``[E, ...]``; of equal experts exactly one of them, without rounding."""
    return experts[0] + (experts - experts[0]).mean(0)


@torch.no_grad()
def pull_together(experts: list[nn.Parameter], share: float) -> None:
    """Move experts ``[E, ...]`` by a share, in [0, 1], of their way to their mean: ``W_e += share (mean(W) - W_e)``.

    Repeated after every optimiser step, this is the elastic force of elastic averaging SGD (Zhang, Choromanska and
    LeCun, NeurIPS 2015) between experts instead of workers. A share of 1 makes them equal, 0 does nothing.
    """
    if share > 0:
        for parameter in experts:
            parameter.lerp_(mean_expert(parameter), share)


class SharedExpert:
    """Trains each expert as ``W_e = S + D_e``: an expert that all rows share, and what expert ``e`` adds to it.

    The idea is DeepSeekMoE's shared expert (Dai et al., 2024, arXiv 2401.06066). Gates sum to one, so that the sum over
    experts of ``G_e (S + D_e) h`` is ``S h`` beside the routed ``D_e h``: shared and routed parts fold into the experts
    of an ordinary layer. The optimiser holds ``S`` and ``D``, the layer holds their sum. Cloned experts begin with
    ``D_e = 0``.

    Args:
        experts: the layers' parameters ``[E, ...]``, as they are when routing begins.

    Attributes:
        shared: ``S`` of each, ``[...]``.
        residuals: ``D`` of each, ``[E, ...]``.
    """

    @torch.no_grad()
    def __init__(self, experts: list[nn.Parameter]) -> None:
        self.experts = experts
        self.shared = [nn.Parameter(mean_expert(each)) for each in experts]
        self.residuals = [nn.Parameter(each - shared) for each, shared in zip(experts, self.shared, strict=True)]

    def take_gradients(self) -> None:
        """Hand the experts' gradients to ``S``, which gets their sum, and to ``D``; the experts keep none."""
        for each, shared, residual in zip(self.experts, self.shared, self.residuals, strict=True):
            shared.grad = None if each.grad is None else each.grad.sum(0)
            residual.grad, each.grad = each.grad, None

    @torch.no_grad()
    def write_experts(self) -> None:
        """Give the layers ``S + D``."""
        for each, shared, residual in zip(self.experts, self.shared, self.residuals, strict=True):
            each.copy_(shared + residual)

    @torch.no_grad()
    def read_residuals(self) -> None:
        """Compute ``D`` from the layers' experts, after other code has changed them."""
        for each, shared, residual in zip(self.experts, self.shared, self.residuals, strict=True):
            residual.copy_(each - shared)

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` takes."""
        return {"shared": [part.detach() for part in self.shared], "residuals": [d.detach() for d in self.residuals]}

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Take back the parts that :meth:`state` gave."""
        for name in ("shared", "residuals"):
            for part, saved in zip(getattr(self, name), state[name], strict=True):
                part.copy_(saved)
