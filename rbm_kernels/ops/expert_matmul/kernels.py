"""The outputs that have a row for each row of x, in Triton: ``y``, ``grad_x`` and ``grad_gates``.

Rows are ordered by their set of experts; a tile of ordered rows loops over the union of its rows' experts. With many
experts that happens in passes, each over some columns of ``experts`` and with an order of its own: a pass adds to the
float32 sums of those before it.

Shapes: ``x [B, D]``, ``weight [E, N, D]``, ``bias [E, N]``, ``gates`` and ``experts`` TOP_K columns of ``[B, k]`` from
the pass's first on, with STRIDE_ROUTING = k, ``order [B]``, ``tile_experts [tiles, E]``, ``tile_counts [tiles]``; a
tile is ``block_m`` ordered rows. A program that takes fewer rows than a tile takes a part of one and uses the whole
tile's experts. Row offsets have 64 bits: ``B * D`` may pass 2^31.
"""

import triton
import triton.language as tl


@triton.jit
def _rows_of_part(part, order_ptr, rows, block_m, BLOCK_M: tl.constexpr):
    """The tile that a part belongs to, the rows it holds (``[BLOCK_M]``, 0 beyond the end) and which of them exist."""
    parts = tl.cdiv(block_m, BLOCK_M)
    tile = part // parts
    within = (part % parts) * BLOCK_M + tl.arange(0, BLOCK_M)
    position = tile * block_m + within
    m_rows = (within < block_m) & (position < rows)
    return tile, tl.load(order_ptr + position, mask=m_rows, other=0).to(tl.int64), m_rows


@triton.jit
def _routing_of_rows(
    gates_ptr,
    experts_ptr,
    b_rows,
    m_rows,
    STRIDE_ROUTING: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
):
    """Gates and experts of the rows, ``[BLOCK_M, BLOCK_TOP_K]``; padding has gate 0 and expert -1."""
    b_slot = tl.arange(0, BLOCK_TOP_K)
    b_offset = b_rows[:, None] * STRIDE_ROUTING + b_slot[None, :]
    m_routing = m_rows[:, None] & (b_slot[None, :] < TOP_K)
    b_gates = tl.load(gates_ptr + b_offset, mask=m_routing, other=0.0)
    b_experts = tl.load(experts_ptr + b_offset, mask=m_routing, other=-1)
    return b_gates, b_experts


@triton.jit
def gates_for(expert, b_gates, b_experts):
    """Gate of every row for one expert, 0 where a row does not use it: ``[BLOCK_M]``."""
    return tl.sum(tl.where(b_experts == expert, b_gates, 0.0), axis=1)


@triton.jit
def uses(expert, b_experts):
    """Which rows use one expert: ``[BLOCK_M]``."""
    return tl.max((b_experts == expert).to(tl.int32), axis=1) != 0


@triton.jit
def _load_slice(x_ptr, stride_x, b_rows, m_rows, b_k, in_features):
    """Features ``b_k [BLOCK_K]`` of the rows: ``[BLOCK_M, BLOCK_K]``."""
    m_x = m_rows[:, None] & (b_k < in_features)[None, :]
    return tl.load(x_ptr + b_rows[:, None] * stride_x + b_k[None, :], mask=m_x, other=0.0)


@triton.jit
def _load_weight(
    weight_ptr, expert, b_k, b_column, m_column, in_features, out_features, stride_weight_out, stride_weight_in
):
    """The expert's weights between features ``b_k`` and outputs ``b_column``: ``[BLOCK_K, BLOCK_N]``."""
    return tl.load(
        weight_ptr
        + expert.to(tl.int64) * in_features * out_features
        + b_k[:, None] * stride_weight_in
        + b_column[None, :] * stride_weight_out,
        mask=(b_k < in_features)[:, None] & m_column[None, :],
        other=0.0,
    )


