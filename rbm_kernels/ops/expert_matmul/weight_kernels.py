"""The outputs with one row per expert, in Triton: ``grad_weight`` and ``grad_bias``.

Rows are listed by expert with a stable counting sort (count, running sum, list). The list is divided into shares of
equal length. Each share sums up its part of one expert's gradient, and these parts are added in a fixed order. There
are no atomics, so every run gives the same bits. List entries are loaded into registers one slice ahead, so that
Triton's pipeline only has to copy the rows: Triton 3.6 would copy the entries too, four bytes at a time.
"""

import triton
import triton.language as tl


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
    """For each expert ``[BLOCK_E]`` where its listed rows begin and end, its first share and the one after its last.

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
    num_experts,
    IN_FEATURES: tl.constexpr,
    OUT_FEATURES: tl.constexpr,
    STRIDE_GRAD: tl.constexpr,
    STRIDE_X: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SUM_BY_SLICES: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One share of one expert's rows: ``sum_b gate grad[b]^T x[b]`` on a BLOCK_M x BLOCK_N tile of ``[N, D]``.

    ``partial [shares, N * D + N]`` float32 takes it, and behind it the share's part of the bias' gradient. The product
    runs over BLOCK_K rows at a time; with SUM_BY_SLICES each slice's product is summed by itself first. Strides are
    constants: a row's address then takes one instruction instead of four.
    """
    column_tiles: tl.constexpr = (IN_FEATURES + BLOCK_N - 1) // BLOCK_N
    weight_tiles: tl.constexpr = (OUT_FEATURES + BLOCK_M - 1) // BLOCK_M * column_tiles
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
    b_weight, b_bias = _zeros(grad_ptr.dtype.element_ty, BLOCK_M, BLOCK_N, BLOCK_K)
    b_rows, b_gates = _load_listed(listed_rows_ptr, listed_gates_ptr, first, last, BLOCK_K)
    for start in range(first, last, BLOCK_K):
        m_rows = start + tl.arange(0, BLOCK_K) < last
        b_grad = _load_rows(grad_ptr, b_rows * STRIDE_GRAD, b_n, m_rows, OUT_FEATURES, BLOCK_M)
        b_x = _load_rows(x_ptr, b_rows * STRIDE_X, b_d, m_rows, IN_FEATURES, BLOCK_N)
        b_weight, b_bias = _add_slice(
            b_weight, b_bias, b_grad, b_x, b_gates, HAS_BIAS, SUM_BY_SLICES, INPUT_PRECISION, BLOCK_M, BLOCK_K
        )
        b_rows, b_gates = _load_listed(listed_rows_ptr, listed_gates_ptr, start + BLOCK_K, last, BLOCK_K)

    partial_ptr += share.to(tl.int64) * (IN_FEATURES + 1) * OUT_FEATURES
    m_n = b_n < OUT_FEATURES
    _store(partial_ptr, b_weight, b_n, b_d, IN_FEATURES, OUT_FEATURES, grad_ptr.dtype.element_ty)
    if HAS_BIAS and column_tile == 0:
        tl.store(partial_ptr + OUT_FEATURES * IN_FEATURES + b_n, tl.sum(b_bias, axis=0), mask=m_n)


@triton.jit
def _load_listed(listed_rows_ptr, listed_gates_ptr, start, last, BLOCK_K: tl.constexpr):
    """Rows and gates of a slice of the list; those past the last are row 0, and their gates zero."""
    b_place = start + tl.arange(0, BLOCK_K)
    m_rows = b_place < last
    b_rows = tl.load(listed_rows_ptr + b_place, mask=m_rows, other=0).to(tl.int64)
    return b_rows, tl.load(listed_gates_ptr + b_place, mask=m_rows, other=0.0)


