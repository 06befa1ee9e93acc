"""SonicMoE: two products with SwiGLU, for Hopper and Blackwell. Written for 0.1.2.post1, not tested.

``concat_layout`` expects the halves of ``up`` one after the other, as ours are; versions before 0.1.2 lack it. The row
of each pair only depends on the shape, and is prepared in advance.
"""

from functools import cache

import torch
from sonicmoe import moe_general_routing_inputs
from sonicmoe.enums import ActivationType
from torch import Tensor


def ffn(x: Tensor, up: Tensor, down: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """Its entry point for external routing."""
    if x.dtype == torch.float32:
        raise NotImplementedError("sonicmoe only multiplies 16-bit numbers")
    y, _ = moe_general_routing_inputs(
        x,
        gates.flatten(),
        _row_of_pair(*experts.shape, x.device),
        experts.flatten(),
        up.permute(1, 2, 0),
        None,
        down.permute(1, 2, 0),
        None,
        up.shape[0],
        torch.cuda.current_stream().cuda_stream if x.is_cuda else 0,
        ActivationType.SWIGLU,
        is_inference_mode_enabled=not torch.is_grad_enabled(),
        concat_layout=True,
    )
    return y


@cache
def _row_of_pair(rows: int, k: int, device: torch.device) -> Tensor:
    return torch.arange(rows, device=device, dtype=torch.int32).repeat_interleave(k)
