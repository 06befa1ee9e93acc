"""The definition in eager PyTorch."""

import math

import torch
from torch import Tensor

from rbm_kernels import checks

# Logarithms of scales are clamped at log 100, as in the released code.
MAX_LOG_SCALE = math.log(100.0)


def input_scale(attention: Tensor | None, log_scale: Tensor) -> Tensor:
    """``exp(s) exp(a) [E, D]``, by which each expert's inputs are scaled; ``exp(s)`` alone without attention."""
    scale = log_scale.clamp(max=MAX_LOG_SCALE).exp()
    return scale if attention is None else scale * attention.clamp(max=MAX_LOG_SCALE).exp()


def fold_experts(
    weight: Tensor, bias: Tensor | None, attention: Tensor | None, log_scale: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None]:
    """See :func:`rbm_kernels.fold_experts`."""
    scale = input_scale(attention, log_scale)
    weight = weight * (scale if attention is None else scale[:, None, :])
    bias = None if bias is None else bias * input_scale(None, log_scale)
    if dtype is not None:
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    return weight, bias


def backward(
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    attention: Tensor | None,
    log_scale: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Gradients of weight, bias, attention and log_scale, in their dtypes, accumulated in at least float32."""
    wide = checks.accumulation_dtype(weight)
    log = log_scale.to(wide)
    overall = input_scale(None, log)
    scale = overall.reshape(1, 1, 1) if attention is None else input_scale(attention.to(wide), log)[:, None, :]
    grad_weight = weight.new_zeros(weight.shape) if grad_weight is None else grad_weight
    grad_weight = grad_weight.to(wide)
    # Summed over the outputs: what the logarithms of an expert's features get.
    by_feature = (grad_weight * weight).sum(1) * scale[:, 0]
    grad_attention = None if attention is None else by_feature.masked_fill(~(attention <= MAX_LOG_SCALE), 0)
    grad_scale, grad_of_bias = by_feature.sum(), None
    if bias is not None:
        grad_bias = bias.new_zeros(bias.shape) if grad_bias is None else grad_bias
        grad_of_bias = grad_bias.to(wide) * overall
        grad_scale = grad_scale + (grad_of_bias * bias).sum()
    grad_scale = grad_scale.reshape(log_scale.shape).masked_fill(~(log_scale <= MAX_LOG_SCALE), 0)
    dtype = weight.dtype
    return (
        (grad_weight * scale).to(dtype),
        None if grad_of_bias is None else grad_of_bias.to(dtype),
        None if grad_attention is None else grad_attention.to(dtype),
        grad_scale.to(dtype),
    )
