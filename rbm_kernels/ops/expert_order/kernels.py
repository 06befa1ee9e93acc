"""Triton kernels that sort rows by the rank of their set, and list each tile's experts. They only use integers.

Every element is written by one program and nothing is added atomically, so every run gives the same bits.
"""

import triton
import triton.language as tl

# Rows whose digits are compared at once, in one 32-bit word.
GROUP = tl.constexpr(32)


@triton.jit
def _rank(experts_ptr, rows, stride, SETS: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr):
    """Ranks of the sets of ``rows`` in revolving-door order, in 64 bits if ``WIDE``.

    The p-th smallest expert t (both counted from one) adds (-1)^(K - p) C(t, p). Experts are sorted by insertion, and
    exchanged by signs of differences: LLVM, as of Triton 3.9.0, puts comparisons side by side into vectors and takes
    the wrong one of two (sm_90, K = 6), which tests/ptx_executor found.
    Ranks are kept within the sets even for experts that the contract forbids.
    """
    integer = tl.int64 if WIDE else tl.int32
    experts = ()
    for j in tl.static_range(K):
        b_expert = tl.load(experts_ptr + rows.to(tl.int64) * stride + j)
        ascending = ()
        for i in tl.static_range(j):
            b_less = experts[i] - b_expert
            b_less &= b_less >> 31
            ascending += (b_expert + b_less,)
            b_expert = experts[i] - b_less
        ascending += (b_expert,)
        experts = ascending
    b_rank = tl.zeros(rows.shape, integer) - K % 2
    for p in tl.static_range(1, K + 1):
        b_binomial = tl.full(rows.shape, 1, integer)
        for q in tl.static_range(1, p + 1):
            # C(t, q) = C(t, q - 1) (t - q + 1) / q, without a remainder; zero from q = t + 1 on.
            b_binomial = b_binomial * (experts[p - 1] + (2 - q)).to(integer) // q
        b_rank += b_binomial * (1 - 2 * ((K - p) % 2))
    return tl.minimum(tl.maximum(b_rank, 0), SETS - 1)