@triton.jit
def expert_matmul_fwd_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    gates_ptr,
    experts_ptr,
    order_ptr,
    tile_experts_ptr,
    tile_counts_ptr,
    sums_ptr,
    y_ptr,
    rows,
    block_m,
    in_features,
    out_features,
    num_experts,
    stride_x,
    stride_weight_out,
    stride_weight_in,
    HAS_BIAS: tl.constexpr,
    STRIDE_ROUTING: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_UNION: tl.constexpr,
):
    """``y[b] = sum_e gate[b, e] (weight[e] x[b] + bias[e])`` for BLOCK_M ordered rows and BLOCK_N columns.

    The other weight layout (strides swapped, features swapped) makes it ``grad_x`` from ``grad``. ``sums``, float32
    ``[B, N]`` or None, is what earlier passes leave, and may be ``y``: a program reads what it writes and no more.
    """
    column_tiles = tl.cdiv(out_features, BLOCK_N)
    # Programs that share rows run side by side, so that the rows come from memory once.
    part = tl.program_id(0) // column_tiles
    b_column = (tl.program_id(0) % column_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_column = b_column < out_features
    tile, b_rows, m_rows = _rows_of_part(part, order_ptr, rows, block_m, BLOCK_M)
    b_gates, b_experts = _routing_of_rows(gates_ptr, experts_ptr, b_rows, m_rows, STRIDE_ROUTING, TOP_K, BLOCK_TOP_K)
    union_ptr = tile_experts_ptr + tile * num_experts
    union_size = tl.load(tile_counts_ptr + tile)

    b_offset = b_rows[:, None] * out_features + b_column[None, :]
    m_y = m_rows[:, None] & m_column[None, :]
    if sums_ptr is None:
        b_y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    else:
        b_y = tl.load(sums_ptr + b_offset, mask=m_y, other=0.0)
    if x_ptr.dtype.element_ty == tl.float16:
        # A gate times a row of float16 would often lie below its smallest normal number, where bits are missing: the
        # gate multiplies the expert's whole product, in float32. That takes a second accumulator, hence smaller tiles.
        for slot in range(union_size):
            expert = tl.load(union_ptr + slot)
            b_product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for start in range(0, in_features, BLOCK_K):
                b_k = start + tl.arange(0, BLOCK_K)
                b_x = _load_slice(x_ptr, stride_x, b_rows, m_rows, b_k, in_features)
                b_weight = _load_weight(
                    weight_ptr,
                    expert,
                    b_k,
                    b_column,
                    m_column,
                    in_features,
                    out_features,
                    stride_weight_out,
                    stride_weight_in,
                )
                b_product = tl.dot(b_x, b_weight, b_product, input_precision=INPUT_PRECISION)
            if HAS_BIAS:
                b_bias = tl.load(bias_ptr + expert * out_features + b_column, mask=m_column, other=0.0)
                b_product += b_bias.to(tl.float32)[None, :]
            # Rows that do not use the expert take nothing of it: zero times infinity would be NaN.
            b_gated = gates_for(expert, b_gates, b_experts)[:, None] * b_product
            b_y += tl.where(uses(expert, b_experts)[:, None], b_gated, 0.0)
    else:
        # The biases are one more slice of the product, gates [BLOCK_M, union] by biases [union, BLOCK_N]: added as
        # rows, they would take the accumulator through a change of layout. No pipeline: one step is all there is, and
        # its prefetch costs registers.
        if HAS_BIAS:
            for first in tl.range(0, union_size, BLOCK_UNION, num_stages=1):
                b_slot = first + tl.arange(0, BLOCK_UNION)
                m_slot = b_slot < union_size
                b_union = tl.load(union_ptr + b_slot, mask=m_slot, other=-2)
                b_union_gates = tl.zeros((BLOCK_M, BLOCK_UNION), tl.float32)
                for choice in tl.static_range(TOP_K):
                    b_expert = tl.load(experts_ptr + b_rows * STRIDE_ROUTING + choice, mask=m_rows, other=-1)
                    b_gate = tl.load(gates_ptr + b_rows * STRIDE_ROUTING + choice, mask=m_rows, other=0.0)
                    b_union_gates += tl.where(b_expert[:, None] == b_union[None, :], b_gate[:, None], 0.0)
                b_bias = tl.load(
                    bias_ptr + b_union[:, None] * out_features + b_column[None, :],
                    mask=m_slot[:, None] & m_column[None, :],
                    other=0.0,
                )
                b_y = tl.dot(b_union_gates.to(b_bias.dtype), b_bias, b_y, input_precision=INPUT_PRECISION)

        # One flat loop over (expert, slice of the features) keeps the pipeline of loads full from one expert to the
        # next, and a scaled x keeps one accumulator: a second one, for the expert at hand, would spill at 128 x 256.
        slices = tl.cdiv(in_features, BLOCK_K)
        for step in range(union_size * slices):
            expert = tl.load(union_ptr + step // slices)
            b_k = (step % slices) * BLOCK_K + tl.arange(0, BLOCK_K)
            b_x = _load_slice(x_ptr, stride_x, b_rows, m_rows, b_k, in_features)
            b_weight = _load_weight(
                weight_ptr,
                expert,
                b_k,
                b_column,
                m_column,
                in_features,
                out_features,
                stride_weight_out,
                stride_weight_in,
            )
            b_scaled = (b_x * gates_for(expert, b_gates, b_experts)[:, None]).to(b_x.dtype)
            b_y = tl.dot(b_scaled, b_weight, b_y, input_precision=INPUT_PRECISION)

    tl.store(y_ptr + b_offset, b_y.to(y_ptr.dtype.element_ty), mask=m_y)


@triton.jit
def expert_matmul_bwd_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    gates_ptr,
    experts_ptr,
    order_ptr,
    tile_experts_ptr,
    tile_counts_ptr,
    sums_ptr,
    grad_x_ptr,
    grad_gates_ptr,
    rows,
    block_m,
    in_features,
    out_features,
    num_experts,
    stride_grad,
    stride_x,
    HAS_BIAS: tl.constexpr,
    STRIDE_ROUTING: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_UNION: tl.constexpr,
):
    """``grad_x [B, D]`` and the pass's columns of ``grad_gates`` for BLOCK_M ordered rows and *all* D features.

    ``u = grad[b] weight[e]`` serves both: ``grad_x[b]`` is the sum of ``gate u``, ``grad_gates[b, j]`` is
    ``u . x[b] + grad[b] . bias[e]``. The features are walked inside the program, so the inner products are complete
    when it ends: no partial sums leave it. Each expert needs its own ``u``, hence two accumulators. ``sums``, float32
    ``[B, D]`` or None, is the ``grad_x`` of earlier passes.
    """
    tile, b_rows, m_rows = _rows_of_part(tl.program_id(0), order_ptr, rows, block_m, BLOCK_M)
    b_gates, b_experts = _routing_of_rows(gates_ptr, experts_ptr, b_rows, m_rows, STRIDE_ROUTING, TOP_K, BLOCK_TOP_K)
    union_ptr = tile_experts_ptr + tile * num_experts
    union_size = tl.load(tile_counts_ptr + tile)
    b_grad_row_ptr = grad_ptr + b_rows[:, None] * stride_grad
    b_output = tl.arange(0, BLOCK_K)

    b_grad_gates = tl.zeros((BLOCK_M, BLOCK_TOP_K), tl.float32)
    if HAS_BIAS:
        for first in tl.range(0, union_size, BLOCK_UNION, num_stages=1):
            b_slot = first + tl.arange(0, BLOCK_UNION)
            m_slot = b_slot < union_size
            b_union = tl.load(union_ptr + b_slot, mask=m_slot, other=-2)
            b_with_bias = tl.zeros((BLOCK_M, BLOCK_UNION), tl.float32)
            for start in range(0, out_features, BLOCK_K):
                b_n = start + b_output
                m_n = b_n < out_features
                b_grad = tl.load(b_grad_row_ptr + b_n[None, :], mask=m_rows[:, None] & m_n[None, :], other=0.0)
                b_bias = tl.load(
                    bias_ptr + b_union[None, :] * out_features + b_n[:, None],
                    mask=m_n[:, None] & m_slot[None, :],
                    other=0.0,
                )
                b_with_bias = tl.dot(b_grad, b_bias, b_with_bias, input_precision=INPUT_PRECISION)
            m_used = b_experts[:, :, None] == b_union[None, None, :]
            b_grad_gates += tl.sum(tl.where(m_used, b_with_bias[:, None, :], 0.0), axis=2)

    for left in range(0, in_features, BLOCK_N):
        b_d = left + tl.arange(0, BLOCK_N)
        m_d = b_d < in_features
        m_tile = m_rows[:, None] & m_d[None, :]
        b_x = tl.load(x_ptr + b_rows[:, None] * stride_x + b_d[None, :], mask=m_tile, other=0.0)
        b_offset = b_rows[:, None] * in_features + b_d[None, :]
        if sums_ptr is None:
            b_grad_x = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        else:
            b_grad_x = tl.load(sums_ptr + b_offset, mask=m_tile, other=0.0)
        for slot in range(union_size):
            expert = tl.load(union_ptr + slot)
            b_weight_ptr = weight_ptr + expert.to(tl.int64) * in_features * out_features + b_d[None, :]
            b_through = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for start in range(0, out_features, BLOCK_K):
                b_n = start + b_output
                m_n = b_n < out_features
                b_grad = tl.load(b_grad_row_ptr + b_n[None, :], mask=m_rows[:, None] & m_n[None, :], other=0.0)
                b_weight = tl.load(
                    b_weight_ptr + b_n[:, None] * in_features, mask=m_n[:, None] & m_d[None, :], other=0.0
                )
                b_through = tl.dot(b_grad, b_weight, b_through, input_precision=INPUT_PRECISION)
            b_grad_x += gates_for(expert, b_gates, b_experts)[:, None] * b_through
            # Each product is rounded before the sum: fused with the sum of two lanes, each would round the other's.
            b_inner = tl.sum(tl.fma(b_through, b_x.to(tl.float32), 0.0), axis=1)
            b_grad_gates += tl.where(b_experts == expert, b_inner[:, None], 0.0)
        tl.store(grad_x_ptr + b_offset, b_grad_x.to(grad_x_ptr.dtype.element_ty), mask=m_tile)

    b_slot = tl.arange(0, BLOCK_TOP_K)
    tl.store(
        grad_gates_ptr + b_rows[:, None] * STRIDE_ROUTING + b_slot[None, :],
        b_grad_gates,
        mask=m_rows[:, None] & (b_slot[None, :] < TOP_K),
    )
