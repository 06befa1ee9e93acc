"""Experts packed once for the processor, and products with them: inference on the CPU."""

from rbm_kernels.ops.packed_experts.op import expert_matmul_packed, pack_experts, routed_matmul_packed

__all__ = ["expert_matmul_packed", "pack_experts", "routed_matmul_packed"]
