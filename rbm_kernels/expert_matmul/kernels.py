"""The grouped matmul on the device, in Triton: rows ordered by their set of experts, tiles that loop over a union.

Shapes: ``x [B, D]``, ``weight [E, N, D]``, ``bias [E, N]``, ``gates`` and ``experts [B, k]``, ``order [B]``,
``tile_experts [tiles, E]``, ``tile_counts [tiles]``; a tile is ``block_m`` ordered rows. A program that takes fewer rows
than a tile takes a part of one and uses the whole tile's experts. Row offsets are 64 bits wide: ``B * D`` may pass 2^31.
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
def _routing_of_rows(gates_ptr, experts_ptr, b_rows, m_rows, TOP_K: tl.constexpr, BLOCK_TOP_K: tl.constexpr):
    """Gates and experts of the rows, ``[BLOCK_M, BLOCK_TOP_K]``; padding has gate 0 and expert -1."""
    b_slot = tl.arange(0, BLOCK_TOP_K)
    b_offset = b_rows[:, None] * TOP_K + b_slot[None, :]
    m_routing = m_rows[:, None] & (b_slot[None, :] < TOP_K)
    b_gates = tl.load(gates_ptr + b_offset, mask=m_routing, other=0.0)
    b_experts = tl.load(experts_ptr + b_offset, mask=m_routing, other=-1)
    return b_gates, b_experts


@triton.jit
def _gates_for(expert, b_gates, b_experts):
    """Gate of every row for one expert, 0 where a row does not use it: ``[BLOCK_M]``."""
    return tl.sum(tl.where(b_experts == expert, b_gates, 0.0), axis=1)


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
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_UNION: tl.constexpr,
):
    """``y[b] = sum_e gate[b, e] (weight[e] x[b] + bias[e])`` for BLOCK_M ordered rows and BLOCK_N columns.

    The other weight layout (strides swapped, features swapped) makes it ``grad_x`` from ``grad``.
    """
    column_tiles = tl.cdiv(out_features, BLOCK_N)
    # Programs that share rows run side by side, so that the rows come from memory once.
    part = tl.program_id(0) // column_tiles
    b_column = (tl.program_id(0) % column_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_column = b_column < out_features
    tile, b_rows, m_rows = _rows_of_part(part, order_ptr, rows, block_m, BLOCK_M)
    b_gates, b_experts = _routing_of_rows(gates_ptr, experts_ptr, b_rows, m_rows, TOP_K, BLOCK_TOP_K)
    union_ptr = tile_experts_ptr + tile * num_experts
    union_size = tl.load(tile_counts_ptr + tile)

    b_y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # The biases are one more slice of the product, gates [BLOCK_M, union] by biases [union, BLOCK_N]: added as rows, they
    # would take the accumulator through a change of layout.
    if HAS_BIAS:
        for first in tl.range(0, union_size, BLOCK_UNION, num_stages=1):
            b_slot = first + tl.arange(0, BLOCK_UNION)
            m_slot = b_slot < union_size
            b_union = tl.load(union_ptr + b_slot, mask=m_slot, other=-2)
            b_union_gates = tl.zeros((BLOCK_M, BLOCK_UNION), tl.float32)
            for choice in tl.static_range(TOP_K):
                b_expert = tl.load(experts_ptr + b_rows * TOP_K + choice, mask=m_rows, other=-1)
                b_gate = tl.load(gates_ptr + b_rows * TOP_K + choice, mask=m_rows, other=0.0)
                b_union_gates += tl.where(b_expert[:, None] == b_union[None, :], b_gate[:, None], 0.0)
            b_bias = tl.load(
                bias_ptr + b_union[:, None] * out_features + b_column[None, :],
                mask=m_slot[:, None] & m_column[None, :],
                other=0.0,
            )
            b_y = tl.dot(b_union_gates.to(b_bias.dtype), b_bias, b_y, input_precision=INPUT_PRECISION)

    # One flat loop over (expert, slice of the features) keeps the pipeline of loads full from one expert to the next,
    # and a scaled x keeps one accumulator: a second one, for the expert at hand, would spill at 128 x 256.
    b_feature = tl.arange(0, BLOCK_K)
    slices = tl.cdiv(in_features, BLOCK_K)
    for step in range(union_size * slices):
        expert = tl.load(union_ptr + step // slices)
        b_k = (step % slices) * BLOCK_K + b_feature
        m_k = b_k < in_features
        b_x = tl.load(x_ptr + b_rows[:, None] * stride_x + b_k[None, :], mask=m_rows[:, None] & m_k[None, :], other=0.0)
        b_weight = tl.load(
            weight_ptr
            + expert.to(tl.int64) * in_features * out_features
            + b_k[:, None] * stride_weight_in
            + b_column[None, :] * stride_weight_out,
            mask=m_k[:, None] & m_column[None, :],
            other=0.0,
        )
        b_scaled = (b_x * _gates_for(expert, b_gates, b_experts)[:, None]).to(b_x.dtype)
        b_y = tl.dot(b_scaled, b_weight, b_y, input_precision=INPUT_PRECISION)

    tl.store(
        y_ptr + b_rows[:, None] * out_features + b_column[None, :],
        b_y.to(y_ptr.dtype.element_ty),
        mask=m_rows[:, None] & m_column[None, :],
    )


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
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_UNION: tl.constexpr,
):
    """``grad_x [B, D]`` and ``grad_gates [B, k]`` for BLOCK_M ordered rows and *all* D features.

    ``u = grad[b] weight[e]`` serves both: ``grad_x[b] = sum_e gate u`` and ``grad_gates[b, j] = u . x[b] + grad[b] . bias[e]``.
    The features are walked inside the program, so the inner products are complete when it ends: no partial sums leave
    it. Each expert needs its own ``u``, hence two accumulators.
    """
    tile, b_rows, m_rows = _rows_of_part(tl.program_id(0), order_ptr, rows, block_m, BLOCK_M)
    b_gates, b_experts = _routing_of_rows(gates_ptr, experts_ptr, b_rows, m_rows, TOP_K, BLOCK_TOP_K)
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
        b_grad_x = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
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
            b_grad_x += _gates_for(expert, b_gates, b_experts)[:, None] * b_through
            b_inner = tl.sum(b_through * b_x.to(tl.float32), axis=1)
            b_grad_gates += tl.where(b_experts == expert, b_inner[:, None], 0.0)
        tl.store(
            grad_x_ptr + b_rows[:, None] * in_features + b_d[None, :],
            b_grad_x.to(grad_x_ptr.dtype.element_ty),
            mask=m_tile,
        )

    b_slot = tl.arange(0, BLOCK_TOP_K)
    tl.store(
        grad_gates_ptr + b_rows[:, None] * TOP_K + b_slot[None, :],
        b_grad_gates,
        mask=m_rows[:, None] & (b_slot[None, :] < TOP_K),
    )


@triton.jit
def expert_matmul_bwd_count_kernel(
    experts_ptr,
    counts_ptr,
    rows,
    blocks,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """``counts [E, blocks]``: how many of BLOCK_ROWS consecutive rows use an expert."""
    block, expert = tl.program_id(0), tl.program_id(1)
    b_used, _, _ = _uses_of_expert(experts_ptr, expert, block, rows, TOP_K, BLOCK_TOP_K, BLOCK_ROWS)
    tl.store(counts_ptr + expert * blocks + block, tl.sum(b_used, axis=0))


@triton.jit
def expert_matmul_bwd_list_kernel(
    gates_ptr,
    experts_ptr,
    ends_ptr,
    listed_rows_ptr,
    listed_gates_ptr,
    rows,
    blocks,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Rows by expert, ascending within each, and their gates: ``listed_rows`` and ``listed_gates``, both ``[B * k]``.

    ``ends [E, blocks]`` is the running sum of the counts over experts and blocks: where each block's rows end.
    """
    block, expert = tl.program_id(0), tl.program_id(1)
    b_used, b_experts, b_offset = _uses_of_expert(experts_ptr, expert, block, rows, TOP_K, BLOCK_TOP_K, BLOCK_ROWS)
    b_gates = tl.load(gates_ptr + b_offset, mask=b_experts == expert, other=0.0)
    b_place = tl.load(ends_ptr + expert * blocks + block) - tl.sum(b_used, axis=0) + tl.cumsum(b_used, axis=0) - b_used
    b_row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    tl.store(listed_rows_ptr + b_place, b_row, mask=b_used != 0)
    tl.store(listed_gates_ptr + b_place, tl.sum(b_gates, axis=1), mask=b_used != 0)


