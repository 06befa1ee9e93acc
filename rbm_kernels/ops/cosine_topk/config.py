"""Launch configurations of the routing kernels by shape. Comments give the reasons, and say what was not measured."""

from typing import NamedTuple

import torch

from rbm_kernels._launching import Machine, next_power_of_2

# Programs resident on a multiprocessor: while one computes, the rows of another are being loaded.
HELD = 2


class Configuration(NamedTuple):
    """Configuration of a kernel: tile sizes, warps, pipeline stages of the loop, programs.

    ``shared_by`` is the number of programs that share the registers of a multiprocessor; None leaves it to ptxas.
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
    """Choose by shape, dtype and machine."""
    block_e = max(8, next_power_of_2(num_experts))
    wide = dtype == torch.float32 or block_e > 32
    # Registers hold the parts of the rows and the sums [block_m, 4 block_e] over many columns. So the sums stay small
    # and tiles narrow, except when a bfloat16 row (which has one part) and the memory fit whole.
    if rows <= 2048:
        block_m = 16  # fewer tiles than multiprocessors: spread the rows
    elif backward and dtype == torch.float32:
        block_m = min(32, max(16, 1024 // block_e))
    else:
        block_m = min(64, max(16, (1024 if wide else 2048) // block_e))
    whole_bfloat16 = not backward and dtype == torch.bfloat16 and block_e <= 16 and features <= 256
    if whole_bfloat16 and machine.architecture // 10 not in (9, 10):
        # Matrix instructions take both operands from registers: 64 rows spill with Triton 3.6.
        block_m = min(block_m, 32)
    elif dtype != torch.float32 and machine.architecture // 10 == 10:
        block_m = min(block_m, 32)  # 64 rows at D = 256 do not compile with Triton 3.6: a tensor memory pass fails
    elif dtype != torch.float32 and machine.architecture // 10 != 9 and features % 8:
        # Each element needs its own address: 64 rows spill with Triton 3.6 and 3.9 (D = 1,433, float16 and bfloat16).
        block_m = min(block_m, 32)
    widest = 256 if whole_bfloat16 else 32 if wide else 64
    block_d = max(16, min(widest, next_power_of_2(features)))
    many = block_e > 64
    if not backward and dtype == torch.float32 and machine.architecture // 10 == 10:
        many = block_e > 32  # four warps are limited to 128 registers there, and spill
    tiles = -(-rows // block_m)
    whole_row = features <= block_d
    stages = 3 if not (backward or whole_row or wide or dtype == torch.float16) else 2
    if backward and dtype != torch.float32 and machine.architecture // 10 == 9:
        stages = 1  # gpu_tune.csv, H100 (bfloat16, D = 256, E = 8): 103 µs, with two stages 119
    if not backward and dtype == torch.float32 and features % 4 and block_e <= 32:
        # Unaligned rows are copied element by element, and in the layout of a matrix instruction's operand 16 lanes
        # write to one bank, which takes longer than issuing. Without asynchronous copies the elements go to registers.
        stages = 1
    return Configuration(
        block_m,
        block_d,
        block_e,
        num_warps=8 if many else 4,
        num_stages=stages,
        # A program that keeps the memory processes many tiles; one that reads it again for each tile processes one.
        programs=min(tiles, HELD * machine.multiprocessors) if whole_row else tiles,
        # By default ptxas fits a third program by spilling.
        shared_by=HELD if machine.architecture // 10 == 12 else None,
    )
