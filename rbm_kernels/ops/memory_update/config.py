"""How the Triton kernels of the memory update are cut, by shape. Reasons stand beside the numbers.

No time was measured. Counted from machine code (Triton 3.9, D = 256, E = 8, k = 3): a row takes 76 instructions of
warps in bfloat16 for sm_90 and 98 for sm_80, 103 and 157 in float16, 252 and 257 in float32. On an H100 110 can be
issued while a 16-bit row is read, 220 while one of float32 is: memory binds in half precision, issue in float32.
"""

from typing import NamedTuple

import torch

from rbm_kernels._launching import Machine

# Features of a memory vector that its program moves at a time.
MOVED_FEATURES = 1024


class Configuration(NamedTuple):
    """How ``memory_statistics`` is cut: tile sizes, warps, stages, tiles of columns and experts, shares of rows.

    Attributes:
        block_m, block_d, block_e: rows, features and experts of a tile.
        programs: how many a multiprocessor holds.
        shared_by: how many have its registers between them; None leaves their number to ptxas.
        tiles: of features and experts; programs over one share of the rows.
        shares: partial results, each of them a share of the rows.
        norm_block: rows and features of a tile of the kernel of norms, for rows wider than ``block_d``.
        reduce_block: shares and sums of a tile of the kernel that adds the partial results.
    """

    block_m: int
    block_d: int
    block_e: int
    num_warps: int
    num_stages: int
    programs: int
    shared_by: int | None
    tiles: int
    shares: int
    norm_block: tuple[int, int]
    reduce_block: tuple[int, int]


def configuration(rows: int, features: int, num_experts: int, dtype: torch.dtype, machine: Machine) -> Configuration:
    """Choose by shape, dtype and the machine's number of multiprocessors."""
    half = dtype in (torch.float16, torch.bfloat16)
    # Beside the sums of 32 experts 16 rows of half precision have room, beside those of 16 there is room for 32: which
    # takes 0.57 of the instructions for a row (float16 on sm_120), and reads the rows through L2 twice as often.
    block_e = min(8 if dtype == torch.float64 else 16 if half else 32, max(8, _power_of_2(num_experts)))
    if dtype == torch.float64:
        # Without tensor cores all products of a tile stand in registers.
        block_m, widest = 8, 64
    else:
        # More rows a tile share the work on weights. 32 of float32 spill, and so do 32 of odd widths, whose elements
        # have an address each: up to 88 bytes with Triton 3.6. A row of those takes as many instructions either way.
        block_m, widest = 32 if rows > 2048 and half and features % 8 == 0 else 16, 256
    block_d = max(16, min(widest, _power_of_2(features)))
    # Sums of 32 experts fill the registers of twice the warps, and one program a multiprocessor.
    num_warps, programs = (4, 2) if block_e <= 16 else (8, 1)
    # On sm_100 float32 rows on their way while others are added up spill 8 bytes with Triton 3.6.
    waits = machine.architecture // 10 == 10 and dtype == torch.float32 and features <= block_d and block_e <= 16
    tiles = max(1, -(-features // block_d)) * -(-num_experts // block_e)
    # One wave, so that partial results stay few: E D numbers for each share.
    shares = max(1, min(-(-rows // block_m), programs * machine.multiprocessors // tiles))
    added = min(32, _power_of_2(shares))
    return Configuration(
        block_m,
        block_d,
        block_e,
        num_warps,
        num_stages=1 if waits else 2,
        programs=programs,
        # ptxas fits four of bfloat16 by spilling 8 bytes.
        shared_by=programs if machine.architecture // 10 == 10 else None,
        tiles=tiles,
        shares=shares,
        norm_block=(8, 256),
        reduce_block=(added, (512 if dtype == torch.float64 else 1024) // added),
    )


def _power_of_2(size: int) -> int:
    """The next power of two, of 0 that of 1."""
    return 1 << (max(1, size) - 1).bit_length()