@triton.jit
def _uses_of_expert(
    experts_ptr, expert, block, rows, TOP_K: tl.constexpr, BLOCK_TOP_K: tl.constexpr, BLOCK_ROWS: tl.constexpr
):
    """1 for each row that uses the expert (``[BLOCK_ROWS]``), its experts, and where its routing stands."""
    b_row = block.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    b_slot = tl.arange(0, BLOCK_TOP_K)
    b_offset = b_row[:, None] * TOP_K + b_slot[None, :]
    m_routing = (b_row < rows)[:, None] & (b_slot < TOP_K)[None, :]
    b_experts = tl.load(experts_ptr + b_offset, mask=m_routing, other=-1)
    return tl.max((b_experts == expert).to(tl.int32), axis=1), b_experts, b_offset


@triton.jit
def _shares(ends_ptr, blocks, num_experts, share_rows, BLOCK_E: tl.constexpr):
    """For each expert ``[BLOCK_E]`` where its listed rows begin and end, and its first share and the one after its last.

    A share is a run of at most ``share_rows`` listed rows of one expert. There are at most ``B k / share_rows + E`` of
    them, which the host knows, and an expert with many rows gets more of them than one with few.
    """
    b_expert = tl.arange(0, BLOCK_E)
    b_end = tl.load(ends_ptr + (b_expert + 1) * blocks - 1, mask=b_expert < num_experts, other=0)
    b_begin = tl.load(ends_ptr + b_expert * blocks - 1, mask=(b_expert > 0) & (b_expert < num_experts), other=0)
    b_shares = tl.cdiv(b_end - b_begin, share_rows)
    b_last_share = tl.cumsum(b_shares, axis=0)
    return b_begin, b_end, b_last_share - b_shares, b_last_share


