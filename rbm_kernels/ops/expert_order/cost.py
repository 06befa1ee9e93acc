"""Bytes of :func:`rbm_kernels.expert_order`, which only computes with integers and has no derivative."""

from rbm_kernels.cost import Cost


def forward(rows: int, num_experts: int, k: int, block_m: int = 128) -> Cost:
    """Bytes ``4 B k + 4 B + 4 T (E + 1)`` with ``T = ceil(B / block_m)`` tiles: experts in, order and tiles out."""
    tiles = -(-rows // block_m)
    return Cost(bytes=4 * (rows * k + rows + tiles * (num_experts + 1)), flops=0)
