"""Configurations of the Triton kernels of the memory update by shape. Comments give the reasons.

Times, and the instructions of a row, are in README.md: half precision is limited by memory, float32 by issue.
"""

from typing import NamedTuple

import torch

from rbm_kernels._launching import Machine, next_power_of_2

# Features of a memory vector that its program moves at once.
MOVED_FEATURES = 1024


class Configuration(NamedTuple):
    """Configuration of ``memory_statistics``: tile sizes, warps, stages, tiles of columns and experts, shares of rows.

    Attributes:
        block_m, block_d, block_e: rows, features and experts of a tile.
        programs: programs per multiprocessor.
        shared_by: number of programs that share the registers of a multiprocessor; None leaves it to ptxas.
        tiles: number of tiles of features and experts; each is a program, for every share of the rows.
        shares: number of partial results, each for a share of the rows.
        norm_block: rows and features per tile of the kernel of norms, for rows wider than ``block_d``.
        reduce_block: shares and sums per tile of the kernel that adds the partial results.
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
    # There is room for 16 rows of half precision next to the sums of 32 experts, and for 32 rows next to those of 16.
    # The latter takes fewer instructions per row, and reads rows through L2 twice as often.
    block_e = min(8 if dtype == torch.float64 else 16 if half else 32, max(8, next_power_of_2(num_experts)))
    if dtype == torch.float64:
        # Without tensor cores all products of a tile are in registers.
        block_m, widest = 8, 64
    else:
        # More rows per tile share the work on weights. But 32 rows spill in float32, and at odd widths, where each
        # element has its own address. There, a row takes as many instructions in either case.
        block_m, widest = 32 if rows > 2048 and half and features % 8 == 0 else 16, 256
    block_d = max(16, min(widest, next_power_of_2(features)))
    # The sums of 32 experts fill the registers of twice the warps, so only one program fits on a multiprocessor.
    num_warps, programs = (4, 2) if block_e <= 16 else (8, 1)
    # On sm_100, loading float32 rows while others are added spills with Triton 3.6.
    waits = machine.architecture // 10 == 10 and dtype == torch.float32 and features <= block_d and block_e <= 16
    tiles = max(1, -(-features // block_d)) * -(-num_experts // block_e)
    # A single wave, so that there are few partial results (E D numbers per share).
    shares = max(1, min(-(-rows // block_m), programs * machine.multiprocessors // tiles))
    added = min(32, next_power_of_2(shares))
    return Configuration(
        block_m,
        block_d,
        block_e,
        num_warps,
        num_stages=1 if waits else 2,
        programs=programs,
        # By default ptxas fits four programs in bfloat16 by spilling.
        shared_by=programs if machine.architecture // 10 == 10 else None,
        tiles=tiles,
        shares=shares,
        norm_block=(8, 256),
        reduce_block=(added, (512 if dtype == torch.float64 else 1024) // added),
    )
