"""liger_kernel's fused mixture of experts: two products with SwiGLU between them, no biases. Tried: 0.8.5.

Its routing tables need one number on the host, so each call waits for the device once. Tiles are tuned by Triton at the
first call of a shape, before the clock runs. In the interpreter, where the tuner finds no GPU, one tile does for all.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":  # Liger reads it when it is imported
    os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")

from liger_kernel.ops.fused_moe import LigerFusedMoEFunction
from torch import Tensor

from benchmarks.peers.libraries import refuse_exact_float32


def ffn(x: Tensor, up: Tensor, down: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """In Liger's own layouts, which are ours: the SiLU half first in ``up``."""
    refuse_exact_float32(x, "liger_kernel")
    return LigerFusedMoEFunction.apply(x, up, down, experts, gates)
