"""Grouped, gate-weighted matmul: each row goes through its own experts."""

from rbm_kernels.ops.expert_matmul.op import expert_matmul

__all__ = ["expert_matmul"]
