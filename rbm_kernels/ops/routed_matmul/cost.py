"""Bytes and operations of :func:`rbm_kernels.routed_matmul`: routing and experts, with nothing written between them."""

import torch

from rbm_kernels.cost import Cost
from rbm_kernels.ops.cosine_topk import cost as cosine_topk
from rbm_kernels.ops.expert_matmul import cost as expert_matmul


def forward(rows: int, in_features: int, out_features: int, num_experts: int, k: int, dtype: torch.dtype) -> Cost:
    """Bytes ``s (B D + B N + E' N (D + 1)) + 4 E D``; operations of both operators.

    Rows, memory and the weights of ``E' = min(E, B k)`` experts are read; y is written.
    """
    both = cosine_topk.forward(rows, in_features, num_experts, k, dtype) + expert_matmul.forward(
        rows, in_features, out_features, num_experts, k, dtype
    )
    # Rows are read only once. Cosines are not written, and gates and experts are neither written nor read.
    return both + Cost(bytes=-(dtype.itemsize * rows * in_features + 20 * rows * k), flops=0)


def _counted(x, memory, weight, _bias, k, *_, **__) -> int:
    return counted(x.shape[0], x.shape[1], weight.shape[1], memory.shape[0], k)


def counted(rows: int, in_features: int, out_features: int, num_experts: int, k: int) -> int:
    """``2 B E D + 2 B k D N``: the products with memory vectors and with experts."""
    return 2 * rows * in_features * (num_experts + k * out_features)


FLOP_FORMULAS = {"routed_matmul": _counted}
