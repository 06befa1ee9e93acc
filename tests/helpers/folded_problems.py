"""Arguments of ``fold_experts``, and its results and gradients against those of the definition in float64."""

from collections.abc import Callable

import torch
from torch import Tensor

from rbm_kernels import checks
from rbm_kernels.ops.fold_experts import reference

# Each shape exists for a reason: (E, N, D)
SHAPES = {
    "usual": (8, 40, 48),
    "one of each": (1, 1, 1),
    "odd": (3, 37, 29),
    "one output": (4, 1, 70),
    "one feature": (3, 50, 1),
    "tile and one": (2, 129, 65),
    "several tiles of outputs": (2, 300, 33),
    "several tiles of features": (1, 5, 150),
}
NAMES = ("weight", "bias", "grad_weight", "grad_bias", "grad_attention", "grad_log_scale")


def problem(
    shape: tuple[int, int, int],
    dtype: torch.dtype = torch.float32,
    *,
    bias: bool = True,
    attention: bool = True,
    folded: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[Tensor | None, ...]:
    """Weight, bias, attention, log_scale, and gradients of the folded weight and bias, of dtype ``folded``."""
    num_experts, outputs, features = shape
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    weight, of_bias = draw(*shape).to(dtype), draw(num_experts, outputs).to(dtype)
    of_attention, log_scale = draw(num_experts, features).to(dtype), draw(1).to(dtype)
    grads = draw(*shape).to(folded or dtype), draw(num_experts, outputs).to(folded or dtype)
    given = weight, of_bias if bias else None, of_attention if attention else None, log_scale
    return *given, grads[0], grads[1] if bias else None


def results(fold: Callable, *arguments: Tensor | None, dtype: torch.dtype | None = None) -> tuple[Tensor | None, ...]:
    """What ``fold`` gives for a problem, and the four gradients by autograd: see ``NAMES``."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in arguments[:4]]
    folded, folded_bias = fold(*leaves, dtype=dtype)
    outputs = [folded] if folded_bias is None else [folded, folded_bias]
    needed = [leaf for leaf in leaves if leaf is not None]
    found = iter(torch.autograd.grad(outputs, needed, [grad for grad in arguments[4:] if grad is not None]))
    grads = [None if leaf is None else next(found) for leaf in leaves]
    return folded.detach(), None if folded_bias is None else folded_bias.detach(), *grads


def check(got: tuple[Tensor | None, ...], *arguments: Tensor | None, dtype: torch.dtype | None = None) -> None:
    """At most twice the error of eager PyTorch in the same dtype against float64, and eight roundings; NaN as there.

    Terms of a sum may cancel, by chance with no error in eager PyTorch's order: four roundings of their absolute sum.
    """
    wide = [None if t is None else t.double() for t in arguments]
    exact = results(reference.fold_experts, *wide)
    sizes = [t if t is None or i in (2, 3) else t.abs() for i, t in enumerate(wide)]  # logarithms keep their signs
    bounds = results(reference.fold_experts, *sizes)
    eager = results(reference.fold_experts, *arguments, dtype=dtype)
    summed = torch.finfo(checks.accumulation_dtype(arguments[0])).eps
    for name, value, truth, bound, peer in zip(NAMES, got, exact, bounds, eager, strict=True):
        assert (value is None) == (truth is None), name
        if value is None:
            continue
        assert value.dtype == peer.dtype, name
        assert value.shape == truth.shape, name
        assert value.is_contiguous(), name
        assert torch.equal(value.isnan(), truth.isnan()), name
        known = truth.isfinite()
        assert torch.equal(value[~known].nan_to_num(), truth[~known].to(value.dtype).nan_to_num()), name
        if known.any():
            value, truth, peer = value[known], truth[known], peer[known]
            floor = 8 * torch.finfo(value.dtype).eps * max(1.0, truth.abs().max().item())
            floor += 4 * summed * bound[known].max().item()
            assert (value - truth).abs().max() <= 2 * (peer - truth).abs().max() + floor, name
