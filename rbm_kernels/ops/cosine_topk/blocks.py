"""Building blocks of routing: Triton functions that several kernels share.

Dot products run on the tensor cores and are still float32-accurate: a float32 number is the sum of three bfloat16
numbers, and the product of two bfloat16 numbers is exact in float32. TensorFloat-32 would keep 11 of the 24 bits, which
can send a row to the wrong expert. Without tensor cores, the sums over a row would take longer than reading it.
"""

import triton
import triton.language as tl


@triton.jit
def _upper_half(b_x):
    """The bfloat16 that is ``b_x`` (float32) without its lower 16 bits: a cut, which is cheaper than rounding."""
    return (b_x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def split(b_x):
    """Three bfloat16 tensors whose sum is ``b_x`` exactly: 8 of the 24 bits each, save where the third underflows."""
    b_x = b_x.to(tl.float32)
    b_high = _upper_half(b_x)
    b_rest = b_x - b_high.to(tl.float32)
    b_middle = _upper_half(b_rest)
    b_low = _upper_half(b_rest - b_middle.to(tl.float32))
    return b_high, b_middle, b_low


@triton.jit
def side_by_side(b_columns):
    """The parts of ``b_columns [K, N]`` in one matrix ``[K, 4 N]``, the fourth zero: one product serves them all."""
    b_high, b_middle, b_low = split(b_columns)
    b_parts = tl.join(tl.join(b_high, b_middle), tl.join(b_low, tl.zeros_like(b_low)))
    return tl.reshape(tl.permute(b_parts, (0, 2, 3, 1)), (b_columns.shape[0], 4 * b_columns.shape[1]))


@triton.jit
def below_each_other(b_columns):
    """The parts of ``b_columns [N, K]`` in one matrix ``[4 K, N]``, the fourth part zero."""
    b_high, b_middle, b_low = split(b_columns)
    b_parts = tl.join(tl.join(b_high, b_middle), tl.join(b_low, tl.zeros_like(b_low)))
    return tl.reshape(tl.permute(b_parts, (2, 3, 1, 0)), (4 * b_columns.shape[1], b_columns.shape[0]))


@triton.jit
def dot_float32(b_rows, b_parts, N: tl.constexpr):
    """``b_rows [M, K] @ b_columns [K, N]`` to float32 accuracy, where ``b_parts = side_by_side(b_columns)``."""
    if b_rows.dtype == tl.bfloat16:
        b_dot = tl.dot(b_rows, b_parts)
    else:
        # The smallest products come first, so that fewer of their bits are lost.
        b_high, b_middle, b_low = split(b_rows)
        if b_rows.dtype == tl.float32:
            b_dot = tl.dot(b_low, b_parts)
            b_dot = tl.dot(b_middle, b_parts, b_dot)
        else:  # two parts hold a float16
            b_dot = tl.dot(b_middle, b_parts)
        b_dot = tl.dot(b_high, b_parts, b_dot)
    return tl.sum(tl.reshape(b_dot, (b_rows.shape[0], 4, N)), 1)


@triton.jit
def squares(b_x):
    """``b_x`` (float32) times itself, rounded: a compiler would fuse the product with the sum that takes it.

    Where a lane holds one product, that sum is the one with another lane's: each of the two would round the other's
    product and not its own, and the lanes would hold sums that differ.
    """
    return tl.fma(b_x, b_x, 0.0)


@triton.jit
def square_norm(b_rows):
    """Sum of squares of each row of ``b_rows [M, K]``, in float32."""
    if b_rows.dtype == tl.float32:
        b_sum = tl.sum(squares(b_rows), 1)
    else:
        # Half-precision products are exact, and the diagonal of the rows' product with themselves comes free on tensor
        # cores, where converting, squaring and shuffling every element costs more than reading it.
        places = tl.arange(0, b_rows.shape[0])
        b_product = tl.dot(b_rows, tl.trans(b_rows))
        b_sum = tl.sum(tl.where(places[:, None] == places[None, :], b_product, 0.0), 1)
    return b_sum


@triton.jit
def shrinking(b_square):
    """What a vector of this squared length is multiplied by before it is squared: 1, or a power of two if it is long.

    The square of a vector longer than 1e15 may overflow. NaN counts as too long, and stays what it is.
    """
    return tl.where(b_square < 1e30, 1.0, 8.271806125530277e-25)  # 2^-80


@triton.jit
def has_long(b_square, b_other_square):
    """Whether one of these squared lengths, ``[M]`` and ``[N]``, is that of a long vector."""
    return (tl.min(shrinking(b_square), 0) < 1.0) | (tl.min(shrinking(b_other_square), 0) < 1.0)


@triton.jit
def is_long(b_square, b_memory_square):
    """Of which rows ``[M]`` products with the memory may overflow: long ones, and all if a memory vector is long."""
    return tl.minimum(shrinking(b_square), tl.min(shrinking(b_memory_square), 0)) < 1.0


@triton.jit
def scaled(b_rows, b_factor):
    """The rows of ``b_rows [M, K]`` times ``b_factor [M]``, in their dtype.

    In float16, which has no 2^-80, they become 0 and NaN: only rows that are not finite are long there.
    """
    return (b_rows.to(tl.float32) * b_factor[:, None]).to(b_rows.dtype)


@triton.jit
def load_rows(h_ptr, h_stride, rows, m_rows, start, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Columns ``start`` to ``start + BLOCK_D`` of the rows ``[BLOCK_M]`` from ``h_ptr`` on: ``[BLOCK_M, BLOCK_D]``."""
    columns = start + tl.arange(0, BLOCK_D)
    mask = m_rows[:, None] & (columns < D)[None, :]
    return tl.load(h_ptr + (rows[:, None] * h_stride + columns[None, :]), mask=mask, other=0.0)


@triton.jit
def load_memory(
    memory_ptr, stride, start, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Columns ``start`` to ``start + BLOCK_D`` of the memory, transposed: ``[BLOCK_D, BLOCK_E]``."""
    experts = tl.arange(0, BLOCK_E)
    columns = start + tl.arange(0, BLOCK_D)
    mask = (experts < E)[None, :] & (columns < D)[:, None]
    return tl.load(memory_ptr + experts[None, :] * stride + columns[:, None], mask=mask, other=0.0)


@triton.jit
def dots_and_squares(
    h_ptr,
    h_stride,
    memory_ptr,
    memory_stride,
    rows,
    m_rows,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Tile by tile of columns: products of rows and memory ``[BLOCK_M, BLOCK_E]``, squared lengths of both."""
    b_dot = tl.zeros((rows.shape[0], BLOCK_E), tl.float32)
    b_square = tl.zeros((rows.shape[0],), tl.float32)
    b_memory_square = tl.zeros((BLOCK_E,), tl.float32)
    for start in tl.range(0, D, BLOCK_D):
        b_h = load_rows(h_ptr, h_stride, rows, m_rows, start, D, BLOCK_D)
        b_memory = load_memory(memory_ptr, memory_stride, start, D, E, BLOCK_D, BLOCK_E)
        b_square += square_norm(b_h)
        b_memory_square += tl.sum(squares(b_memory), 0)
        # Tensor cores cut where they should round, and a long sum would drift: tiles are added outside of them.
        b_dot += dot_float32(b_h, side_by_side(b_memory), BLOCK_E)
    return b_dot, b_square, b_memory_square


@triton.jit
def dots_and_squares_of_long(
    h_ptr,
    h_stride,
    memory_ptr,
    memory_stride,
    rows,
    m_rows,
    b_square,
    b_memory_square,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """The same where vectors are long by their squared lengths, multiplied by :func:`shrinking`: no cosine changes."""
    b_factor = shrinking(b_square)
    b_memory_factor = shrinking(b_memory_square)
    b_dot = tl.zeros((rows.shape[0], BLOCK_E), tl.float32)
    b_square = tl.zeros((rows.shape[0],), tl.float32)
    b_memory_square = tl.zeros((BLOCK_E,), tl.float32)
    for start in tl.range(0, D, BLOCK_D):
        b_h = scaled(load_rows(h_ptr, h_stride, rows, m_rows, start, D, BLOCK_D), b_factor)
        b_memory = load_memory(memory_ptr, memory_stride, start, D, E, BLOCK_D, BLOCK_E) * b_memory_factor[None, :]
        b_square += square_norm(b_h)
        b_memory_square += tl.sum(squares(b_memory), 0)
        b_dot += dot_float32(b_h, side_by_side(b_memory), BLOCK_E)
    return b_dot, b_square, b_memory_square


@triton.jit
def choose(
    b_dot,
    b_square,
    b_memory_square,
    sharpness,
    E: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The K experts of largest cosine, best first: gates, experts and cosines, each ``[BLOCK_M, BLOCK_K]``.

    Columns from K on hold gate 0 (NaN in a row with a NaN) and expert 0.
    """
    experts = tl.arange(0, b_dot.shape[1])
    # 1 / max(|v|, EPS)
    b_scale = tl.rsqrt(tl.maximum(b_square, EPS * EPS))
    b_memory_scale = tl.rsqrt(tl.maximum(b_memory_square, EPS * EPS))
    b_cosines = b_dot * b_scale[:, None] * b_memory_scale[None, :]

    # As in torch.sort, NaN ranks above every cosine, so that a bad row still names K different experts.
    b_key = tl.where(b_cosines == b_cosines, b_cosines, 2.0)
    b_key = tl.where((experts < E)[None, :], b_key, float("-inf"))
    choices = tl.arange(0, BLOCK_K)
    b_top = tl.full((b_dot.shape[0], BLOCK_K), float("-inf"), tl.float32)
    b_chosen = tl.zeros((b_dot.shape[0], BLOCK_K), tl.int32)
    for j in tl.static_range(K):
        b_best, b_expert = tl.max(b_key, 1, return_indices=True, return_indices_tie_break_left=True)
        b_key = tl.where(experts[None, :] == b_expert[:, None], float("-inf"), b_key)
        b_top = tl.where(choices[None, :] == j, b_best[:, None], b_top)
        b_chosen = tl.where(choices[None, :] == j, b_expert[:, None], b_chosen)
    b_top = tl.where(b_top < 2.0, b_top, float("nan"))

    # exp(-inf) = 0 for the columns from K on.
    b_weight = tl.exp((b_top - tl.max(b_top, 1)[:, None]) * sharpness)
    return b_weight / tl.sum(b_weight, 1)[:, None], b_chosen, b_top
