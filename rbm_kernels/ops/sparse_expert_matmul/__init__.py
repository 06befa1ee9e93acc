"""Grouped matmul over sparse rows."""

from rbm_kernels.ops.sparse_expert_matmul.op import sparse_expert_matmul, sparse_expert_matmul_backward_weight

__all__ = ["sparse_expert_matmul", "sparse_expert_matmul_backward_weight"]
