"""What the tests of routing on a GPU compare: results of the operators, with the reference's in float64."""

import torch
from torch.nn.functional import normalize

from rbm_kernels import cosine_topk
from rbm_kernels.ops.cosine_topk import reference


def error(got, exact) -> float:
    return float((got.double() - exact).abs().max()) if exact.numel() else 0.0


def check_forward(outputs, h, memory, k, temperature=1.0) -> None:
    """At most twice the error of eager PyTorch, plus 3e-7: five float32 roundings of a cosine, which is below one.

    The experts are judged by the cosines that they have: rounding among near-ties must not fail a correct kernel.
    """
    exact_gates, _, exact_cosines = reference.cosine_topk(h.double(), memory.double(), k, temperature)
    eager_gates, _, eager_cosines = reference.cosine_topk(h, memory, k, temperature)
    gates, experts, cosines = outputs
    assert gates.dtype == cosines.dtype == torch.float32
    assert experts.dtype == torch.int32
    assert gates.shape == experts.shape == cosines.shape == (len(h), k)
    assert error(cosines, exact_cosines) <= 2 * error(eager_cosines, exact_cosines) + 3e-7
    assert error(gates, exact_gates) <= 2 * error(eager_gates, exact_gates) + 3e-7
    every = normalize(h.double(), dim=-1) @ normalize(memory.double(), dim=-1).T
    assert error(every.gather(1, experts.long()), exact_cosines) <= 3e-7
    ascending = experts.sort(-1).values
    assert (ascending.diff(dim=-1) > 0).all(), "an expert twice in a row"
    assert ((experts >= 0) & (experts < len(memory))).all()


def check_backward(h, memory, k, grad_gates, grad_cosines, temperature=1.0) -> None:
    """At most twice the error of eager PyTorch, plus a floor, in units of the largest gradient over the shortest row.

    The floor is 1e-6: matrix instructions cut each of about six sums by up to 2^-23 of it, where eager PyTorch rounds.
    A sum is below 1.3 units at the gradients and temperatures of the tests.

    The operator's inputs ``gates``, ``experts`` and ``cosines`` are its own, rounded alike for all three.
    """
    rows = h.detach().requires_grad_()
    gates, experts, cosines = cosine_topk(rows, memory, k, temperature=temperature)
    pairs = [(o, g) for o, g in ((gates, grad_gates), (cosines, grad_cosines)) if g is not None]
    (got,) = torch.autograd.grad([o for o, _ in pairs], [rows], [g for _, g in pairs])
    saved = gates.detach(), experts, cosines.detach()
    wide = [None if g is None else g.double() for g in (grad_gates, grad_cosines)]
    exact = reference.backward(
        *wide, h.double(), memory.double(), saved[0].double(), experts, saved[2].double(), temperature
    )
    eager = reference.backward(grad_gates, grad_cosines, h, memory, *saved, temperature)
    assert got.dtype == h.dtype
    assert got.shape == h.shape
    largest = max(float(g.abs().max()) for _, g in pairs)
    size = largest / (temperature * float(h.float().norm(dim=-1).min()))
    assert error(got, exact) <= 2 * error(eager, exact) + 1e-6 * size
