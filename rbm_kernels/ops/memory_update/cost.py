"""Bytes and operations of :func:`rbm_kernels.memory_statistics` and :func:`rbm_kernels.memory_update_`.

``s`` bytes an element of ``h [B, D]``, ``a`` of gates, memory and sums: 4, or 8 for float64 rows. There is no
derivative.

What must be, not what a kernel does: on a GPU rows wider than a tile (256 columns in Triton; 1,024 in CUDA, 2,048 of
16 bits) are read a second time for their lengths, again for every 32 experts (16 of half precision, 8 of
float64 and in CUDA) beyond the first, and partial results of at most two ``[E, D]`` for each multiprocessor are written
and read.
"""

import torch

from rbm_kernels.cost import Cost


def statistics(rows: int, features: int, num_experts: int, k: int, dtype: torch.dtype) -> Cost:
    """Bytes ``s B D + (a + 4) B k + a E (D + 1)``; operations ``2 B (k + 1) D``.

    Rows, gates and experts are read, the sums written. Every row is multiplied with itself, for its length, and added
    to the sums of its k experts.
    """
    wide = _accumulation_bytes(dtype)
    return Cost(
        bytes=dtype.itemsize * rows * features + (wide + 4) * rows * k + wide * num_experts * (features + 1),
        flops=2 * rows * (k + 1) * features,
    )


def update(features: int, num_experts: int, dtype: torch.dtype) -> Cost:
    """Bytes ``a E (3 D + 1)``; operations ``5 E D``.

    Memory and sums are read, the memory written. A vector's length takes 2 operations an element, the average 3.
    """
    return Cost(bytes=_accumulation_bytes(dtype) * num_experts * (3 * features + 1), flops=5 * num_experts * features)


def _accumulation_bytes(dtype: torch.dtype) -> int:
    return 8 if dtype == torch.float64 else 4
