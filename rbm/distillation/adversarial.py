"""Adversarial features by projected gradient ascent, with which NOSMOG and the RbM code augment their training."""

from collections.abc import Callable

import torch
from torch import Tensor


def pgd_perturb(x: Tensor, loss: Callable[[Tensor], Tensor], *, eps: float, steps: int = 5) -> Tensor:
    """``x [B, F]`` plus a disturbance of at most ``eps`` in each entry that raises ``loss``.

    It starts uniformly at random and takes ``steps`` steps of ``eps / 4`` along the sign of the gradient, cut to the
    box after each. Gradients go to the disturbance alone: those of the parameters stay as they were.
    """
    x = x.detach()
    delta = torch.empty_like(x).uniform_(-eps, eps)
    for _ in range(steps):
        delta.requires_grad_()
        (gradient,) = torch.autograd.grad(loss(x + delta), delta)
        delta = (delta.detach() + eps / 4 * gradient.sign()).clamp_(-eps, eps)
    return x + delta
