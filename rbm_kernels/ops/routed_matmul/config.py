"""Configurations of the kernel by shape, and its largest batch. Comments give the reasons; they are not timings."""

from typing import NamedTuple

import torch

from rbm_kernels._launching import Machine, next_power_of_2

# Every program routes its rows again. Up to this size that takes little time compared with reading the weights, while
# launching several operators would take longer than everything else. Beyond it, larger tiles read the weights less
# often, and routing once pays off.
SMALL_BATCH = 64
# The minimum tile size of a matrix instruction. With fewer rows per program, more programs share the work, and fewer
# experts are in each program's union.
BLOCK_M = 16


class Tile(NamedTuple):
    """A program's tile: ``block_n`` output features, and ``block_k`` features per slice of the product.

    ``block_d`` is the number of features per slice of the routing, ``block_e`` the number of slots for experts.
    ``shared_by`` is the number of programs that share the registers of a multiprocessor; None leaves it to ptxas.
    """

    block_n: int
    block_k: int
    block_d: int
    block_e: int
    num_warps: int
    num_stages: int
    shared_by: int | None


def choose_tile(
    rows: int, in_features: int, out_features: int, num_experts: int, dtype: torch.dtype, machine: Machine
) -> Tile:
    """Choose by shape, dtype and machine."""
    single = dtype == torch.float32
    block_e = max(8, next_power_of_2(num_experts))
    # As narrow as a matrix instruction, to spread the weights over the machine. Wider only if there would be more than
    # two programs per multiprocessor.
    block_n, row_tiles = 16, -(-rows // BLOCK_M)
    while block_n < 64 and row_tiles * -(-out_features // block_n) > 2 * machine.multiprocessors:
        block_n *= 2
    # A slice of the weights is 8 KB: a whole row of 256 features in half precision, so that x is read once. Wide
    # float32 tiles use half of that: 16 rows by 64 columns by 32 features spill on sm_80.
    block_k = ((64 if block_n > 16 else 128) if single else 256) * 16 // block_n
    # There are fewer programs than multiprocessors, but ptxas fits several into one by spilling: from sm_100 on at even
    # widths, before it in float32. In the other cases, all registers let it hoist more, and spill.
    alone = in_features % 8 == 0 if machine.architecture >= 100 else single
    # 128 experts by 64 features spill in bfloat16, 8 experts by 64 features on sm_80 in float32 at D = 8,415.
    block_d = min(32 if single else 256, 4096 // block_e)
    return Tile(
        block_n,
        block_k=max(16, min(block_k, next_power_of_2(in_features))),
        block_d=max(16, min(block_d, next_power_of_2(in_features))),
        block_e=block_e,
        num_warps=8 if single or block_e > 64 else 4,
        # Three slices in flight while one is multiplied: the k = 3 experts of one row are loaded at the same time.
        num_stages=4,
        shared_by=1 if alone else None,
    )
