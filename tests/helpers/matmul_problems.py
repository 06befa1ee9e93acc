"""What the tests of the grouped matmul's kernels share: problems, the bound on errors, kernels behind the operators."""

from contextlib import contextmanager

import torch

from rbm_kernels.expert_matmul import op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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


def check_error(name, got, exact, eager):
    """DESIGN.md's rule: at most twice the error of eager PyTorch in that dtype, plus one rounding of the largest."""
    assert got.shape == exact.shape, name
    assert got.dtype == eager.dtype, name
    if exact.numel() == 0:
        return
    floor = torch.finfo(got.dtype).eps * exact.abs().max()
    allowed = 2 * (eager.double() - exact).abs().max() + floor
    error = (got.double() - exact).abs().max()
    assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


@contextmanager
def serving_kernels(monkeypatch):
    """Let the operators reach the kernels from CPU tensors, through the dispatcher and with autograd."""
    if DEVICE == "cuda":
        yield
        return
    library = torch.library.Library("rbm", "IMPL")
    library.impl("expert_matmul", op._cuda, "CPU")
    library.impl("expert_matmul_backward_input", op._cuda_backward_input, "CPU")
    library.impl("expert_matmul_backward_weight", op._cuda_backward_weight, "CPU")
    monkeypatch.setattr(op, "_kernels_serve", lambda x: x.dtype != torch.float64)
    yield
    library._destroy()
