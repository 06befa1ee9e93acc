"""The outputs with one row per row of x, in Triton: ``y``, ``grad_x`` and ``grad_gates``.

Rows are ordered by their set of experts. A tile of ordered rows loads one slice of its features after the other and
multiplies each with the union of its rows' experts, so that every row is read once. Each expert's product is separate
and is scaled by the gates in float32. So no precision of small gates is lost, and non-finite numbers of an expert only
reach the rows that use it. With many experts there are several passes over the rows. Each pass handles some columns of
``experts``, has its own order, and adds to the float32 sums of the earlier passes.

Shapes: ``x [B, D]``, ``weight [E, N, D]``, ``bias [E, N]``; ``gates`` and ``experts``: TOP_K columns of ``[B, k]``,
starting at the first of the pass, with STRIDE_ROUTING = k; ``order [B]``, ``tile_experts [tiles, E]``,
``tile_counts [tiles]``. A tile is ``block_m`` ordered rows. A program with fewer rows than a tile handles a part of one
and uses the experts of the whole tile. Row offsets have 64 bits: ``B * D`` may exceed 2^31. If ``order``,
``tile_experts`` and ``tile_counts`` are None, rows keep their order and meet every expert: for few rows this is faster
than the launches that make an order.
Feature counts are constants: strides fold into addresses, and if they are multiples of the blocks, nothing is masked.
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
    # Not ``return`` in one of them: Triton would compile what follows for both.
    b_rows = tl.where(m_rows, position, 0)
    if order_ptr is not None:
        b_rows = tl.load(order_ptr + position, mask=m_rows, other=0)
    return tile, b_rows.to(tl.int64), m_rows


@triton.jit
def _union_size(tile_counts_ptr, tile, num_experts):
    """How many experts a tile meets."""
    size = num_experts
    if tile_counts_ptr is not None:
        size = tl.load(tile_counts_ptr + tile)
    return size


@triton.jit
def _expert_at(slot, tile_experts_ptr, tile, num_experts):
    """One of the experts that a tile meets."""
    expert = slot
    if tile_experts_ptr is not None:
        expert = tl.load(tile_experts_ptr + tile * num_experts + slot)
    return expert


@triton.jit
def _routing_of_rows(gates_ptr, experts_ptr, b_rows, m_rows, STRIDE_ROUTING: tl.constexpr, TOP_K: tl.constexpr):
    """Gates and experts of the rows, each TOP_K times ``[BLOCK_M]``; a row that does not exist has expert -1.

    A choice by itself takes the layout of whatever it meets; a block ``[BLOCK_M, TOP_K]`` would impose its own.
    """
    gates = ()
    experts = ()
    for choice in tl.static_range(TOP_K):
        gates += (tl.load(gates_ptr + b_rows * STRIDE_ROUTING + choice, mask=m_rows, other=0.0),)
        experts += (tl.load(experts_ptr + b_rows * STRIDE_ROUTING + choice, mask=m_rows, other=-1),)
    return gates, experts


@triton.jit
def _gates_for(expert, gates, experts, TOP_K: tl.constexpr):
    """Gate of every row for one expert, 0 where a row does not use it: ``[BLOCK_M]``."""
    b_gate = tl.where(experts[0] == expert, gates[0], 0.0)
    for choice in tl.static_range(1, TOP_K):
        b_gate = tl.where(experts[choice] == expert, gates[choice], b_gate)
    return b_gate


@triton.jit
def _add_gated(b_sum, b_gate, b_product):
    """Add ``gate * product`` to rows whose gate is not zero: the others take nothing, not even zero times infinity."""
    return tl.where(b_gate[:, None] != 0, b_sum + b_gate[:, None] * b_product, b_sum)


@triton.jit
def _load_slice(rows_ptr, b_offset, b_k, FEATURES: tl.constexpr, BLOCK_K: tl.constexpr):
    """Features ``b_k [BLOCK_K]`` of the rows that begin at ``b_offset``: ``[BLOCK_M, BLOCK_K]``.

    Rows are not masked: one that does not exist is row 0, and nothing of it is stored.
    """
    b_ptr = rows_ptr + b_offset[:, None] + b_k[None, :]
    if FEATURES % BLOCK_K == 0:
        return tl.load(b_ptr)
    return tl.load(b_ptr, mask=(b_k < FEATURES)[None, :], other=0.0)


@triton.jit
def _load_weight(
    weight_ptr,
    expert,
    b_k,
    b_column,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER_IS_LAST: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The expert's weights of ``b_k`` of its INNER features and ``b_column`` of the others: ``[BLOCK_K, BLOCK_N]``.

    INNER_IS_LAST says which of the two dimensions is contiguous in memory. That one may be longer than there are
    features, and zero beyond them: see ``launch._pad``.
    """
    stride_inner: tl.constexpr = 1 if INNER_IS_LAST else COLUMNS
    stride_column: tl.constexpr = INNER if INNER_IS_LAST else 1
    b_ptr = weight_ptr + expert.to(tl.int64) * (INNER * COLUMNS)
    b_ptr += b_k[:, None] * stride_inner + b_column[None, :] * stride_column
    if INNER % BLOCK_K == 0 and COLUMNS % BLOCK_N == 0:
        return tl.load(b_ptr)
    return tl.load(b_ptr, mask=(b_k < INNER)[:, None] & (b_column < COLUMNS)[None, :], other=0.0)


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
    num_experts,
    stride_x,
    IN_FEATURES: tl.constexpr,
    OUT_FEATURES: tl.constexpr,
    WEIGHT_LAST: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STRIDE_ROUTING: tl.constexpr,
    TOP_K: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``y[b] = sum_e gate[b, e] (weight[e] x[b] + bias[e])`` for BLOCK_M ordered rows and BLOCK_N columns.

    TRANSPOSED, with the features swapped, makes it ``grad_x`` from ``grad``. ``sums``, float32 ``[B, N]`` or None, is
    what earlier passes leave, and may be ``y``: a program reads what it writes and no more.
    """
    column_tiles: tl.constexpr = (OUT_FEATURES + BLOCK_N - 1) // BLOCK_N
    inner: tl.constexpr = IN_FEATURES if TRANSPOSED else WEIGHT_LAST
    columns: tl.constexpr = WEIGHT_LAST if TRANSPOSED else OUT_FEATURES
    # Programs that share rows run side by side, so that the rows come from memory once.
    part = tl.program_id(0) // column_tiles
    b_column = (tl.program_id(0) % column_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_column = b_column < OUT_FEATURES
    tile, b_rows, m_rows = _rows_of_part(part, order_ptr, rows, block_m, BLOCK_M)
    gates, experts = _routing_of_rows(gates_ptr, experts_ptr, b_rows, m_rows, STRIDE_ROUTING, TOP_K)
    union_size = _union_size(tile_counts_ptr, tile, num_experts)

    b_offset = b_rows[:, None] * OUT_FEATURES + b_column[None, :]
    m_y = m_rows[:, None] & m_column[None, :]
    if sums_ptr is None:
        b_y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    else:
        b_y = tl.load(sums_ptr + b_offset, mask=m_y, other=0.0)
    for start in range(0, IN_FEATURES, BLOCK_K):
        b_k = start + tl.arange(0, BLOCK_K)
        # It stays in shared memory while the experts' weights stream past it.
        b_x = _load_slice(x_ptr, b_rows * stride_x, b_k, IN_FEATURES, BLOCK_K)
        for slot in range(union_size):
            expert = _expert_at(slot, tile_experts_ptr, tile, num_experts)
            b_weight = _load_weight(weight_ptr, expert, b_k, b_column, inner, columns, not TRANSPOSED, BLOCK_K, BLOCK_N)
            b_gate = _gates_for(expert, gates, experts, TOP_K)
            if HAS_BIAS:
                # With the first slice of the features, and loaded before the product, which takes longer.
                m_bias = m_column & (start == 0)
                b_bias = tl.load(bias_ptr + expert * OUT_FEATURES + b_column, mask=m_bias, other=0.0)
            b_product = tl.dot(b_x, b_weight, input_precision=INPUT_PRECISION)
            if HAS_BIAS:
                # Gated by itself: Triton would begin a sum of both with the bias, and the product would wait for it.
                b_y = _add_gated(b_y, b_gate, tl.broadcast_to(b_bias.to(tl.float32)[None, :], (BLOCK_M, BLOCK_N)))
            b_y = _add_gated(b_y, b_gate, b_product)
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
    num_experts,
    stride_grad,
    stride_x,
    IN_FEATURES: tl.constexpr,
    OUT_FEATURES: tl.constexpr,
    WEIGHT_LAST: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STRIDE_ROUTING: tl.constexpr,
    TOP_K: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    BLOCK_UNION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``grad_x [B, D]`` and the pass's columns of ``grad_gates`` for BLOCK_M ordered rows and *all* D features.

    ``u = grad[b] weight[e]`` serves both: ``grad_x[b]`` is the sum of ``gate u``, ``grad_gates[b, j]`` is
    ``u . x[b] + grad[b] . bias[e]``. Both are linear in ``u``, so a slice of the outputs after the other does, and the
    features are walked inside the program: the inner products are complete when it ends, no partial sums leave it.
    ``sums``, float32 ``[B, D]`` or None, is the ``grad_x`` of earlier passes. With BY_COLUMN, weight is ``[E, D, N]``.
    """
    inner: tl.constexpr = WEIGHT_LAST if BY_COLUMN else OUT_FEATURES
    columns: tl.constexpr = IN_FEATURES if BY_COLUMN else WEIGHT_LAST
    tile, b_rows, m_rows = _rows_of_part(tl.program_id(0), order_ptr, rows, block_m, BLOCK_M)
    gates, experts = _routing_of_rows(gates_ptr, experts_ptr, b_rows, m_rows, STRIDE_ROUTING, TOP_K)
    union_size = _union_size(tile_counts_ptr, tile, num_experts)
    b_output = tl.arange(0, BLOCK_K)
    b_choice = tl.arange(0, BLOCK_TOP_K)
    b_routing = b_rows[:, None] * STRIDE_ROUTING + b_choice[None, :]
    m_routing = m_rows[:, None] & (b_choice < TOP_K)[None, :]
    b_experts = tl.load(experts_ptr + b_routing, mask=m_routing, other=-1)
    b_grad_gates = tl.zeros((BLOCK_M, BLOCK_TOP_K), tl.float32)

    if HAS_BIAS:
        for first in tl.range(0, union_size, BLOCK_UNION, num_stages=1):
            b_slot = first + tl.arange(0, BLOCK_UNION)
            m_slot = b_slot < union_size
            b_union = b_slot
            if tile_experts_ptr is not None:
                b_union = tl.load(tile_experts_ptr + tile * num_experts + b_slot, mask=m_slot, other=-2)
            b_with_bias = tl.zeros((BLOCK_M, BLOCK_UNION), tl.float32)
            for start in range(0, OUT_FEATURES, BLOCK_K):
                b_n = start + b_output
                b_grad = _load_slice(grad_ptr, b_rows * stride_grad, b_n, OUT_FEATURES, BLOCK_K)
                b_bias = tl.load(
                    bias_ptr + b_union[None, :] * OUT_FEATURES + b_n[:, None],
                    mask=(b_n < OUT_FEATURES)[:, None] & m_slot[None, :],
                    other=0.0,
                )
                b_with_bias = tl.dot(b_grad, b_bias, b_with_bias, input_precision=INPUT_PRECISION)
            m_chosen = b_experts[:, :, None] == b_union[None, None, :]
            b_grad_gates += tl.sum(tl.where(m_chosen, b_with_bias[:, None, :], 0.0), axis=2)

    for left in range(0, IN_FEATURES, BLOCK_N):
        b_d = left + tl.arange(0, BLOCK_N)
        m_tile = m_rows[:, None] & (b_d < IN_FEATURES)[None, :]
        b_x = _load_slice(x_ptr, b_rows * stride_x, b_d, IN_FEATURES, BLOCK_N)
        b_offset = b_rows[:, None] * IN_FEATURES + b_d[None, :]
        if sums_ptr is None:
            b_grad_x = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        else:
            b_grad_x = tl.load(sums_ptr + b_offset, mask=m_tile, other=0.0)
        for start in range(0, OUT_FEATURES, BLOCK_K):
            b_n = start + b_output
            b_grad = _load_slice(grad_ptr, b_rows * stride_grad, b_n, OUT_FEATURES, BLOCK_K)
            for slot in range(union_size):
                expert = _expert_at(slot, tile_experts_ptr, tile, num_experts)
                b_weight = _load_weight(weight_ptr, expert, b_n, b_d, inner, columns, BY_COLUMN, BLOCK_K, BLOCK_N)
                b_through = tl.dot(b_grad, b_weight, input_precision=INPUT_PRECISION)
                b_grad_x = _add_gated(b_grad_x, _gates_for(expert, gates, experts, TOP_K), b_through)
                # Each product is rounded before the sum: fused with the sum of two lanes, each would round the other's.
                b_inner = tl.sum(tl.fma(b_through, b_x.to(tl.float32), 0.0), axis=1)
                b_grad_gates += tl.where(b_experts == expert, b_inner[:, None], 0.0)
        tl.store(grad_x_ptr + b_offset, b_grad_x.to(grad_x_ptr.dtype.element_ty), mask=m_tile)

    tl.store(grad_gates_ptr + b_routing, b_grad_gates, mask=m_routing)
