"""Routing and grouped matmul in one call: what a layer does when it answers, and does not learn."""

from rbm_kernels.ops.routed_matmul.op import routed_matmul

__all__ = ["routed_matmul"]
