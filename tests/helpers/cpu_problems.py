"""Problems for the C++ of csrc/cpu, and how good an answer must be: two test files share them."""

import torch

from rbm_kernels.ops.expert_matmul import reference

FEW = 256  # kFewRows: the most rows that take the way of small batches
FLOOR = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def problem(shape, dtype, *, seed=0):
    """x, weight, bias, gates, experts, grad, memory."""
    b, d, n, e, k = shape
    generator = torch.Generator().manual_seed(seed)
    accumulated = torch.float64 if dtype == torch.float64 else torch.float32

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    experts = torch.rand(b, e, generator=generator).argsort(-1)[:, :k].int().contiguous()
    return (
        draw(b, d).to(dtype),
        (draw(e, n, d) / d**0.5).to(dtype),
        draw(e, n).to(dtype),
        draw(b, k).abs().to(accumulated),
        experts,
        draw(b, n).to(dtype),
        draw(e, d).to(accumulated),
    )


def wide(*tensors):
    return tuple(t.double() if torch.is_tensor(t) and t.is_floating_point() else t for t in tensors)


def assert_as_good_as_eager(got, eager, truth, dtype):
    """``eager`` is the reference in the operator's dtype, ``truth`` the reference in float64."""
    for ours, theirs, exact in zip(got, eager, truth, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == exact.shape
        if exact.numel() == 0:
            continue
        scale = exact.abs().max().clamp_min(1e-30)
        error, allowed = (ours.double() - exact).abs().max() / scale, (theirs.double() - exact).abs().max() / scale
        assert error <= 2 * allowed + FLOOR[dtype], f"error {error:.2e}, eager PyTorch {allowed:.2e}"


def all_operators(x, weight, bias, gates, experts, grad):
    """All three operators of the matmul, with bias and gates."""
    num_experts = weight.shape[0]
    return (
        torch.ops.rbm.expert_matmul(x, weight, bias, gates, experts),
        *torch.ops.rbm.expert_matmul_backward_input(grad, x, weight, bias, gates, experts),
        *torch.ops.rbm.expert_matmul_backward_weight(grad, x, gates, experts, num_experts),
    )


def all_operators_in_eager(x, weight, bias, gates, experts, grad):
    return (
        reference.expert_matmul(x, weight, bias, gates, experts),
        *reference.backward_input(grad, x, weight, bias, gates, experts),
        *reference.backward_weight(grad, x, gates, experts, weight.shape[0]),
    )
