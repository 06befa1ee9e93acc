"""How the kernels multiply rows of a dtype, and the compile-time constants that follow from it."""

import torch
import triton
from torch import Tensor

from rbm_kernels._launching import machine_of
from rbm_kernels.ops.expert_matmul import config

# Architectures on which matrix instructions multiply parts of float32 numbers.
_IN_PARTS = (90,)


def architecture_and_precision(x: Tensor) -> tuple[int, str]:
    """Architecture and precision. The interpreter, which uses CPU tensors, gets the configurations of sm_90."""
    return machine_of(x.device).architecture, config.precision_of(x)


def input_precision(architecture: int, precision: str, *, by_rows: bool = False) -> str:
    """``input_precision`` of ``tl.dot``; ``by_rows``: for the weight's gradient, whose products sum over rows.

    Plain float32 has no matrix instruction. On Hopper it is multiplied by three products of TensorFloat-32: a factor is
    the sum of its upper bits and of the next, and the product of both lower parts is left out. The error is about that
    of a float32 sum (tests/helpers/float32_sums.py has the bound). Hopper's instructions take 32-bit operands only with
    the summed dimension contiguous, and rows are not: there, products of bfloat16 parts are faster. Six of them have
    float32's precision, and three more than TensorFloat-32's.
    """
    if triton.knobs.runtime.interpret:  # it computes all of them alike, and does not know some of their names
        return "ieee"
    if torch.version.hip is not None or config.tabulated(architecture) not in _IN_PARTS or precision == "half":
        return "tf32" if precision == "tf32" else "ieee"
    if by_rows:
        return "bf16x3" if precision == "tf32" else "bf16x6"
    return "tf32" if precision == "tf32" else "tf32x3"


def reads_by_column(architecture: int, precision: str, rows: int) -> bool:
    """Whether the gradient of the rows takes a transposed copy of ``weight [E, N, D]``: in float32, for many rows.

    Hopper's matrix instructions take 32-bit operands only with the summed dimension contiguous. Otherwise each program
    transposes what it loads, through shared memory, in three times the time (TensorFloat-32). Every tile of rows reads
    the copy again, which repays it.
    """
    if precision == "half" or config.tabulated(architecture) not in _IN_PARTS:
        return False
    return config.tile_rows(rows, precision) == 128


def tile_constants(tile: config.Tile, architecture: int, precision: str, *, by_rows: bool = False) -> dict:
    """Constants and options of a kernel with this tile; ``by_rows`` as in :func:`input_precision`."""
    return {
        "INPUT_PRECISION": input_precision(architecture, precision, by_rows=by_rows),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "programs": tile.programs if tile.all_registers else None,
    }
