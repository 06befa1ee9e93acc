"""A whole layer for few rows in one launch: every program routes its rows itself, then multiplies them."""

import triton
import triton.language as tl

from rbm_kernels.ops.cosine_topk.blocks import (
    choose,
    dots_and_squares,
    dots_and_squares_of_long,
    has_long,
    is_long,
    load_rows,
)


@triton.jit
def _gates_for(expert, b_gates, b_experts):
    """Gate of every row for one expert, 0 where a row does not use it, and which rows use it: both ``[BLOCK_M]``."""
    m_choices = b_experts == expert
    return tl.sum(tl.where(m_choices, b_gates, 0.0), axis=1), tl.max(m_choices.to(tl.int32), axis=1) != 0


# One compilation for all numbers of rows (in plain float32, another for a single row): a server sees many of them.
@triton.jit(do_not_specialize=["B"])
def routed_matmul_fwd_kernel(
    x_ptr,
    memory_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    B,
    N,
    x_stride,
    memory_stride,
    temperature,
    D: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
):
    """``y [B, N]`` from ``x [B, D]``, ``memory [E, D]`` float32, ``weight [E, N, D]`` and ``bias [E, N]`` or None.

    ROWS rows of a tile, BLOCK_M or the only one, are multiplied; if EXACT, without ``tl.dot``.
    """
    first = tl.program_id(1) * BLOCK_M
    rows = tl.arange(0, BLOCK_M)
    m_rows = rows < B - first
    x_ptr += tl.cast(first, tl.int64) * x_stride
    b_dot, b_square, b_memory_square = dots_and_squares(
        x_ptr, x_stride, memory_ptr, memory_stride, rows, m_rows, D, E, BLOCK_D, BLOCK_E
    )
    sharpness = 1.0 / temperature
    b_gates, b_experts, _ = choose(b_dot, b_square, b_memory_square, sharpness, E, K, EPS, BLOCK_TOP_K)
    if has_long(b_square, b_memory_square):
        # Once more, in the narrowest tiles of columns: few registers are left.
        b_dot, b_short, b_short_memory = dots_and_squares_of_long(
            x_ptr, x_stride, memory_ptr, memory_stride, rows, m_rows, b_square, b_memory_square, D, E, 16, BLOCK_E
        )
        b_long_gates, b_long_experts, _ = choose(b_dot, b_short, b_short_memory, sharpness, E, K, EPS, BLOCK_TOP_K)
        # A row does not depend on its neighbours: of the others not a bit changes.
        m_long = is_long(b_square, b_memory_square)
        b_gates = tl.where(m_long[:, None], b_long_gates, b_gates)
        b_experts = tl.where(m_long[:, None], b_long_experts, b_experts)
    # Rows beyond the last use no expert.
    b_experts = tl.where(m_rows[:, None], b_experts, -1)

    # Which experts any row uses, and which place each of them has among those.
    experts, choices = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_TOP_K)
    b_used = tl.zeros((BLOCK_E,), tl.int32)
    for j in tl.static_range(K):
        b_choice = tl.sum(tl.where(choices[None, :] == j, b_experts, 0), 1)
        b_used = tl.maximum(b_used, tl.max((b_choice[:, None] == experts[None, :]).to(tl.int32), 0))
    b_place = tl.where(b_used != 0, tl.cumsum(b_used, 0) - 1, -1)

    # One flat loop over (used expert, slice of the features): the weights of the next are on their way while this one
    # is multiplied.
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_columns = columns < N
    multiplied = tl.arange(0, ROWS)
    slices: tl.constexpr = 1 if D <= BLOCK_K else (D + BLOCK_K - 1) // BLOCK_K
    if slices == 1:
        b_x = load_rows(x_ptr, x_stride, multiplied, multiplied < B - first, 0, D, BLOCK_K)
    b_y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(0, tl.sum(b_used, 0) * slices, num_stages=STAGES):
        expert = tl.sum(tl.where(b_place == step // slices, experts, 0), 0)
        start = (step % slices) * BLOCK_K
        features = start + tl.arange(0, BLOCK_K)
        if slices > 1:
            b_x = load_rows(x_ptr, x_stride, multiplied, multiplied < B - first, start, D, BLOCK_K)
        b_weight = tl.load(
            weight_ptr + expert.to(tl.int64) * N * D + (columns[:, None] * D + features[None, :]),
            mask=m_columns[:, None] & (features < D)[None, :],
            other=0.0,
        )
        if EXACT:
            # Plain float32: tl.dot would read the weights with 16 lanes at one bank of shared memory. Products are
            # rounded before the sum: see ``blocks.squares``.
            shape: tl.constexpr = (ROWS, BLOCK_N, BLOCK_K)
            b_each, b_all = tl.broadcast_to(b_x[:, None, :], shape), tl.broadcast_to(b_weight[None, :, :], shape)
            b_product = tl.sum(tl.fma(b_each, b_all, 0.0), 2)
        else:
            b_product = tl.dot(b_x, tl.trans(b_weight), input_precision=INPUT_PRECISION)
        if bias_ptr is not None:
            # Once an expert, with its first slice.
            b_bias = tl.load(bias_ptr + expert * N + columns, mask=columns < tl.where(start == 0, N, 0), other=0.0)
            b_product += b_bias.to(tl.float32)[None, :]
        # The gate multiplies the product, not the row: that would round the row once more in half precision.
        # Rows that do not use the expert take nothing of it: zero times infinity would be NaN.
        b_gate, m_used = _gates_for(expert, b_gates, b_experts)
        b_y += tl.where(m_used[:, None], b_gate[:, None] * b_product, 0.0)

    y_ptr += tl.cast(first, tl.int64) * N
    tl.store(
        y_ptr + (rows[:, None] * N + columns[None, :]),
        b_y.to(y_ptr.dtype.element_ty),
        mask=m_rows[:, None] & m_columns[None, :],
    )
