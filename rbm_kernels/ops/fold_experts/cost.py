"""Bytes and operations of :func:`rbm_kernels.fold_experts`."""

import torch

from rbm_kernels.cost import Cost


def forward(
    in_features: int, out_features: int, num_experts: int, dtype: torch.dtype, folded: torch.dtype | None = None
) -> Cost:
    """Bytes ``(s + s') E N (D + 1) + s (E D + 1)``; operations ``E N (D + 1) + 2 E D``.

    Weights, biases, attention and scale of ``s`` bytes are read, folded ones of ``s'`` bytes are written. An
    exponential counts as one operation.
    """
    size, pairs = dtype.itemsize, num_experts * in_features
    numbers = num_experts * out_features * (in_features + 1)
    return Cost((size + (folded or dtype).itemsize) * numbers + size * (pairs + 1), numbers + 2 * pairs)


def backward(
    in_features: int, out_features: int, num_experts: int, dtype: torch.dtype, folded: torch.dtype | None = None
) -> Cost:
    """Bytes ``(2 s + s') E N (D + 1) + 2 s (E D + 1)``; operations ``3 E N (D + 1) + 3 E D``.

    Parameters of ``s`` bytes and gradients of ``s'`` bytes are read, and gradients of all parameters are written. A
    weight's gradient is a product, and one product and one sum are for the attention's.
    """
    size, pairs = dtype.itemsize, num_experts * in_features
    numbers = num_experts * out_features * (in_features + 1)
    return Cost((2 * size + (folded or dtype).itemsize) * numbers + 2 * size * (pairs + 1), 3 * numbers + 3 * pairs)
