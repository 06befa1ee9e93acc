"""Bytes and operations of :func:`rbm_kernels.cosine_topk`, for ``h [B, D]`` and E memory vectors in float32."""

import torch

from rbm_kernels.cost import Cost


def forward(rows: int, features: int, num_experts: int, k: int, dtype: torch.dtype) -> Cost:
    """Bytes ``s B D + 4 E D + 12 B k``, with ``s`` bytes an element of ``h``; operations ``2 (B E + B + E) D``.

    Rows and memory are read, gates, experts and cosines written. A row is multiplied with every memory vector, and rows
    and memory vectors with themselves, for their length. The top-k and the softmax do not count.
    """
    return Cost(
        bytes=dtype.itemsize * rows * features + 4 * num_experts * features + 12 * rows * k,
        flops=2 * (rows * num_experts + rows + num_experts) * features,
    )


def backward(rows: int, features: int, num_experts: int, k: int, dtype: torch.dtype) -> Cost:
    """Bytes ``2 s B D + 4 E D + 20 B k``; operations ``2 (B k + 2 B + E) D``.

    Rows, memory, the three outputs and their two gradients are read, the rows' gradient written. A row's gradient is a
    sum of its k memory vectors and itself; lengths are formed again.
    """
    return Cost(
        bytes=2 * dtype.itemsize * rows * features + 4 * num_experts * features + 20 * rows * k,
        flops=2 * (rows * k + 2 * rows + num_experts) * features,
    )
