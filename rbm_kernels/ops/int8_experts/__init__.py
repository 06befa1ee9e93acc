"""8-bit integer experts, a quarter of the size of float32, and a layer's output with them."""

from rbm_kernels.ops.int8_experts.op import quantize_experts, routed_matmul_int8

__all__ = ["quantize_experts", "routed_matmul_int8"]
