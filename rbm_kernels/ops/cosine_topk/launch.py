"""Launch functions of the kernels: outputs, grids and configurations, derived from shapes."""

import torch
import triton
from torch import Tensor

from rbm_kernels._launching import Machine, addressable, contiguous, launcher, machine_of, prepared
from rbm_kernels.ops.cosine_topk.config import configuration
from rbm_kernels.ops.cosine_topk.kernels import cosine_topk_bwd_kernel, cosine_topk_fwd_kernel
from rbm_kernels.ops.cosine_topk.reference import EPS


def cosine_topk(h: Tensor, memory: Tensor, k: int, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """``h [B, D]``, ``memory [E, D]`` float32 -> gates, experts, cosines, each ``[B, k]``."""
    rows, features = h.shape
    device = h.device
    gates = torch.empty((rows, k), dtype=torch.float32, device=device)
    experts = torch.empty((rows, k), dtype=torch.int32, device=device)
    cosines = torch.empty_like(gates)
    if rows == 0:
        return gates, experts, cosines
    h, memory = addressable(h), addressable(memory)
    launch = _prepare(False, rows, features, memory.shape[0], k, h.dtype, machine_of(device))
    launch(h, memory, gates, experts, cosines, rows, h.stride(0), memory.stride(0), temperature)
    return gates, experts, cosines


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
    """Gradient with respect to ``h``: contiguous ``[B, D]``, dtype of ``h``."""
    rows, features = h.shape
    grad_h = torch.empty((rows, features), dtype=h.dtype, device=h.device)
    if grad_h.numel() == 0:
        return grad_h
    if grad_gates is None and grad_cosines is None:
        return grad_h.zero_()
    h, memory = addressable(h), addressable(memory)
    launch = _prepare(True, rows, features, memory.shape[0], experts.shape[1], h.dtype, machine_of(h.device))
    launch(
        contiguous(grad_gates),
        contiguous(grad_cosines),
        h,
        memory,
        gates.contiguous(),
        experts.contiguous(),
        cosines.contiguous(),
        grad_h,
        rows,
        h.stride(0),
        memory.stride(0),
        temperature,
    )
    return grad_h


@prepared
def _prepare(backward: bool, rows: int, features: int, num_experts: int, k: int, dtype: torch.dtype, machine: Machine):
    config = configuration(rows, features, num_experts, dtype, machine, backward=backward)
    return launcher(
        cosine_topk_bwd_kernel if backward else cosine_topk_fwd_kernel,
        (config.programs,),
        D=features,
        E=num_experts,
        K=k,
        EPS=EPS,
        BLOCK_M=config.block_m,
        BLOCK_D=config.block_d,
        BLOCK_E=config.block_e,
        **({} if backward else {"BLOCK_K": triton.next_power_of_2(k)}),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        programs=config.shared_by,
    )
