"""Routing on the GPU: one Triton kernel forward and one backward, built from the functions in ``blocks.py``."""

import triton
import triton.language as tl

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
