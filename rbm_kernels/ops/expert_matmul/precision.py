"""How the kernels multiply rows of a dtype, and the compile-time constants that follow from it."""

import torch
import triton
from torch import Tensor

from rbm_kernels._launching import machine_of
from rbm_kernels.ops.expert_matmul import config


def architecture_and_precision(x: Tensor) -> tuple[int, str]:
    """Architecture and precision. The interpreter, which uses CPU tensors, gets the configurations of sm_90."""
    return machine_of(x.device).architecture, precision_of(x)


def precision_of(x: Tensor) -> str:
    """``half``, ``tf32`` or ``ieee``: how the kernels multiply rows of this dtype."""
    if x.dtype != torch.float32:
        return "half"
    # PyTorch's own setting, read from where all three of its interfaces store it.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def tile_constants(tile: config.Tile, architecture: int, precision: str, *, by_rows: bool = False) -> dict:
    """Constants and options of a kernel with this tile; ``by_rows`` as in :func:`config.input_precision`."""
    products = config.input_precision(architecture, precision, by_rows=by_rows)
    return {
        # Triton's interpreter computes all of them alike, and does not know some of their names.
        "INPUT_PRECISION": "ieee" if triton.knobs.runtime.interpret else products,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "programs": tile.programs if tile.all_registers else None,
    }
