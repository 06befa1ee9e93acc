"""How the routing kernels are cut, by shape. Reasons stand beside the numbers; what is not yet measured says so."""

from typing import NamedTuple

import torch
import triton

from rbm_kernels._launching import Machine

# Programs that a multiprocessor holds: while one computes, the rows of another are on their way.
HELD = 2


class Configuration(NamedTuple):
    """How a kernel is cut: tile sizes, warps, stages of the loop's pipeline, programs.

    ``shared_by`` programs have the registers of a multiprocessor between them; None leaves their number to ptxas.
    """

    block_m: int
    block_d: int
    block_e: int
    num_warps: int
    num_stages: int
    programs: int
    shared_by: int | None = None


def configuration(
    rows: int, features: int, num_experts: int, dtype: torch.dtype, machine: Machine, *, backward: bool
) -> Configuration:
    """Choose by shape, dtype and machine.

    Counted from the code for sm_90, bfloat16, D = 256, E = 8: 41 instructions of a warp for a row forward, where 110
    take as long to issue as the row takes to read; 156 registers; 83 KB of shared memory, 32 KB of it rows in flight.
    """
    block_e = max(8, triton.next_power_of_2(num_experts))
    wide = dtype == torch.float32 or block_e > 32
    # Registers hold the parts of the rows and sums over many columns: sums [block_m, 4 block_e] stay small, and tiles
    # narrow, save where a bfloat16 row (it has one part) and the memory fit whole.
    if rows <= 2048:
        block_m = 16  # fewer tiles than multiprocessors: spread the rows
    elif backward and dtype == torch.float32:
        block_m = min(32, max(16, 1024 // block_e))
    else:
        block_m = min(64, max(16, (1024 if wide else 2048) // block_e))
    whole_bfloat16 = not backward and dtype == torch.bfloat16 and block_e <= 16 and features <= 256
    if whole_bfloat16 and machine.architecture // 10 not in (9, 10):
        # Matrix instructions take both operands from registers: 149 of them and three programs on sm_80, where 64 rows
        # take 182, and spill 160 bytes with Triton 3.6.
        block_m = min(block_m, 32)
    elif dtype != torch.float32 and machine.architecture // 10 == 10:
        block_m = min(block_m, 32)  # 64 rows at D = 256 do not compile with Triton 3.6: a pass over tensor memory fails
    elif dtype != torch.float32 and machine.architecture // 10 != 9 and features % 8:
        # Addresses of single elements: 64 rows hold 255 registers and spill up to 64 bytes with Triton 3.6, 24 with 3.9
        # (D = 1,433, in float16 and bfloat16); 32 hold 200 to 252.
        block_m = min(block_m, 32)
    widest = 256 if whole_bfloat16 else 32 if wide else 64
    block_d = max(16, min(widest, triton.next_power_of_2(features)))
    many = block_e > 64
    if not backward and dtype == torch.float32 and machine.architecture // 10 == 10:
        many = block_e > 32  # four warps hold 128 registers there, and spill 24 bytes
    tiles = triton.cdiv(rows, block_m)
    whole_row = features <= block_d
    stages = 3 if not (backward or whole_row or wide or dtype == torch.float16) else 2
    if not backward and dtype == torch.float32 and features % 4 and block_e <= 32:
        # Rows that begin anywhere are copied element by element, and in the layout of a matrix instruction's operand 16
        # lanes write to one bank: at D = 8,415 shared memory was busy for 1.2 million cycles a tile, of which issuing
        # takes 0.16. Without copies in flight elements go to registers.
        stages = 1
    return Configuration(
        block_m,
        block_d,
        block_e,
        num_warps=8 if many else 4,
        num_stages=stages,
        # A program that keeps the memory takes many tiles; one that reads it again for each tile takes one.
        programs=min(tiles, HELD * machine.multiprocessors) if whole_row else tiles,
        # ptxas fits a third one by spilling up to 24 bytes.
        shared_by=HELD if machine.architecture // 10 == 12 else None,
    )
