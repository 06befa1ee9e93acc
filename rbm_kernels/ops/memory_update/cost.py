"""Bytes and operations of :func:`rbm_kernels.memory_statistics` and :func:`rbm_kernels.memory_update_`.

``h [B, D]`` has ``s`` bytes per element; gates, memory and sums have ``a``: 4, or 8 for float64 rows. There is no
derivative.

This is the minimum, not what a kernel does. On a GPU, rows wider than a tile (256 columns in Triton, 64 in float64;
1,024 in CUDA, 2,048 for 16 bits, 512 in float64) are read a second time for their norms. Rows are also read again for
every 32 experts beyond the first 32 (16 in half precision; 8 in float64 and in CUDA). Partial results, at most two
``[E, D]`` per multiprocessor, are written and read.
"""

import torch

from rbm_kernels.cost import Cost


def statistics(rows: int, features: int, num_experts: int, k: int, dtype: torch.dtype) -> Cost:
    """Bytes ``s B D + (a + 4) B k + a E (D + 1)``; operations ``2 B (k + 1) D``.

    Rows, gates and experts are read; the sums are written. Every row is multiplied with itself, for its norm, and added
    to the sums of its k experts.
    """
    wide = _accumulation_bytes(dtype)
    return Cost(
        bytes=dtype.itemsize * rows * features + (wide + 4) * rows * k + wide * num_experts * (features + 1),
        flops=2 * rows * (k + 1) * features,
    )


def update(features: int, num_experts: int, dtype: torch.dtype) -> Cost:
    """Bytes ``a E (3 D + 1)``; operations ``5 E D``.

    Memory and sums are read; the memory is written. A vector's norm takes 2 operations per element, the average 3.
    """
    return Cost(bytes=_accumulation_bytes(dtype) * num_experts * (3 * features + 1), flops=5 * num_experts * features)


def _accumulation_bytes(dtype: torch.dtype) -> int:
    return 8 if dtype == torch.float64 else 4


def _counted(h, gates, *_, **__) -> int:
    """``2 B k D``: weights times rows. Norms are no products of matrices."""
    return 2 * gates.numel() * h.shape[1]


FLOP_FORMULAS = {"memory_statistics": _counted}
