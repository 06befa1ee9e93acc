"""Routing on the GPU: one Triton kernel forward and one backward, built from the functions in ``blocks.py``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rbm_kernels._launching import Machine, launcher, machine_of, prepared
from rbm_kernels.ops.cosine_topk.blocks import (
    below_each_other,
    choose,
    dot_float32,
    dots_and_squares,
    dots_and_squares_of_long,
    has_long,
    is_long,
    load_memory,
    load_rows,
    scaled,
    shrinking,
    side_by_side,
    split,
    square_norm,
    squares,
)
from rbm_kernels.ops.cosine_topk.config import configuration
from rbm_kernels.ops.cosine_topk.reference import EPS


@triton.jit
def cosine_topk_fwd_kernel(
    h_ptr,
    memory_ptr,
    gates_ptr,
    experts_ptr,
    cosines_ptr,
    B,
    h_stride,
    memory_stride,
    temperature,
    D: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Route rows: ``h [B, D]``, ``memory [E, D]`` float32 -> ``gates``, ``experts``, ``cosines``, each ``[B, K]``."""
    sharpness = 1.0 / temperature
    choices = tl.arange(0, BLOCK_K)
    if D <= BLOCK_D:
        # The memory stays on the chip while one tile of rows after the other passes it.
        b_memory = load_memory(memory_ptr, memory_stride, 0, D, E, BLOCK_D, BLOCK_E)
        b_memory_square = tl.sum(squares(b_memory), 0)
        b_parts = side_by_side(b_memory)
    for tile in tl.range(tl.program_id(0), tl.cdiv(B, BLOCK_M), tl.num_programs(0)):
        first = tl.cast(tile, tl.int64) * BLOCK_M
        rows = tl.arange(0, BLOCK_M)
        m_rows = rows < B - tile * BLOCK_M
        if D <= BLOCK_D:
            b_h = load_rows(h_ptr + first * h_stride, h_stride, rows, m_rows, 0, D, BLOCK_D)
            b_square = square_norm(b_h)
            b_dot = dot_float32(b_h, b_parts, BLOCK_E)
        else:
            b_dot, b_square, b_memory_square = dots_and_squares(
                h_ptr + first * h_stride, h_stride, memory_ptr, memory_stride, rows, m_rows, D, E, BLOCK_D, BLOCK_E
            )
        b_gates, b_chosen, b_top = choose(b_dot, b_square, b_memory_square, sharpness, E, K, EPS, BLOCK_K)
        places = first * K + (rows[:, None] * K + choices[None, :])
        m_places = m_rows[:, None] & (choices < K)[None, :]
        tl.store(gates_ptr + places, b_gates, mask=m_places)
        tl.store(experts_ptr + places, b_chosen, mask=m_places)
        tl.store(cosines_ptr + places, b_top, mask=m_places)
        if has_long(b_square, b_memory_square):
            # Once more, in the narrowest tiles of columns, and stored again: what the two passes would share takes
            # registers from every tile of rows.
            tl.debug_barrier()
            b_dot, b_short, b_short_memory = dots_and_squares_of_long(
                h_ptr + first * h_stride,
                h_stride,
                memory_ptr,
                memory_stride,
                rows,
                m_rows,
                b_square,
                b_memory_square,
                D,
                E,
                16,
                BLOCK_E,
            )
            # A row does not depend on its neighbours: of the others not a bit changes.
            m_long = is_long(b_square, b_memory_square)
            b_gates, b_chosen, b_top = choose(b_dot, b_short, b_short_memory, sharpness, E, K, EPS, BLOCK_K)
            tl.store(gates_ptr + places, b_gates, mask=m_places & m_long[:, None])
            tl.store(experts_ptr + places, b_chosen, mask=m_places & m_long[:, None])
            tl.store(cosines_ptr + places, b_top, mask=m_places & m_long[:, None])


