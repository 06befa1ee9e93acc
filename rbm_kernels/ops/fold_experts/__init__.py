"""Attention and scale of the experts multiplied into their weights."""

from rbm_kernels.ops.fold_experts.op import fold_experts

__all__ = ["fold_experts"]
