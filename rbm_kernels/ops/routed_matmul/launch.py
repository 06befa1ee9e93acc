"""Launch function of the kernel: output, grid and configuration, derived from shapes."""

import torch
import triton
from torch import Tensor

from rbm_kernels._launching import Machine, addressable, contiguous, launcher, machine_of, prepared
from rbm_kernels.ops.cosine_topk.reference import EPS
from rbm_kernels.ops.expert_matmul.config import precision_of
from rbm_kernels.ops.routed_matmul import config
from rbm_kernels.ops.routed_matmul.kernels import routed_matmul_fwd_kernel


def routed_matmul(
    x: Tensor, memory: Tensor, weight: Tensor, bias: Tensor | None, k: int, temperature: float = 1.0
) -> Tensor:
    """``y [B, N]`` from ``x [B, D]``, ``memory [E, D]`` float32, ``weight [E, N, D]``, ``bias [E, N]``."""
    (rows, in_features), (num_experts, out_features) = x.shape, weight.shape[:2]
    y = torch.empty((rows, out_features), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x, memory = addressable(x), addressable(memory)
    launch = _prepare(rows, in_features, out_features, num_experts, k, x.dtype, machine_of(x.device), precision_of(x))
    launch(
        x,
        memory,
        weight.contiguous(),
        contiguous(bias),
        y,
        rows,
        out_features,
        x.stride(0),
        memory.stride(0),
        temperature,
    )
    return y


@prepared
def _prepare(
    rows: int,
    in_features: int,
    out_features: int,
    num_experts: int,
    k: int,
    dtype: torch.dtype,
    machine: Machine,
    precision: str,
):
    tile = config.choose_tile(rows, in_features, out_features, num_experts, dtype, machine)
    return launcher(
        routed_matmul_fwd_kernel,
        (triton.cdiv(out_features, tile.block_n), triton.cdiv(rows, config.BLOCK_M)),
        D=in_features,
        E=num_experts,
        K=k,
        EPS=EPS,
        INPUT_PRECISION="tf32" if precision == "tf32" else "ieee",
        EXACT=precision == "ieee",
        ROWS=1 if rows == 1 and precision == "ieee" else config.BLOCK_M,
        STAGES=tile.num_stages,
        BLOCK_M=config.BLOCK_M,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        BLOCK_D=tile.block_d,
        BLOCK_E=tile.block_e,
        BLOCK_TOP_K=triton.next_power_of_2(k),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        programs=tile.shared_by,
    )
