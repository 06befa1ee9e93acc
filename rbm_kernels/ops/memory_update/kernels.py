"""The memory update in Triton, for GPUs without librbm_cuda. Two stages, no atomics.

The sums are a matrix product of the transposed rows and their weights. Each program sums up one share of the rows; the
sums of the shares are then added in a fixed order.
"""

import triton
import triton.language as tl

from rbm_kernels.ops.cosine_topk.blocks import load_rows, square_norm, squares


@triton.jit
def memory_statistics_norms_kernel(
    h_ptr, squares_ptr, B, h_stride, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Squared lengths of the rows: ``h [B, D]`` -> ``squares [B]``, float64 for float64 rows, else float32."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    rows = tl.arange(0, BLOCK_M)
    m_rows = rows < B - first
    b_squares = tl.zeros((BLOCK_M, BLOCK_D), squares_ptr.dtype.element_ty)
    for start in tl.range(0, D, BLOCK_D):
        b_h = load_rows(h_ptr + first * h_stride, h_stride, rows, m_rows, start, D, BLOCK_D)
        b_h = b_h.to(squares_ptr.dtype.element_ty)
        b_squares += b_h * b_h
    tl.store(squares_ptr + first + rows, tl.sum(b_squares, 1), mask=m_rows)


@triton.jit
def memory_statistics_kernel(
    h_ptr,
    gates_ptr,
    experts_ptr,
    squares_ptr,
    partials_ptr,
    B,
    h_stride,
    D: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Sums over shares of the rows: ``h [B, D]``, ``gates``, ``experts [B, K]`` -> ``partials [shares, E D + E]``.

    Share s is the tiles s, s + shares, ... of BLOCK_M rows each. ``squares_ptr`` has the squared lengths ``[B]`` where
    rows are wider than BLOCK_D, else it is None.
    """
    dtype = partials_ptr.dtype.element_ty
    # Programs of one share stand side by side: they read the same rows, those of one tile of columns the same bytes.
    first_column = tl.program_id(0) // tl.cdiv(E, BLOCK_E) * BLOCK_D
    experts = tl.program_id(0) % tl.cdiv(E, BLOCK_E) * BLOCK_E + tl.arange(0, BLOCK_E)
    rows = tl.arange(0, BLOCK_M)
    b_sums = tl.zeros((BLOCK_D, BLOCK_E), dtype)
    b_totals = tl.zeros((BLOCK_M, BLOCK_E), dtype)
    for tile in tl.range(tl.program_id(1), tl.cdiv(B, BLOCK_M), tl.num_programs(1)):
        first = tl.cast(tile, tl.int64) * BLOCK_M
        m_rows = rows < B - tile * BLOCK_M
        b_h = load_rows(h_ptr + first * h_stride, h_stride, rows, m_rows, first_column, D, BLOCK_D)
        if squares_ptr is not None:
            b_square = tl.load(squares_ptr + first + rows, mask=m_rows, other=0.0)
        elif b_h.dtype == tl.float16 or b_h.dtype == tl.bfloat16:
            b_square = square_norm(b_h)
        else:
            b_square = tl.sum(squares(b_h), 1)
        b_weights = tl.zeros((BLOCK_M, BLOCK_E), dtype)
        choices = first * K + rows * K
        if dtype == tl.float64:
            # One by one: to raise e to a float64 takes dozens of instructions and registers.
            for j in tl.range(0, K, num_stages=1):
                b_gate, b_chosen = _load_choice(gates_ptr, experts_ptr, choices + j, m_rows, experts)
                b_square += 0.0 * b_gate
                b_weights += b_chosen
        else:
            for j in tl.static_range(K):
                b_gate, b_chosen = _load_choice(gates_ptr, experts_ptr, choices + j, m_rows, experts)
                # A gate that is not finite makes the squared length NaN: 0 times infinity is.
                b_square += 0.0 * b_gate
                b_weights += b_chosen
        # NaN is not less. A row is left out by choice, not by a weight of zero: 0 times its NaN is NaN.
        m_usable = b_square < float("inf")
        b_weights = tl.where(m_usable[:, None], b_weights, 0.0)
        b_totals += b_weights
        if NORMALIZE:
            # 1 / max(|h|, EPS)
            b_square = tl.maximum(b_square, EPS * EPS)
            b_scale = 1.0 / tl.sqrt(b_square) if dtype == tl.float64 else tl.rsqrt(b_square)
            b_weights = b_weights * tl.where(m_usable, b_scale, 0.0)[:, None]
        b_h = tl.where(m_usable[:, None], b_h, 0.0).to(b_h.dtype)
        # Tensor cores cut where they should round, and a long sum would drift: tiles are added outside of them.
        b_sums += _weighted_sum(b_h, b_weights)

    columns = first_column + tl.arange(0, BLOCK_D)
    partials_ptr += tl.program_id(1).to(tl.int64) * (E * D + E)
    places = experts.to(tl.int64)[None, :] * D + columns[:, None]
    tl.store(partials_ptr + places, b_sums, mask=(columns < D)[:, None] & (experts < E)[None, :])
    if first_column == 0:
        tl.store(partials_ptr + E * D + experts, tl.sum(b_totals, 0), mask=experts < E)


@triton.jit
def _load_choice(gates_ptr, experts_ptr, places, m_rows, experts):
    """One gate of each row ``[M]``, and ``[M, E]``: exp(gate) at the expert that it belongs to, else 0."""
    b_gate = tl.load(gates_ptr + places, mask=m_rows, other=0.0)
    b_expert = tl.load(experts_ptr + places, mask=m_rows, other=-1)
    return b_gate, tl.where(b_expert[:, None] == experts[None, :], tl.exp(b_gate)[:, None], 0.0)


@triton.jit
def _cut(b_x):
    """``b_x`` (float32) without its lower 16 bits."""
    return (b_x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _upper_half(b_x):
    """The bfloat16 that :func:`_cut` leaves."""
    return (b_x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _split(b_x):
    """The parts of ``cosine_topk/blocks.py``, bit for bit, in three instructions less; there they cost registers."""
    b_x = b_x.to(tl.float32)
    b_rest = b_x - _cut(b_x)
    return _upper_half(b_x), _upper_half(b_rest), _upper_half(b_rest - _cut(b_rest))


@triton.jit
def _weighted_sum(b_h, b_weights):
    """``b_h [M, D]`` transposed by ``b_weights [M, E]``: ``[D, E]`` in the dtype of the weights and to its accuracy.

    On tensor cores, in parts of bfloat16 (``cosine_topk/blocks.py``), the smallest products first. Of a float32 product
    those below 2^-22 of the largest are left out: on average they come to less than its rounding.
    """
    if b_weights.dtype == tl.float64:
        b_sum = tl.sum(b_h[:, :, None] * b_weights[:, None, :], 0)
    else:
        b_high, b_middle, b_low = _split(b_weights)
        if b_h.dtype == tl.bfloat16:
            b_rows = tl.trans(b_h)
            b_sum = tl.dot(b_rows, b_low)
            b_sum = tl.dot(b_rows, b_middle, b_sum)
            b_sum = tl.dot(b_rows, b_high, b_sum)
        else:
            b_h_high, b_h_middle, b_h_low = _split(b_h)
            b_sum = tl.dot(tl.trans(b_h_high), b_low)
            b_sum = tl.dot(tl.trans(b_h_middle), b_middle, b_sum)
            if b_h.dtype == tl.float32:  # two parts hold a float16
                b_sum = tl.dot(tl.trans(b_h_low), b_high, b_sum)
            b_sum = tl.dot(tl.trans(b_h_high), b_middle, b_sum)
            b_sum = tl.dot(tl.trans(b_h_middle), b_high, b_sum)
            b_sum = tl.dot(tl.trans(b_h_high), b_high, b_sum)
    return b_sum


@triton.jit
def memory_statistics_reduce_kernel(
    partials_ptr, weighted_sum_ptr, total_ptr, shares, sums_size, size, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):
    """``partials [shares, size]`` added in one order -> ``weighted_sum`` (the first ``sums_size``) and ``total``."""
    places = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_sums = tl.zeros((BLOCK_P, BLOCK_N), partials_ptr.dtype.element_ty)
    for start in tl.range(0, shares, BLOCK_P):
        b_share = start + tl.arange(0, BLOCK_P)
        m_partials = (b_share < shares)[:, None] & (places < size)[None, :]
        b_sums += tl.load(partials_ptr + (b_share.to(tl.int64)[:, None] * size + places[None, :]), m_partials, 0.0)
    b_sum = tl.sum(b_sums, 0)
    tl.store(weighted_sum_ptr + places, b_sum, mask=places < sums_size)
    tl.store(total_ptr + (places - sums_size), b_sum, mask=(places >= sums_size) & (places < size))


@triton.jit(do_not_specialize=["decay_bits"])
def memory_update_kernel(
    memory_ptr,
    weighted_sum_ptr,
    total_ptr,
    decay_bits,
    D,
    row_stride,
    stride,
    NORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
    LONG: tl.constexpr,
    SHRINK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move ``memory [E, D]`` by ``weighted_sum [E, D]`` and ``total [E]``, a program an expert.

    ``decay_bits`` are those of a float64: Triton would round a float to float32.
    """
    expert = tl.program_id(0).to(tl.int64)
    total = tl.load(total_ptr + expert)
    if (total > 0.0) & (total < float("inf")):
        memory_ptr += expert * row_stride
        weighted_sum_ptr += expert * D
        factor = tl.full((), 1.0, total.dtype)
        square = _square_norm(memory_ptr, D, stride, factor, BLOCK)
        # As in cosine_topk: the square of a long vector may overflow, and NaN counts as too long.
        if NORMALIZE & ((square < LONG * LONG) == 0):
            factor = tl.full((), SHRINK, total.dtype)
            square = _square_norm(memory_ptr, D, stride, factor, BLOCK)
        decay = tl.cast(decay_bits, tl.int64).to(tl.float64, bitcast=True)
        keep = decay
        if NORMALIZE:
            keep = decay / tl.maximum(tl.sqrt(square.to(tl.float64)), EPS)
        keep = keep.to(total.dtype)
        take = ((1.0 - decay) / total.to(tl.float64)).to(total.dtype)
        for start in tl.range(0, D, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            m_columns = columns < D
            b_memory = tl.load(memory_ptr + columns.to(tl.int64) * stride, mask=m_columns, other=0.0)
            b_sum = tl.load(weighted_sum_ptr + columns, mask=m_columns, other=0.0)
            b_memory = keep * (b_memory * factor) + take * b_sum
            tl.store(memory_ptr + columns.to(tl.int64) * stride, b_memory, mask=m_columns)


@triton.jit
def _square_norm(memory_ptr, D, stride, factor, BLOCK: tl.constexpr):
    """Squared length of ``factor`` times a vector of D elements ``stride`` apart."""
    b_squares = tl.zeros((BLOCK,), factor.dtype)
    for start in tl.range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        b_memory = tl.load(memory_ptr + columns.to(tl.int64) * stride, mask=columns < D, other=0.0) * factor
        b_squares += squares(b_memory)
    return tl.sum(b_squares, 0)