@triton.jit
def expert_matmul_bwd_weight_small_kernel(
    grad_ptr,
    x_ptr,
    gates_ptr,
    experts_ptr,
    grad_weight_ptr,
    grad_bias_ptr,
    rows,
    stride_grad,
    stride_x,
    IN_FEATURES: tl.constexpr,
    OUT_FEATURES: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SUM_BY_SLICES: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The same for few rows in one launch: a program takes all rows past one expert, those that do not use it as zeros.

    ``grad_weight [E, N, D]`` and ``grad_bias [E, N]`` are written at once: there is nothing to add up.
    """
    column_tiles: tl.constexpr = (IN_FEATURES + BLOCK_N - 1) // BLOCK_N
    column_tile = tl.program_id(0) % column_tiles
    expert = tl.program_id(1)
    b_n = (tl.program_id(0) // column_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    b_d = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    b_weight, b_bias = _zeros(grad_ptr.dtype.element_ty, BLOCK_M, BLOCK_N, BLOCK_K)
    for start in range(0, rows, BLOCK_K):
        b_rows = start + tl.arange(0, BLOCK_K).to(tl.int64)
        m_rows = b_rows < rows
        b_gates = tl.zeros((BLOCK_K,), tl.float32)
        m_used = b_rows < 0
        for choice in tl.static_range(TOP_K):
            m_choice = tl.load(experts_ptr + b_rows * TOP_K + choice, mask=m_rows, other=-1) == expert
            b_gates += tl.load(gates_ptr + b_rows * TOP_K + choice, mask=m_choice, other=0.0)
            m_used = m_used | m_choice
        b_grad = _load_rows(grad_ptr, b_rows * stride_grad, b_n, m_used, OUT_FEATURES, BLOCK_M)
        b_x = _load_rows(x_ptr, b_rows * stride_x, b_d, m_used, IN_FEATURES, BLOCK_N)
        b_weight, b_bias = _add_slice(
            b_weight, b_bias, b_grad, b_x, b_gates, HAS_BIAS, SUM_BY_SLICES, INPUT_PRECISION, BLOCK_M, BLOCK_K
        )
    grad_weight_ptr += expert.to(tl.int64) * IN_FEATURES * OUT_FEATURES
    _store(grad_weight_ptr, b_weight, b_n, b_d, IN_FEATURES, OUT_FEATURES, grad_ptr.dtype.element_ty)
    if HAS_BIAS and column_tile == 0:
        b_sum = tl.sum(b_bias, axis=0).to(grad_bias_ptr.dtype.element_ty)
        tl.store(grad_bias_ptr + expert * OUT_FEATURES + b_n, b_sum, mask=b_n < OUT_FEATURES)


@triton.jit
def _zeros(dtype: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Sums of a tile of the weight's gradient, BLOCK_M outputs by BLOCK_N inputs or the reverse, and of the bias'.

    Gradients in float16 are small, often below its smallest normal number, where bits are missing: there rows of x,
    which are not, take the gate. The factor with the gate passes through registers. It stands on the right, for which
    matrix instructions read shared memory: on the left they would take registers, and Hopper's would wait for each
    other. Rows of the bias' gradient are summed four by four, which a thread does by itself; the rest once, at the end.
    """
    gates_x: tl.constexpr = dtype == tl.float16
    b_weight = tl.zeros((BLOCK_M if gates_x else BLOCK_N, BLOCK_N if gates_x else BLOCK_M), tl.float32)
    return b_weight, tl.zeros((BLOCK_K // 4, BLOCK_M), tl.float32)


@triton.jit
def _add_slice(
    b_weight,
    b_bias,
    b_grad,
    b_x,
    b_gates,
    HAS_BIAS: tl.constexpr,
    SUM_BY_SLICES: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Add BLOCK_K rows to the sums of :func:`_zeros`."""
    # Rounded before the bias's sum: fused with the sum of two lanes, each would round the other's product.
    b_scaled = tl.fma(b_grad.to(tl.float32), b_gates[:, None], 0.0)
    if HAS_BIAS:
        b_bias += tl.sum(tl.reshape(b_scaled, (4, BLOCK_K // 4, BLOCK_M)), axis=0)
    if b_x.dtype == tl.float16:
        b_left, b_right = tl.trans(b_grad), (b_x * b_gates[:, None]).to(b_x.dtype)
    else:
        b_left, b_right = tl.trans(b_x), b_scaled.to(b_x.dtype)
    if SUM_BY_SLICES:
        # A slice is summed by itself, then added: the error of a share grows with its slices, not with its rows.
        # Without the last argument, which means nothing to float32, Triton's compiler makes one chain of both.
        b_weight += tl.dot(b_left, b_right, input_precision=INPUT_PRECISION, max_num_imprecise_acc=1)
    else:
        b_weight = tl.dot(b_left, b_right, b_weight, input_precision=INPUT_PRECISION)
    return b_weight, b_bias


@triton.jit
def _store(weight_ptr, b_weight, b_n, b_d, IN_FEATURES: tl.constexpr, OUT_FEATURES: tl.constexpr, dtype: tl.constexpr):
    """Write the sums of :func:`_zeros` to ``[N, D]``."""
    b_weight = b_weight.to(weight_ptr.dtype.element_ty)
    m_n, m_d = b_n < OUT_FEATURES, b_d < IN_FEATURES
    if dtype == tl.float16:
        tl.store(weight_ptr + b_n[:, None] * IN_FEATURES + b_d[None, :], b_weight, mask=m_n[:, None] & m_d[None, :])
    else:
        tl.store(weight_ptr + b_n[None, :] * IN_FEATURES + b_d[:, None], b_weight, mask=m_n[None, :] & m_d[:, None])


@triton.jit
def _load_rows(rows_ptr, b_offset, b_column, m_rows, FEATURES: tl.constexpr, BLOCK: tl.constexpr):
    """Features ``b_column [BLOCK]`` of listed rows, zero for those past the last: ``[BLOCK_K, BLOCK]``."""
    b_ptr = rows_ptr + b_offset[:, None] + b_column[None, :]
    if FEATURES % BLOCK == 0:
        return tl.load(b_ptr, mask=m_rows[:, None], other=0.0)
    return tl.load(b_ptr, mask=m_rows[:, None] & (b_column < FEATURES)[None, :], other=0.0)


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
    """``grad_weight [E, N, D]`` and ``grad_bias [E, N]``: an expert's shares added in their order, so always alike."""
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