@triton.jit
def cosine_topk_bwd_kernel(
    grad_gates_ptr,
    grad_cosines_ptr,
    h_ptr,
    memory_ptr,
    gates_ptr,
    experts_ptr,
    cosines_ptr,
    grad_h_ptr,
    B,
    h_stride,
    memory_stride,
    temperature,
    D: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Gradient of the rows: ``grad_h [B, D]`` from ``h [B, D]``, ``memory [E, D]`` and five tensors ``[B, K]``.

    ``grad_gates_ptr`` or ``grad_cosines_ptr`` is None where no gradient arrives.
    """
    sharpness = 1.0 / temperature
    b_memory_square = tl.zeros((BLOCK_E,), tl.float32)
    for start in tl.range(0, D, BLOCK_D):
        b_memory = load_memory(memory_ptr, memory_stride, start, D, E, BLOCK_D, BLOCK_E)
        b_memory_square += tl.sum(squares(b_memory), 0)
    b_memory_factor = shrinking(b_memory_square)
    if has_long(b_memory_square, b_memory_square):
        b_memory_square = tl.zeros((BLOCK_E,), tl.float32)
        for start in tl.range(0, D, BLOCK_D):
            b_memory = load_memory(memory_ptr, memory_stride, start, D, E, BLOCK_D, BLOCK_E) * b_memory_factor[None, :]
            b_memory_square += tl.sum(squares(b_memory), 0)
    b_memory_scale = b_memory_factor * tl.rsqrt(tl.maximum(b_memory_square, EPS * EPS))
    if D <= BLOCK_D:
        b_memory = load_memory(memory_ptr, memory_stride, 0, D, E, BLOCK_D, BLOCK_E)
        b_parts = below_each_other(b_memory * b_memory_scale[None, :])
    # Each part of the memory meets the same coefficients.
    experts = tl.arange(0, 4 * BLOCK_E) % BLOCK_E

    for tile in tl.range(tl.program_id(0), tl.cdiv(B, BLOCK_M), tl.num_programs(0)):
        first = tl.cast(tile, tl.int64) * BLOCK_M
        rows = tl.arange(0, BLOCK_M)
        m_rows = rows < B - tile * BLOCK_M
        if D <= BLOCK_D:
            b_h = load_rows(h_ptr + first * h_stride, h_stride, rows, m_rows, 0, D, BLOCK_D)
            b_square = square_norm(b_h)
        else:
            b_square = tl.zeros((BLOCK_M,), tl.float32)
            for start in tl.range(0, D, BLOCK_D):
                b_h = load_rows(h_ptr + first * h_stride, h_stride, rows, m_rows, start, D, BLOCK_D)
                b_square += square_norm(b_h)
        b_factor = shrinking(b_square)
        if has_long(b_square, b_square):
            b_square = tl.zeros((BLOCK_M,), tl.float32)
            for start in tl.range(0, D, BLOCK_D):
                b_h = load_rows(h_ptr + first * h_stride, h_stride, rows, m_rows, start, D, BLOCK_D)
                b_square += square_norm(scaled(b_h, b_factor))
        # A row too short has no direction. Neither has a bad one: NaN > EPS is false.
        m_direction = b_square > EPS * EPS
        b_scale = tl.where(m_direction, b_factor * tl.rsqrt(tl.maximum(b_square, EPS * EPS)), 0.0)

        places = first * K + rows * K
        b_mean = tl.zeros((BLOCK_M,), tl.float32)
        if grad_gates_ptr is not None:
            for j in tl.static_range(K):
                b_gate = tl.load(gates_ptr + places + j, mask=m_rows, other=0.0)
                b_mean += b_gate * tl.load(grad_gates_ptr + places + j, mask=m_rows, other=0.0)
        b_coefficients = tl.zeros((BLOCK_M, 4 * BLOCK_E), tl.float32)
        b_along_row = tl.zeros((BLOCK_M,), tl.float32)
        for j in tl.static_range(K):
            b_grad = tl.zeros((BLOCK_M,), tl.float32)
            if grad_cosines_ptr is not None:
                b_grad += tl.load(grad_cosines_ptr + places + j, mask=m_rows, other=0.0)
            if grad_gates_ptr is not None:
                b_gate = tl.load(gates_ptr + places + j, mask=m_rows, other=0.0)
                b_grad_gate = tl.load(grad_gates_ptr + places + j, mask=m_rows, other=0.0)
                b_grad += b_gate * (b_grad_gate - b_mean) * sharpness
            b_expert = tl.load(experts_ptr + places + j, mask=m_rows, other=0)
            b_along_row += b_grad * tl.load(cosines_ptr + places + j, mask=m_rows, other=0.0)
            b_coefficients += tl.where(experts[None, :] == b_expert[:, None], b_grad[:, None], 0.0)
        b_coefficients = b_coefficients * b_scale[:, None]
        b_along_row = b_along_row * b_scale

        for start in tl.range(0, D, BLOCK_D):
            columns = start + tl.arange(0, BLOCK_D)
            if D > BLOCK_D:
                b_h = load_rows(h_ptr + first * h_stride, h_stride, rows, m_rows, start, D, BLOCK_D)
                b_memory = load_memory(memory_ptr, memory_stride, start, D, E, BLOCK_D, BLOCK_E)
                b_parts = below_each_other(b_memory * b_memory_scale[None, :])
            b_high, b_middle, b_low = split(b_coefficients)
            b_grad_h = tl.dot(b_low, b_parts)
            b_grad_h = tl.dot(b_middle, b_parts, b_grad_h)
            # Not the square of the scale: that underflows where a row is long.
            b_direction = b_h.to(tl.float32) * b_scale[:, None]
            b_grad_h = tl.dot(b_high, b_parts, b_grad_h) - b_along_row[:, None] * b_direction
            # The choice once more: 0 times the NaN of a bad row is NaN.
            b_grad_h = tl.where(m_direction[:, None], b_grad_h, 0.0).to(b_h.dtype)
            mask = m_rows[:, None] & (columns < D)[None, :]
            tl.store(grad_h_ptr + first * D + (rows[:, None] * D + columns[None, :]), b_grad_h, mask=mask)


def addressable(x: Tensor) -> Tensor:
    """``x [B, D]`` itself if features are adjacent and the rows of a tile span less than 2^31 elements; else a copy.

    A tile has at most 64 rows of a batch, or all memory vectors: at most 128.
    """
    return x if x.stride(1) == 1 and x.stride(0) < 2**31 // 128 else x.contiguous()


def forward(h: Tensor, memory: Tensor, k: int, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Launch: ``h [B, D]``, ``memory [E, D]`` float32 -> gates, experts, cosines, each ``[B, k]``."""
    rows, features = h.shape
    device = h.device
    gates = torch.empty((rows, k), dtype=torch.float32, device=device)
    experts = torch.empty((rows, k), dtype=torch.int32, device=device)
    cosines = torch.empty_like(gates)
    if rows == 0:
        return gates, experts, cosines
    h, memory = addressable(h), addressable(memory)
    launch = _prepare(False, rows, features, memory.shape[0], k, h.dtype, machine_of(device))
    launch(h, memory, gates, experts, cosines, rows, h.stride(0), memory.stride(0), temperature)
    return gates, experts, cosines


def backward(
    grad_gates: Tensor | None,
    grad_cosines: Tensor | None,
    h: Tensor,
    memory: Tensor,
    gates: Tensor,
    experts: Tensor,
    cosines: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    """Launch the backward kernel. Returns the gradient with respect to ``h``: contiguous ``[B, D]``, dtype of ``h``."""
    rows, features = h.shape
    grad_h = torch.empty((rows, features), dtype=h.dtype, device=h.device)
    if grad_h.numel() == 0:
        return grad_h
    if grad_gates is None and grad_cosines is None:
        return grad_h.zero_()
    h, memory = addressable(h), addressable(memory)
    launch = _prepare(True, rows, features, memory.shape[0], experts.shape[1], h.dtype, machine_of(h.device))
    launch(
        None if grad_gates is None else grad_gates.contiguous(),
        None if grad_cosines is None else grad_cosines.contiguous(),
        h,
        memory,
        gates.contiguous(),
        experts.contiguous(),
        cosines.contiguous(),
        grad_h,
        rows,
        h.stride(0),
        memory.stride(0),
        temperature,
    )
    return grad_h


@prepared
def _prepare(backward: bool, rows: int, features: int, num_experts: int, k: int, dtype: torch.dtype, machine: Machine):
    config = configuration(rows, features, num_experts, dtype, machine, backward=backward)
    return launcher(
        cosine_topk_bwd_kernel if backward else cosine_topk_fwd_kernel,
        (config.programs,),
        D=features,
        E=num_experts,
        K=k,
        EPS=EPS,
        BLOCK_M=config.block_m,
        BLOCK_D=config.block_d,
        BLOCK_E=config.block_e,
        **({} if backward else {"BLOCK_K": triton.next_power_of_2(k)}),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        programs=config.shared_by,
    )
