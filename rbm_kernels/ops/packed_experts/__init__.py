"""Experts packed once for the processor, and a layer's output with them: inference on the CPU."""

from rbm_kernels.ops.packed_experts.op import pack_experts, routed_matmul_packed

__all__ = ["pack_experts", "routed_matmul_packed"]
