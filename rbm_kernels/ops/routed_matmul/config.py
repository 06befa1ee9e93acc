"""Which batches the kernel serves, and how it is cut, by shape. Reasons stand beside the numbers; no time was measured.

Counted from compiled code (Triton 3.9, sm_80 to sm_120, D = N = 256, E = 8, k = 3): 128 to 149 registers in bfloat16,
166 to 183 in float16, 80 to 101 in float32 with twice the warps; 32 KB of shared memory, 48 in float32.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rbm_kernels._launching import Machine
from rbm_kernels.ops.cosine_topk.op import served_by_triton

# Every program routes its rows again. Up to here that is little beside reading the weights, and the launches of several
# operators take longer than all of it; beyond, larger tiles read the weights less often, and routing once pays.
SMALL_BATCH = 64
# The smallest tile of a matrix instruction: the fewer rows a program has, the more programs share the work, and the
# fewer experts are in its union.
BLOCK_M = 16


class Tile(NamedTuple):
    """A program's tile: ``block_n`` output features, ``block_k`` features of a slice of the product.

    ``block_d`` features of a slice of the routing, ``block_e`` places for experts. ``shared_by`` programs have the
    registers of a multiprocessor between them; None leaves their number to ptxas.
    """

    block_n: int
    block_k: int
    block_d: int
    block_e: int
    num_warps: int
    num_stages: int
    shared_by: int | None


def serves(x: Tensor, memory: Tensor) -> bool:
    """Whether the kernel computes this: few rows, float32 at most, no more experts than a tile holds."""
    return x.shape[0] <= SMALL_BATCH and served_by_triton(x, memory)


def choose_tile(
    rows: int, in_features: int, out_features: int, num_experts: int, dtype: torch.dtype, machine: Machine
) -> Tile:
    """Choose by shape, dtype and machine."""
    single = dtype == torch.float32
    block_e = max(8, _power_of_2(num_experts))
    # As narrow as a matrix instruction, to spread the weights over the machine, and wider only where two programs on
    # each multiprocessor are not enough.
    block_n, row_tiles = 16, -(-rows // BLOCK_M)
    while block_n < 64 and row_tiles * -(-out_features // block_n) > 2 * machine.multiprocessors:
        block_n *= 2
    # A slice of the weights is 8 KB: a whole row of 256 features in half precision, so that x is read once.
    # Wide tiles of float32 take half of it: 16 rows by 64 columns by 32 features spill 16 bytes on sm_80.
    block_k = ((64 if block_n > 16 else 128) if single else 256) * 16 // block_n
    # There are fewer programs than multiprocessors, and ptxas fits several into one by spilling up to 16 bytes: from
    # sm_100 on at even widths, before it in float32. Where it does not, all registers let it hoist more, and spill.
    alone = in_features % 8 == 0 if machine.architecture >= 100 else single
    # 128 experts by 64 features spill in bfloat16, 8 experts by 64 features on sm_80 in float32 at D = 8,415.
    block_d = min(32 if single else 256, 4096 // block_e)
    return Tile(
        block_n,
        block_k=max(16, min(block_k, _power_of_2(in_features))),
        block_d=max(16, min(block_d, _power_of_2(in_features))),
        block_e=block_e,
        num_warps=8 if single or block_e > 64 else 4,
        # Three slices on their way while one is multiplied: the k = 3 experts of one row all at once.
        num_stages=4,
        shared_by=1 if alone else None,
    )


def _power_of_2(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()
