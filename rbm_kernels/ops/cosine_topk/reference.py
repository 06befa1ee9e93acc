"""The meaning of the routing, in plain eager PyTorch (paper, Eq. 3)."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from rbm_kernels.checks import accumulation_dtype

EPS = 1e-12


def cosine_topk(h: Tensor, memory: Tensor, k: int, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Gates, experts and cosines, each ``[B, k]``, of the rows of ``h [B, D]`` against ``memory [E, D]``."""
    dtype = accumulation_dtype(h, memory)
    all_cosines = normalize(h.to(dtype), dim=-1, eps=EPS) @ normalize(memory.to(dtype), dim=-1, eps=EPS).T
    # A stable sort, not topk: among equal cosines the lower expert must win.
    cosines, experts = torch.sort(all_cosines, dim=-1, descending=True, stable=True)
    cosines = cosines[:, :k].contiguous()
    gates = torch.softmax(cosines / temperature, dim=-1)
    return gates, experts[:, :k].to(torch.int32), cosines


def cosine_topk_backward(
    grad_gates: Tensor | None,
    grad_cosines: Tensor | None,
    h: Tensor,
    memory: Tensor,
    gates: Tensor,
    experts: Tensor,
    cosines: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    """Gradient with respect to ``h``, in its dtype; a row shorter than ``EPS`` has no direction and gets zero."""
    dtype = accumulation_dtype(h, memory)
    grad = torch.zeros_like(cosines) if grad_cosines is None else grad_cosines
    if grad_gates is not None:
        softmax_grad = gates * (grad_gates - (gates * grad_gates).sum(-1, keepdim=True))
        grad = grad + softmax_grad / temperature

    norm = h.to(dtype).norm(dim=-1, keepdim=True)
    direction = normalize(h.to(dtype), dim=-1, eps=EPS)
    grad_all = torch.zeros(h.shape[0], memory.shape[0], dtype=dtype, device=h.device)
    grad_all = grad_all.scatter_add_(1, experts.long(), grad)
    along_memory = grad_all @ normalize(memory.to(dtype), dim=-1, eps=EPS)
    along_row = (grad * cosines).sum(-1, keepdim=True) * direction
    grad_h = torch.where(norm > EPS, (along_memory - along_row) / norm.clamp_min(EPS), 0.0)
    return grad_h.to(h.dtype)
