"""Launch functions of the kernels: outputs, grids and tiles, derived from shapes."""

import torch
import triton
from torch import Tensor

from rbm_kernels._launching import contiguous, launcher, prepared
from rbm_kernels.ops.fold_experts.config import choose_tile
from rbm_kernels.ops.fold_experts.kernels import fold_experts_bwd_kernel, fold_experts_fwd_kernel
from rbm_kernels.ops.fold_experts.reference import MAX_LOG_SCALE


def fold_experts(
    weight: Tensor, bias: Tensor | None, attention: Tensor | None, log_scale: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None]:
    """Folded ``weight [E, N, D]`` and ``bias [E, N]``, contiguous, in ``dtype`` or that of ``weight``."""
    dtype = weight.dtype if dtype is None else dtype
    folded = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    folded_bias = None if bias is None else torch.empty(bias.shape, dtype=dtype, device=bias.device)
    _prepare(False, *weight.shape)(
        weight.contiguous(),
        contiguous(bias),
        contiguous(attention),
        log_scale,
        folded,
        folded_bias,
        *weight.shape[1:],
    )
    return folded, folded_bias


def backward(
    grad_weight: Tensor,
    grad_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    attention: Tensor | None,
    log_scale: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Gradients of weight, bias, attention and log_scale, contiguous, in their dtypes."""
    num_experts, out_features, in_features = weight.shape
    made = [
        None if of is None else torch.empty(of.shape, dtype=of.dtype, device=of.device)
        for of in (weight, bias, attention)
    ]
    tile = choose_tile(out_features, in_features, backward=True)
    parts = torch.empty(num_experts * triton.cdiv(in_features, tile.block_d), dtype=torch.float32, device=weight.device)
    _prepare(True, *weight.shape)(
        grad_weight.contiguous(),
        contiguous(grad_bias),
        weight.contiguous(),
        contiguous(bias),
        contiguous(attention),
        log_scale,
        *made,
        parts,
        out_features,
        in_features,
    )
    return *made, parts.sum().to(log_scale.dtype).view(log_scale.shape)


@prepared
def _prepare(backward: bool, num_experts: int, out_features: int, in_features: int):
    tile = choose_tile(out_features, in_features, backward=backward)
    programs = num_experts * triton.cdiv(in_features, tile.block_d)
    return launcher(
        fold_experts_bwd_kernel if backward else fold_experts_fwd_kernel,
        (programs if backward else programs * triton.cdiv(out_features, tile.block_n),),
        MAX_LOG_SCALE=MAX_LOG_SCALE,
        BLOCK_N=tile.block_n,
        BLOCK_D=tile.block_d,
        num_warps=tile.num_warps,
    )
