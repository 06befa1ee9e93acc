"""Launch functions of the kernels: outputs, grids and configurations, derived from shapes."""

import struct
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from rbm_kernels._launching import Machine, addressable, launcher, machine_of, prepared
from rbm_kernels.checks import accumulation_dtype
from rbm_kernels.ops.cosine_topk.reference import EPS, LONG
from rbm_kernels.ops.memory_update.config import MOVED_FEATURES, configuration
from rbm_kernels.ops.memory_update.kernels import (
    memory_statistics_kernel,
    memory_statistics_norms_kernel,
    memory_statistics_reduce_kernel,
    memory_update_kernel,
)


class _Launches(NamedTuple):
    """Number and size of the partial sums, and the launches; ``norms`` only for rows wider than a tile."""

    shares: int
    size: int
    norms: Callable[..., None] | None
    sums: Callable[..., None]
    reduce: Callable[..., None]


def memory_statistics(
    h: Tensor, gates: Tensor, experts: Tensor, num_experts: int, normalize: bool = True
) -> tuple[Tensor, Tensor]:
    """``h [B, D]``, ``gates`` and ``experts [B, k]`` -> ``weighted_sum [E, D]``, ``total [E]``."""
    rows, features = h.shape
    device, dtype = h.device, accumulation_dtype(h)
    if rows == 0 or experts.shape[1] == 0:
        sums = torch.zeros((num_experts, features), dtype=dtype, device=device)
        return sums, torch.zeros((num_experts,), dtype=dtype, device=device)
    h = addressable(h)
    machine = machine_of(device)
    launches = _prepare_statistics(rows, features, num_experts, experts.shape[1], h.dtype, normalize, machine)
    weighted_sum = torch.empty((num_experts, features), dtype=dtype, device=device)
    total = torch.empty((num_experts,), dtype=dtype, device=device)
    partials = torch.empty((launches.shares, launches.size), dtype=dtype, device=device)
    squares = None
    if launches.norms is not None:
        squares = torch.empty((rows,), dtype=dtype, device=device)
        launches.norms(h, squares, rows, h.stride(0))
    launches.sums(h, gates.contiguous(), experts.contiguous(), squares, partials, rows, h.stride(0))
    launches.reduce(partials, weighted_sum, total, launches.shares, num_experts * features, launches.size)
    return weighted_sum, total


@prepared
def _prepare_statistics(
    rows: int, features: int, num_experts: int, k: int, dtype: torch.dtype, normalize: bool, machine: Machine
) -> _Launches:
    config = configuration(rows, features, num_experts, dtype, machine)
    size = num_experts * (features + 1)
    norms = None
    if features > config.block_d:
        norms = launcher(
            memory_statistics_norms_kernel,
            (triton.cdiv(rows, config.norm_block[0]),),
            D=features,
            BLOCK_M=config.norm_block[0],
            BLOCK_D=config.norm_block[1],
            num_warps=4,
        )
    return _Launches(
        shares=config.shares,
        size=size,
        norms=norms,
        sums=launcher(
            memory_statistics_kernel,
            (config.tiles, config.shares),
            D=features,
            E=num_experts,
            K=k,
            NORMALIZE=normalize,
            EPS=EPS,
            BLOCK_M=config.block_m,
            BLOCK_D=config.block_d,
            BLOCK_E=config.block_e,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            programs=config.shared_by,
        ),
        reduce=launcher(
            memory_statistics_reduce_kernel,
            (triton.cdiv(size, config.reduce_block[1]),),
            BLOCK_P=config.reduce_block[0],
            BLOCK_N=config.reduce_block[1],
            num_warps=4,
        ),
    )


def memory_update_(memory: Tensor, weighted_sum: Tensor, total: Tensor, decay: float, normalize: bool = True) -> None:
    """Move ``memory [E, D]`` in place."""
    if memory.numel() == 0:
        return
    launch = _prepare_update(memory.shape[0], memory.shape[1], memory.dtype, normalize)
    (decay_bits,) = struct.unpack("q", struct.pack("d", decay))
    launch(
        memory,
        weighted_sum.contiguous(),
        total.contiguous(),
        decay_bits,
        memory.shape[1],
        memory.stride(0),
        memory.stride(1),
    )


@prepared
def _prepare_update(num_experts: int, features: int, dtype: torch.dtype, normalize: bool):
    longest, shrink = LONG[dtype]
    return launcher(
        memory_update_kernel,
        (num_experts,),
        NORMALIZE=normalize,
        EPS=EPS,
        LONG=longest,
        SHRINK=shrink,
        BLOCK=min(MOVED_FEATURES, triton.next_power_of_2(features)),
        num_warps=4,
    )
