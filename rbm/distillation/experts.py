"""Limits on how far experts move apart in training: ``rbm.expert_pull`` and ``rbm.shared_expert`` of the configuration.

After pretraining, all experts of a layer are copies of one expert. The closer they stay, the more the student resembles
a plain MLP. The layer, inference, export and checkpoints do not depend on these limits.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rbm.nn.memory_router import MemoryRouter


def expert_parameters(layers: Iterable[MemoryRouter]) -> list[nn.Parameter]:
    """The parameters of all layers with one slice per expert, each ``[E, ...]``."""
    return [parameter for layer in layers for parameter in layer.expert_parameters()]


def mean_expert(experts: Tensor) -> Tensor:
    """Mean over the first dimension of ``[E, ...]``, without rounding errors if all experts are equal."""
    return experts[0] + (experts - experts[0]).mean(0)


@torch.no_grad()
def pull_together(experts: list[nn.Parameter], share: float) -> None:
    """Move experts ``[E, ...]`` towards their mean by a share in [0, 1]: ``W_e += share (mean(W) - W_e)``.

    Repeated after every optimiser step, this is the elastic force of elastic averaging SGD (Zhang, Choromanska and
    LeCun, NeurIPS 2015) between experts instead of workers. A share of 1 makes them equal, 0 has no effect.
    """
    if share > 0:
        for parameter in experts:
            parameter.lerp_(mean_expert(parameter), share)


class SharedExpert:
    """Trains each expert as ``W_e = S + D_e``: a shared expert plus the residual of expert ``e``.

    This is the shared expert of DeepSeekMoE (Dai et al., 2024, arXiv 2401.06066). Gates sum to one, so the sum over
    experts of ``G_e (S + D_e) h`` is ``S h`` plus the routed ``D_e h``: shared and routed parts fold into the experts
    of an ordinary layer. The optimiser has ``S`` and ``D``, the layer has their sum. Cloned experts start with ``D_e =
    0``.

    Args:
        experts: parameters ``[E, ...]`` of the layers when routing begins.

    Attributes:
        shared: ``S`` of each parameter, ``[...]``.
        residuals: ``D`` of each parameter, ``[E, ...]``.
    """

    @torch.no_grad()
    def __init__(self, experts: list[nn.Parameter]) -> None:
        self.experts = experts
        self.shared = [nn.Parameter(mean_expert(parameter)) for parameter in experts]
        self.residuals = [nn.Parameter(own - shared) for own, shared in zip(experts, self.shared, strict=True)]

    def take_gradients(self) -> None:
        """Move the gradients of the experts to ``D``, and their sum to ``S``."""
        for parameter, shared, residual in zip(self.experts, self.shared, self.residuals, strict=True):
            shared.grad = None if parameter.grad is None else parameter.grad.sum(0)
            residual.grad, parameter.grad = parameter.grad, None

    @torch.no_grad()
    def write_experts(self) -> None:
        """Write ``S + D`` to the layers."""
        for parameter, shared, residual in zip(self.experts, self.shared, self.residuals, strict=True):
            parameter.copy_(shared + residual)

    @torch.no_grad()
    def read_residuals(self) -> None:
        """Compute ``D`` from the layers' experts, after other code has changed them."""
        for parameter, shared, residual in zip(self.experts, self.shared, self.residuals, strict=True):
            residual.copy_(parameter - shared)

    def state(self) -> dict[str, Any]:
        """State for :meth:`restore`."""
        return {"shared": [part.detach() for part in self.shared], "residuals": [d.detach() for d in self.residuals]}

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state` returned."""
        for name in ("shared", "residuals"):
            for part, saved in zip(getattr(self, name), state[name], strict=True):
                part.copy_(saved)
