"""liger_kernel's fused mixture of experts: two products with SwiGLU, no biases. Tested: 0.8.5.

Its routing tables need one number on the host, so each call waits for the device once. Triton tunes its tiles at the
first call of a shape, before it is timed. The interpreter, where tuning finds no GPU, uses a single tile.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":  # Liger reads the variable below when it is imported
    os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")

from liger_kernel.ops.fused_moe import LigerFusedMoEFunction
from torch import Tensor

from benchmarks.peers.libraries import refuse_exact_float32


def ffn(x: Tensor, up: Tensor, down: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """Uses Liger's own layouts, which equal ours: the SiLU half comes first in ``up``."""
    refuse_exact_float32(x, "liger_kernel")
    return LigerFusedMoEFunction.apply(x, up, down, experts, gates)