@triton.jit
def _pick(b_values, index, BLOCK: tl.constexpr):
    """One element of a block, as a scalar."""
    return tl.sum(tl.where(tl.arange(0, BLOCK) == index, b_values, 0), axis=0)


@triton.jit
def expert_matmul_bwd_weight_kernel(
    grad_ptr,
    x_ptr,
    listed_rows_ptr,
    listed_gates_ptr,
    ends_ptr,
    partial_ptr,
    blocks,
    share_rows,
    in_features,
    out_features,
    num_experts,
    stride_grad,
    stride_x,
    HAS_BIAS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One share of one expert's rows: ``sum_b gate grad[b]^T x[b]`` on a BLOCK_M x BLOCK_N tile of ``[N, D]``.

    ``partial [shares, N * D + N]`` float32 takes it, and behind it the share's part of the bias' gradient. The product
    runs over BLOCK_K rows at a time.
    """
    column_tiles = tl.cdiv(in_features, BLOCK_N)
    weight_tiles = tl.cdiv(out_features, BLOCK_M) * column_tiles
    # Programs of one share stand side by side: they read the same rows.
    share = tl.program_id(0) // weight_tiles
    column_tile = tl.program_id(0) % column_tiles
    b_begin, b_end, b_first_share, b_last_share = _shares(ends_ptr, blocks, num_experts, share_rows, BLOCK_E)
    expert = tl.sum((b_last_share <= share).to(tl.int32), axis=0)
    if expert >= num_experts:
        return
    first = _pick(b_begin, expert, BLOCK_E) + (share - _pick(b_first_share, expert, BLOCK_E)) * share_rows
    last = tl.minimum(first + share_rows, _pick(b_end, expert, BLOCK_E))

    b_n = ((tl.program_id(0) % weight_tiles) // column_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    b_d = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n, m_d = b_n < out_features, b_d < in_features
    b_weight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    b_bias = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(first, last, BLOCK_K):
        b_place = start + tl.arange(0, BLOCK_K)
        m_rows = b_place < last
        b_rows = tl.load(listed_rows_ptr + b_place, mask=m_rows, other=0).to(tl.int64)
        b_gates = tl.load(listed_gates_ptr + b_place, mask=m_rows, other=0.0)
        b_grad = tl.load(
            grad_ptr + b_rows[:, None] * stride_grad + b_n[None, :], mask=m_rows[:, None] & m_n[None, :], other=0.0
        )
        b_x = tl.load(x_ptr + b_rows[:, None] * stride_x + b_d[None, :], mask=m_rows[:, None] & m_d[None, :], other=0.0)
        b_scaled = b_grad * b_gates[:, None]
        if HAS_BIAS:
            b_bias += tl.sum(b_scaled, axis=0)
        b_weight = tl.dot(tl.trans(b_scaled.to(b_x.dtype)), b_x, b_weight, input_precision=INPUT_PRECISION)

    partial_ptr += share.to(tl.int64) * (in_features + 1) * out_features
    tl.store(partial_ptr + b_n[:, None] * in_features + b_d[None, :], b_weight, mask=m_n[:, None] & m_d[None, :])
    if HAS_BIAS:
        if column_tile == 0:
            tl.store(partial_ptr + out_features * in_features + b_n, b_bias, mask=m_n)


@triton.jit
def expert_matmul_bwd_reduce_kernel(
    partial_ptr,
    ends_ptr,
    grad_weight_ptr,
    grad_bias_ptr,
    blocks,
    share_rows,
    num_experts,
    weight_size,
    bias_size,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Add an expert's shares in their order: ``grad_weight [E, N, D]``, ``grad_bias [E, N]``, the same bits every run."""
    expert = tl.program_id(1)
    _, _, b_first_share, b_last_share = _shares(ends_ptr, blocks, num_experts, share_rows, BLOCK_E)
    b_offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_weight = b_offset < weight_size
    m_bias = (b_offset >= weight_size) & (b_offset < weight_size + bias_size) & HAS_BIAS
    b_sum = tl.zeros((BLOCK,), tl.float32)
    first = _pick(b_first_share, expert, BLOCK_E)
    b_share_ptr = partial_ptr + first.to(tl.int64) * (weight_size + bias_size) + b_offset
    for _ in range(first, _pick(b_last_share, expert, BLOCK_E)):
        b_sum += tl.load(b_share_ptr, mask=m_weight | m_bias, other=0.0)
        b_share_ptr += weight_size + bias_size
    tl.store(
        grad_weight_ptr + expert.to(tl.int64) * weight_size + b_offset,
        b_sum.to(grad_weight_ptr.dtype.element_ty),
        mask=m_weight,
    )
    if HAS_BIAS:
        tl.store(
            grad_bias_ptr + expert * bias_size + b_offset - weight_size,
            b_sum.to(grad_bias_ptr.dtype.element_ty),
            mask=m_bias,
        )
