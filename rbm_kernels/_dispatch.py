"""Reports which implementation PyTorch's dispatcher picks for an operator on a device."""

import torch

from rbm_kernels import _native
from rbm_kernels._library import STAND_INS, TRITON_OPERATORS

OPERATORS = (
    "cosine_topk",
    "expert_order",
    "expert_matmul",
    "routed_matmul",
    "pack_experts",
    "routed_matmul_packed",
    "routed_matmul_int8",
    "packed_feed_forward",
    "packed_network",
    "sparse_expert_matmul",
    "fold_experts",
    "memory_statistics",
    "memory_update_",
)
DEVICES = ("CPU", "CUDA")
_BUILT = {"CPU": "C++ (librbm_cpu)", "CUDA": "CUDA (librbm_cuda)"}


def implementations() -> dict[str, dict[str, str]]:
    """The implementation that serves each operator on each device, as currently registered."""
    return {operator: {device: _serving(operator, device) for device in DEVICES} for operator in OPERATORS}


def _serving(operator: str, device: str) -> str:
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"rbm::{operator}", device):
        return "reference (eager PyTorch)"
    by_triton = operator in TRITON_OPERATORS and not (operator in STAND_INS and _native.status()["cuda"]["loaded"])
    return "Triton" if device == "CUDA" and by_triton else _BUILT[device]
