"""Adversarial features by projected gradient ascent, which NOSMOG and the RbM code use as augmentation."""

from collections.abc import Callable

import torch
from torch import Tensor


def pgd_perturb(x: Tensor, loss: Callable[[Tensor], Tensor], *, eps: float, steps: int = 5) -> Tensor:
    """``x [B, F]`` plus a perturbation of at most ``eps`` in each entry that increases ``loss``.

    The perturbation starts uniformly at random and takes ``steps`` steps of ``eps / 4`` along the sign of the gradient,
    clamped to ``[-eps, eps]`` after each. The gradients of the parameters do not change.
    """
    x = x.detach()
    delta = torch.empty_like(x).uniform_(-eps, eps)
    for _ in range(steps):
        delta.requires_grad_()
        (gradient,) = torch.autograd.grad(loss(x + delta), delta)
        delta = (delta.detach() + eps / 4 * gradient.sign()).clamp_(-eps, eps)
    return x + delta