@triton.jit
def _list_experts(
    experts_ptr,
    rows_ptr,
    size,
    tile,
    tile_experts_ptr,
    tile_counts_ptr,
    stride,
    K: tl.constexpr,
    E: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Write the experts of a tile: those of the ``size`` rows at ``rows_ptr``, at most ``TILE``."""
    names = tl.arange(0, BLOCK_E)
    m_names = names < E
    b_used = tl.zeros((BLOCK_E,), tl.int32)
    for start in tl.range(0, TILE, BLOCK_M):
        within = start + tl.arange(0, BLOCK_M)
        m_rows = within < size
        b_row = tl.load(rows_ptr + within, mask=m_rows, other=0).to(tl.int64)
        for j in tl.static_range(K):
            b_expert = tl.load(experts_ptr + b_row * stride + j, mask=m_rows, other=-1)
            b_used = tl.maximum(b_used, tl.max((b_expert[:, None] == names[None, :]).to(tl.int32), 0))

    # Used experts first, ascending, then -1 in the places that are left.
    b_count = tl.sum(b_used, 0)
    b_unused = tl.where(m_names, 1 - b_used, 0)
    b_place = tl.where(b_used > 0, tl.cumsum(b_used, 0), b_count + tl.cumsum(b_unused, 0)) - 1
    tl.store(tile_experts_ptr + tile * E + b_place, tl.where(b_used > 0, names, -1), mask=m_names)
    tl.store(tile_counts_ptr + tile, b_count)


@triton.jit
def expert_order_rank_kernel(
    experts_ptr,
    ranks_ptr,
    B,
    stride,
    SETS: tl.constexpr,
    K: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``experts [B, K]`` -> ``ranks [B]`` of their sets."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_rank = _rank(experts_ptr, tl.minimum(rows, B - 1), stride, SETS, K, WIDE)
    tl.store(ranks_ptr + rows, b_rank, mask=rows < B)


@triton.jit
def expert_order_select_kernel(
    experts_ptr,
    ranks_ptr,
    order_ptr,
    tile_experts_ptr,
    tile_counts_ptr,
    B,
    stride,
    SETS: tl.constexpr,
    BITS: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    WIDE: tl.constexpr,
    RANKED: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Everything of ``TILES`` tiles: ``experts [B, K]`` -> their rows in ``order [B]``, and each one's list of experts.

    32 ``BLOCK_G`` is at least B, ``BLOCK_T`` at least ``TILES TILE``, and 2^``BITS`` at least ``SETS``. If ``RANKED``,
    ``ranks [B]`` are there; else every program computes them all.
    """
    first = tl.program_id(0) * (TILES * TILE)
    last = tl.minimum(first + TILES * TILE, B) - 1
    lanes = tl.arange(0, GROUP)[:, None]
    rows = tl.arange(0, BLOCK_G)[None, :] * GROUP + lanes
    if RANKED:
        b_rank = tl.load(ranks_ptr + rows, mask=rows < B, other=SETS)
    else:
        # Loads need no mask where they repeat the last row.
        b_rank = _rank(experts_ptr, tl.minimum(rows, B - 1), stride, SETS, K, WIDE)
        b_rank = tl.where(rows < B, b_rank, SETS)

    # The ranks at the first and the last of these places, from the highest bit on: each is the largest number with no
    # more ranks below it than there are places before. Both counts are of at most 2^13 rows and share an integer.
    integer = tl.int64 if WIDE else tl.int32
    low = tl.full((), 0, integer)
    high = tl.full((), 0, integer)
    bit = tl.full((), 1 << (BITS - 1), integer)
    for _ in tl.range(0, BITS):
        below = _count_pairs(b_rank < low + bit, b_rank < high + bit)
        low += tl.where((below & 0xFFFF) <= first, bit, 0)
        high += tl.where((below >> 16) <= last, bit, 0)
        bit = bit >> 1

    # Places of the rows of these two sets, and of all rows between them as if they were one set. Groups of 32 rows add
    # up the three numbers in one integer.
    below = _count_pairs(b_rank < low, b_rank < high)
    between = _count_pairs(b_rank <= low, b_rank < low) & 0xFFFF
    b_low, b_high, b_between = b_rank == low, b_rank == high, (b_rank > low) & (b_rank < high)
    b_low_word, b_high_word = _words(b_low, lanes, 0), _words(b_high, lanes, 0)
    b_word = _words(b_between, lanes, 0)
    b_counts = (_ones(b_high_word).to(tl.int64) << 32) + _ones(b_word) + (_ones(b_low_word) << 16)
    b_before = tl.cumsum(b_counts, 0) - b_counts
    b_low_place = (below & 0xFFFF) + (b_before.to(tl.int32) >> 16)
    b_high_place = (below >> 16) + (b_before >> 32).to(tl.int32)
    b_place = between + (b_before.to(tl.int32) & 0xFFFF)
    b_place = tl.where(b_low, b_low_place[None, :], tl.where(b_high, b_high_place[None, :], b_place[None, :]))
    b_peers = tl.where(b_low, b_low_word[None, :], tl.where(b_high, b_high_word[None, :], b_word[None, :]))
    b_place += _ones_before(b_peers, lanes)
    b_chosen = (b_low | b_high | b_between) & (b_place >= first) & (b_place <= last)
    tl.store(order_ptr + b_place, rows, mask=b_chosen)

    # The rows are there; those of the sets in between are sorted by rank.
    tl.debug_barrier()
    within = tl.arange(0, BLOCK_T)
    m_rows = within <= last - first
    b_row = tl.load(order_ptr + first + within, mask=m_rows, other=0)
    if RANKED:
        b_rank = tl.load(ranks_ptr + b_row, mask=m_rows, other=SETS)
    else:
        b_rank = tl.where(m_rows, _rank(experts_ptr, b_row, stride, SETS, K, WIDE), SETS)
    b_earlier = (b_rank[:, None] == b_rank[None, :]) & (within[:, None] < within[None, :])
    b_place = tl.sum((b_earlier | (b_rank[:, None] < b_rank[None, :])).to(tl.int32), 0)
    tl.debug_barrier()
    tl.store(order_ptr + first + b_place, b_row, mask=m_rows)
    tl.debug_barrier()
    for start in tl.range(first, last + 1, TILE):
        _list_experts(
            experts_ptr,
            order_ptr + start,
            tl.minimum(last + 1 - start, TILE),
            start // TILE,
            tile_experts_ptr,
            tile_counts_ptr,
            stride,
            K,
            E,
            TILE,
            BLOCK_M,
            BLOCK_E,
        )


@triton.jit
def _count_pairs(b_one, b_other):
    """How many are true of one, and of another times 2^16."""
    return tl.sum(b_one.to(tl.int32) + (b_other.to(tl.int32) << 16))


@triton.jit
def _words(b_bit, lanes, AXIS: tl.constexpr):
    """Bits of groups of rows -> a word for each group: bit i is that of row i. Rows of a group lie along ``AXIS``."""
    return tl.sum(b_bit.to(tl.uint32) << lanes.to(tl.uint32), AXIS)


@triton.jit
def _ones(b_word):
    """How many bits are set; LLVM makes one instruction of it."""
    b_word = b_word - ((b_word >> 1) & 0x55555555)
    b_word = (b_word & 0x33333333) + ((b_word >> 2) & 0x33333333)
    b_word = (b_word + (b_word >> 4)) & 0x0F0F0F0F
    return ((b_word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _ones_before(b_word, lanes):
    """How many bits of each row's word stand for rows before it in its group."""
    return _ones(b_word & ((1 << lanes.to(tl.uint32)) - 1))


@triton.jit
def _match(b_digit, m_rows, lanes, BITS: tl.constexpr):
    """Who has the same digit: ``[G, 32]`` digits of ``BITS`` bits -> words ``[G, 32]`` and ``[G, 2^BITS]``.

    Words of 32 bits, one for each row and one for each digit of a group. Bit i is row i of the group; masked rows are
    in none. This is how CUB ranks the keys of a warp (BlockRadixRankMatch), with sums of bits for its ballots.
    """
    digits = tl.arange(0, 1 << BITS)[None, :].to(tl.uint32)
    b_present = _words(m_rows, lanes, 1)[:, None]
    b_peers = b_present + tl.zeros_like(b_digit)
    b_members = b_present + tl.zeros_like(digits)
    for p in tl.static_range(BITS):
        b_bit = (b_digit >> p) & 1
        b_word = _words(b_bit, lanes, 1)[:, None]
        # Whoever has the bit keeps the word, and whoever has it not takes the opposite.
        b_peers &= b_word ^ (b_bit - 1)
        b_members &= b_word ^ (((digits >> p) & 1) - 1)
    return b_peers, b_members


@triton.jit
def _digit(b_rank, SHIFT: tl.constexpr, BITS: tl.constexpr):
    """``BITS`` bits of the rank from ``SHIFT`` on."""
    return ((b_rank >> SHIFT) & ((1 << BITS) - 1)).to(tl.uint32)


@triton.jit
def expert_order_count_kernel(
    experts_ptr,
    ranks_ptr,
    order_ptr,
    counts_ptr,
    B,
    stride,
    share,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    SETS: tl.constexpr,
    K: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """How many rows of each share have each digit: ``counts [shares, 2^BITS]``.

    The digit is ``BITS`` bits of the rank from ``SHIFT`` on. For the lowest, rows stand as they come and their
    ``ranks [B]`` are computed and kept; for others they stand in ``order [B]``.
    """
    lanes = tl.arange(0, GROUP)[None, :]
    begin = tl.program_id(0).to(tl.int64) * share
    end = tl.minimum(begin + share, B)
    b_counts = tl.zeros((BLOCK_G, 1 << BITS), tl.int32)
    for start in tl.range(begin, end, BLOCK_G * GROUP):
        places = start + tl.arange(0, BLOCK_G)[:, None] * GROUP + lanes
        m_rows = places < end
        if SHIFT == 0:
            b_rank = _rank(experts_ptr, tl.minimum(places, end - 1), stride, SETS, K, WIDE)
            tl.store(ranks_ptr + places, b_rank, mask=m_rows)
        else:
            b_row = tl.load(order_ptr + places, mask=m_rows, other=0)
            b_rank = tl.load(ranks_ptr + b_row, mask=m_rows, other=0)
        _, b_members = _match(_digit(b_rank, SHIFT, BITS), m_rows, lanes, BITS)
        b_counts += _ones(b_members)
    tl.store(counts_ptr + tl.program_id(0) * (1 << BITS) + tl.arange(0, 1 << BITS), tl.sum(b_counts, 0))


@triton.jit
def expert_order_scatter_kernel(
    ranks_ptr,
    order_ptr,
    counts_ptr,
    sorted_ptr,
    B,
    share,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Rows to their places by one digit: ``order [B]``, for the lowest the rows as they come -> ``sorted [B]``."""
    digits = tl.arange(0, 1 << BITS)
    mine = tl.program_id(0)
    b_all = tl.zeros((BLOCK_S, 1 << BITS), tl.int32)
    b_before = tl.zeros((BLOCK_S, 1 << BITS), tl.int32)
    for start in tl.range(0, tl.num_programs(0), BLOCK_S):
        shares = (start + tl.arange(0, BLOCK_S))[:, None]
        b_counts = tl.load(
            counts_ptr + shares * (1 << BITS) + digits[None, :], mask=shares < tl.num_programs(0), other=0
        )
        b_all += b_counts
        b_before += tl.where(shares < mine, b_counts, 0)
    b_total = tl.sum(b_all, 0)
    # Where this share's rows of each digit begin: behind smaller digits and behind the shares in front.
    b_place = tl.cumsum(b_total, 0) - b_total + tl.sum(b_before, 0)

    lanes = tl.arange(0, GROUP)[None, :]
    begin = mine.to(tl.int64) * share
    end = tl.minimum(begin + share, B)
    for start in tl.range(begin, end, BLOCK_G * GROUP):
        places = start + tl.arange(0, BLOCK_G)[:, None] * GROUP + lanes
        m_rows = places < end
        b_row = places.to(tl.int32)
        if SHIFT > 0:
            b_row = tl.load(order_ptr + places, mask=m_rows, other=0)
        b_digit = _digit(tl.load(ranks_ptr + b_row, mask=m_rows, other=0), SHIFT, BITS)
        b_peers, b_members = _match(b_digit, m_rows, lanes, BITS)
        b_counts = _ones(b_members)
        b_groups = b_place[None, :] + tl.cumsum(b_counts, 0) - b_counts
        tl.store(
            sorted_ptr + tl.gather(b_groups, b_digit.to(tl.int32), 1) + _ones_before(b_peers, lanes), b_row, mask=m_rows
        )
        b_place += tl.sum(b_counts, 0)


@triton.jit
def expert_order_tiles_kernel(
    experts_ptr,
    order_ptr,
    tile_experts_ptr,
    tile_counts_ptr,
    B,
    stride,
    K: tl.constexpr,
    E: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Experts of a tile: ``experts [B, K]``, ``order [B]`` -> ``tile_experts [tiles, E]``, ``tile_counts [tiles]``."""
    tile = tl.program_id(0).to(tl.int64)
    size = tl.minimum(B - tile * TILE, TILE)
    _list_experts(
        experts_ptr,
        order_ptr + tile * TILE,
        size,
        tile,
        tile_experts_ptr,
        tile_counts_ptr,
        stride,
        K,
        E,
        TILE,
        BLOCK_M,
        BLOCK_E,
    )
