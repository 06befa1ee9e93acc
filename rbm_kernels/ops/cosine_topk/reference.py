"""Definition of the routing in plain eager PyTorch (paper, Eq. 3)."""

import torch
from torch import Tensor

from rbm_kernels.checks import accumulation_dtype

EPS = 1e-12
# The square of a vector longer than the first number may overflow. Multiplied by the second number, a power of two, the
# vector can be squared safely, and stays far longer than EPS.
LONG = {torch.float32: (1e15, 2.0**-80), torch.float64: (1e150, 2.0**-530)}


def cosine_topk(h: Tensor, memory: Tensor, k: int, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Gates, experts and cosines, each ``[B, k]``, of the rows of ``h [B, D]`` against ``memory [E, D]``."""
    # A stable sort, not topk: among equal cosines the lower expert must win.
    _, experts = torch.sort(all_cosines(h, memory), dim=-1, descending=True, stable=True)
    experts = experts[:, :k].to(torch.int32)
    gates, cosines = gates_and_cosines(h, memory, experts, temperature)
    return gates, experts, cosines


def gates_and_cosines(h: Tensor, memory: Tensor, experts: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The gates and cosines of :func:`cosine_topk` for given ``experts [B, k]``, differentiable in ``h``."""
    cosines = all_cosines(h, memory.detach()).gather(1, experts.long())
    return torch.softmax(cosines / temperature, dim=-1), cosines


def all_cosines(h: Tensor, memory: Tensor) -> Tensor:
    """Cosine of each row with each memory vector, ``[B, E]``; constant for rows shorter than ``EPS``."""
    dtype = accumulation_dtype(h, memory)
    rows, vectors = unit(h.to(dtype)), unit(memory.to(dtype))
    if _multiplies_in_tf32(rows):
        # 11 of 24 bits could send a row to the wrong expert.
        return (rows.double() @ vectors.double().T).to(dtype)
    return rows @ vectors.T


def _multiplies_in_tf32(rows: Tensor) -> bool:
    """Whether PyTorch is set to round the factors of these rows' products. A compiler cannot ask for the setting."""
    if not rows.is_cuda or rows.dtype != torch.float32 or torch.compiler.is_compiling():
        return False
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def shrinking(rows: Tensor) -> Tensor:
    """Factors ``[B, 1]`` by which float32 or float64 rows are multiplied so that their squared norms are finite."""
    longest, factor = LONG[rows.dtype]
    return torch.where((rows.detach().abs() > longest).any(-1, keepdim=True), factor, rows.new_ones(()))


def unit(rows: Tensor) -> Tensor:
    """``rows / max(|rows|, EPS)``. A row shorter than ``EPS`` has no direction and no derivative."""
    rows = rows * shrinking(rows)
    square = rows.square().sum(-1, keepdim=True)
    short = square <= EPS**2  # false for NaN: such a row becomes NaN as a whole
    # Select a constant before taking the root: the root of zero has an infinite derivative.
    return torch.where(short, rows.detach() / EPS, rows / torch.where(short, 1.0, square).sqrt())


def backward(
    grad_gates: Tensor | None,
    grad_cosines: Tensor | None,
    h: Tensor,
    memory: Tensor,
    gates: Tensor,
    experts: Tensor,
    cosines: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    """Gradient with respect to ``h``, in its dtype; zero for rows shorter than ``EPS``, which have no direction."""
    dtype = accumulation_dtype(h, memory)
    grad = torch.zeros_like(cosines) if grad_cosines is None else grad_cosines
    if grad_gates is not None:
        softmax_grad = gates * (grad_gates - (gates * grad_gates).sum(-1, keepdim=True))
        grad = grad + softmax_grad / temperature

    rows = h.to(dtype)
    factor = shrinking(rows)
    norm = (rows * factor).square().sum(-1, keepdim=True).sqrt()
    grad_all = torch.zeros(h.shape[0], memory.shape[0], dtype=dtype, device=h.device)
    grad_all = grad_all.scatter_add_(1, experts.long(), grad)
    along_memory = grad_all @ unit(memory.to(dtype))
    along_row = (grad * cosines).sum(-1, keepdim=True) * unit(rows)
    grad_h = torch.where(norm > EPS, (along_memory - along_row) / norm.clamp_min(EPS) * factor, 0.0)
    return grad_h.to(h.dtype)
