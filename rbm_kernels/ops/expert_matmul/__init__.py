"""Each row through its own experts: grouped, gate-weighted matmul."""

from rbm_kernels.ops.expert_matmul.op import expert_matmul

__all__ = ["expert_matmul"]
