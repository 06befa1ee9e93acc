"""Bytes and operations of :func:`rbm_kernels.cosine_topk`, for ``h [B, D]`` and E memory vectors in float32."""

import torch

from rbm_kernels.cost import Cost


def forward(rows: int, features: int, num_experts: int, k: int, dtype: torch.dtype) -> Cost:
    """Bytes ``s B D + 4 E D + 12 B k``, with ``s`` bytes per element of ``h``; operations ``2 (B E + B + E) D``.

    Rows and memory are read; gates, experts and cosines are written. Each row is multiplied with every memory vector,
    and rows and memory vectors with themselves, for their norms. The top-k and the softmax are not counted.
    """
    return Cost(
        bytes=dtype.itemsize * rows * features + 4 * num_experts * features + 12 * rows * k,
        flops=2 * (rows * num_experts + rows + num_experts) * features,
    )


def backward(rows: int, features: int, num_experts: int, k: int, dtype: torch.dtype) -> Cost:
    """Bytes ``2 s B D + 4 E D + 20 B k``; operations ``2 (B k + 2 B + E) D``.

    Rows, memory, the three outputs and the gradients of two of them are read; the rows' gradient is written. A row's
    gradient is a sum of its k memory vectors and the row itself. Norms are recomputed.
    """
    return Cost(
        bytes=2 * dtype.itemsize * rows * features + 4 * num_experts * features + 20 * rows * k,
        flops=2 * (rows * k + 2 * rows + num_experts) * features,
    )


def _counted(h, memory, *_, **__) -> int:
    """``2 B E D``: rows times memory vectors. Norms are no products of matrices."""
    return 2 * h.shape[0] * memory.numel()


def _counted_backward(_grad_gates, _grad_cosines, h, _memory, gates, *_, **__) -> int:
    """``2 B k D``: the sum of a row's memory vectors."""
    return 2 * gates.numel() * h.shape[1]


FLOP_FORMULAS = {"cosine_topk": _counted, "cosine_topk_backward": _counted_backward}
