"""Adversarial features by projected gradient ascent, which NOSMOG and the RbM code use as augmentation."""

from collections.abc import Callable

import torch
from torch import Tensor


def pgd_perturb(x: Tensor, loss: Callable[[Tensor], Tensor], *, eps: float, steps: int = 5) -> Tensor:
    """``x [B, F]`` plus a perturbation of at most ``eps`` in each entry that increases ``loss``.

    The perturbation starts uniformly at random and takes ``steps`` steps of ``eps / 4`` along the sign of the gradient,
    clamped to ``[-eps, eps]`` after each. The gradients of the parameters do not change.
    """
    # Buffers are written in place: each new one of a batch's size would be zeroed by the system, page by page.
    x = x.detach()
    delta = torch.empty_like(x).uniform_(-eps, eps)
    buffer = torch.empty_like(x)
    for _ in range(steps):
        perturbed = torch.add(x, delta, out=buffer).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(perturbed), perturbed)
        delta.add_(torch.sign(gradient, out=buffer), alpha=eps / 4).clamp_(-eps, eps)
    return delta.add_(x)
