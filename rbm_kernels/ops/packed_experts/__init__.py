"""Experts packed once for the processor, and a layer's answer with them: what a layer that serves on a CPU keeps."""

from rbm_kernels.ops.packed_experts.op import pack_experts, routed_matmul_packed

__all__ = ["pack_experts", "routed_matmul_packed"]
