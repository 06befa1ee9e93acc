"""Routing and grouped matmul in one call, for inference."""

from rbm_kernels.ops.routed_matmul.op import routed_matmul

__all__ = ["routed_matmul"]
