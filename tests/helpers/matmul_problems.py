"""What the tests of the grouped matmul's kernels share: problems, the bound on errors, kernels behind the operators."""

from contextlib import contextmanager

import torch
import triton_on_cpu

from rbm_kernels.ops.expert_matmul import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("y", "grad_x", "grad_gates", "grad_x alone", "grad_weight", "grad_bias")


def problem(shape, dtype=torch.float32, seed=0, chosen=None, device=DEVICE):
    """x, weight, bias, gates, experts and the gradient that arrives, for ``(B, D, N, E, k)``."""
    b, d, n, e, k = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=generator).to(device, dtype)

    x, weight, bias, grad = normal(b, d), normal(e, n, d), normal(e, n), normal(b, n)
    gates = torch.rand(b, k, generator=generator).softmax(-1).to(device)
    experts = torch.rand(b, e, generator=generator).argsort(-1)[:, :k] if chosen is None else chosen
    return x, weight, bias, gates, experts.int().contiguous().to(device), grad


def in_float64(arguments):
    """The same problem for the exact reference."""
    return [a.double() if a is not None and a.is_floating_point() else a for a in arguments]


def by_reference(x, weight, bias, gates, experts, grad):
    """All results of a problem, in the order of NAMES."""
    grad_x, grad_gates = reference.backward_input(grad, x, weight, bias, gates, experts)
    grad_weight, grad_bias = reference.backward_weight(grad, x, gates, experts, weight.shape[0])
    y = reference.expert_matmul(x, weight, bias, gates, experts)
    return y, grad_x, grad_gates, grad_x, grad_weight, grad_bias if bias is not None else grad_bias.new_empty(0)


def by_operators(x, weight, bias, gates, experts, grad):
    """All results of a problem, in the order of NAMES, from the operators without autograd."""
    ops, order = torch.ops.rbm, (None, None, None, 0)
    y = ops.expert_matmul(x, weight, bias, gates, experts, *order)
    grad_x, grad_gates = ops.expert_matmul_backward_input(grad, x, weight, bias, gates, experts, True, *order)
    alone, _ = ops.expert_matmul_backward_input(grad, x, weight, bias, gates, experts, False, *order)
    grad_weight, grad_bias = ops.expert_matmul_backward_weight(grad, x, gates, experts, weight.shape[0], True)
    return y, grad_x, grad_gates, alone, grad_weight, grad_bias


def check_error(name, got, exact, eager):
    """At most twice the error of eager PyTorch in that dtype, plus one rounding of the largest number."""
    assert got.shape == exact.shape, name
    assert got.dtype == eager.dtype, name
    if exact.numel() == 0:
        return
    floor = torch.finfo(got.dtype).eps * exact.abs().max()
    allowed = 2 * (eager.double() - exact).abs().max() + floor
    error = (got.double() - exact).abs().max()
    assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


def error_of_share(rows, slice_rows, std):
    """Standard deviation of a float32 sum of ``rows`` random products, added by slices: see its test for why."""
    return 2**-24 * std * (rows * (rows / slice_rows + slice_rows) / 6) ** 0.5


@contextmanager
def serving_kernels(operators=triton_on_cpu.MATMUL):
    """Let operators reach the kernels from CPU tensors, through the dispatcher and with autograd."""
    if DEVICE == "cuda":
        yield
        return
    with triton_on_cpu.serving_kernels(operators):
        yield
