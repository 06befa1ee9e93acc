"""The order of rows on the GPU: integers alone, and every cell written by one thread, so the same bits each run.

Every row gets the rank of its set; its place is the number of rows that come before it. `path` says, in one place,
which way that number is found.
"""

from collections.abc import Callable
from math import comb
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rbm_kernels._launching import launcher, prepared

# Rows of a block. Within a block all pairs are compared, that many comparisons a row.
BLOCK = 256


def path(rows: int, num_experts: int, k: int) -> Literal["compare", "count", "sort"]:
    """Choose from shapes alone how rows are put in order.

    - ``compare``: every row with every other. Up to 1,024 rows launches take longer than comparisons.
    - ``count``: a counting sort on the rank of the set, while a table of sets by blocks of rows is at most 16 entries a
      row: up to 4,096 sets, such as C(8, 3) = 56, C(16, 4) = 1,820 or C(64, 2) = 2,016.
    - ``sort``: the device's stable sort of the ranks, for more sets, such as C(64, 8) = 4,426,165,368.
    """
    if rows <= 1024:
        return "compare"
    return "count" if comb(num_experts, k) <= 4096 else "sort"


@prepared
def fits(num_experts: int, k: int) -> bool:
    """Whether the kernels serve these shapes: ranks within 64 bits on the way, and a tile's experts in registers."""
    return _widest(num_experts, k) < 2**63 and num_experts <= 2048


def _widest(num_experts: int, k: int) -> int:
    """The largest number on the way to a rank: the sum of at most k binomials, or one before its division."""
    return max(comb(num_experts, size) for size in range(k + 1)) * num_experts


@triton.jit
def expert_order_rank_kernel(experts_ptr, ranks_ptr, B, stride, K: tl.constexpr, BLOCK: tl.constexpr):
    """``experts [B, K]`` -> ``ranks [B]`` of their sets in revolving-door order, in the integers of ``ranks``.

    The p-th smallest expert t (both counted from one) adds (-1)^(K - p) C(t, p). No sorting: p is the number of the
    row's experts that are not larger. That is counted by signs of differences: LLVM, as of Triton 3.9.0, puts such
    comparisons side by side into vectors and takes the wrong one of two (sm_90, K = 6), which tests/ptx_executor found.
    """
    integer = ranks_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_rows = rows < B
    b_rank = tl.zeros((BLOCK,), integer) - K % 2
    for j in tl.static_range(K):
        b_expert = tl.load(experts_ptr + rows * stride + j, mask=m_rows, other=0)
        b_place = tl.zeros((BLOCK,), tl.int32)
        for i in tl.static_range(K):
            b_other = tl.load(experts_ptr + rows * stride + i, mask=m_rows, other=0)
            b_place -= (b_other - b_expert - 1) >> 31
        b_binomial = tl.full((BLOCK,), 1, integer)
        for p in tl.static_range(1, K + 1):
            # C(t, p) = C(t, p - 1) (t - p + 1) / p, without a remainder; zero from p = t + 1 on.
            b_binomial = b_binomial * (b_expert + (2 - p)).to(integer) // p
            b_rank += tl.where(b_place == p, b_binomial, 0) * (1 - 2 * ((K - p) % 2))
    tl.store(ranks_ptr + rows, b_rank, mask=m_rows)


@triton.jit
def expert_order_compare_kernel(ranks_ptr, order_ptr, B, BLOCK: tl.constexpr):
    """``ranks [B]`` -> ``order [B]``: a row's place is the number of rows before it."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_rank = tl.load(ranks_ptr + rows, mask=rows < B, other=0)
    b_place = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, B, BLOCK):
        others = start + tl.arange(0, BLOCK)
        b_other = tl.load(ranks_ptr + others, mask=others < B, other=0)
        b_earlier = (b_other[:, None] == b_rank[None, :]) & (others[:, None] < rows[None, :])
        b_before = (b_earlier | (b_other[:, None] < b_rank[None, :])) & (others < B)[:, None]
        b_place += tl.sum(b_before.to(tl.int32), 0)
    tl.store(order_ptr + b_place, rows, mask=rows < B)


@triton.jit
def _load_cell(ranks_ptr, rows, m_rows, SETS: tl.constexpr):
    """Ranks of a block's rows, and their cells in a table ``[SETS, blocks]``.

    Ranks are kept within the table even for experts that the contract forbids; rows past the end get one of their own.
    """
    b_rank = tl.load(ranks_ptr + rows, mask=m_rows, other=0)
    b_rank = tl.where(m_rows, tl.minimum(tl.maximum(b_rank, 0), SETS - 1), SETS)
    return b_rank, b_rank.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)


@triton.jit
def expert_order_count_kernel(ranks_ptr, counts_ptr, B, SETS: tl.constexpr, BLOCK: tl.constexpr):
    """``ranks [B]`` -> ``counts [SETS, blocks]``, zero before: how many rows of each block have each rank.

    The first row of its rank in the block writes for all of them.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_rows = rows < B
    b_rank, cells = _load_cell(ranks_ptr, rows, m_rows, SETS)
    b_same = b_rank[:, None] == b_rank[None, :]
    b_count = tl.sum(b_same.to(tl.int32), 0)
    b_earlier = tl.sum((b_same & (rows[:, None] < rows[None, :])).to(tl.int32), 0)
    tl.store(counts_ptr + cells, b_count, mask=m_rows & (b_earlier == 0))


@triton.jit
def expert_order_scatter_kernel(ranks_ptr, ends_ptr, order_ptr, B, SETS: tl.constexpr, BLOCK: tl.constexpr):
    """``ranks [B]`` and ``ends [SETS, blocks]``, the running sum of the counts -> ``order [B]``."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_rows = rows < B
    b_rank, cells = _load_cell(ranks_ptr, rows, m_rows, SETS)
    # Of the rows with this rank up to the end of the block, these come after this row or are the row itself.
    b_left = (b_rank[:, None] == b_rank[None, :]) & (rows[:, None] >= rows[None, :])
    b_end = tl.load(ends_ptr + cells, mask=m_rows, other=0)
    tl.store(order_ptr + b_end - tl.sum(b_left.to(tl.int32), 0), rows.to(tl.int32), mask=m_rows)


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
    names = tl.arange(0, BLOCK_E)
    m_names = names < E
    b_used = tl.zeros((BLOCK_E,), tl.int32)
    for start in tl.range(0, TILE, BLOCK_M):
        within = start + tl.arange(0, BLOCK_M)
        m_rows = (within < TILE) & (tile * TILE + within < B)
        b_row = tl.load(order_ptr + tile * TILE + within, mask=m_rows, other=0).to(tl.int64)
        for j in tl.static_range(K):
            b_expert = tl.load(experts_ptr + b_row * stride + j, mask=m_rows, other=-1)
            b_used = tl.maximum(b_used, tl.max((b_expert[:, None] == names[None, :]).to(tl.int32), 0))

    # Used experts first, ascending, then -1 in the places that are left.
    b_count = tl.sum(b_used, 0)
    b_unused = tl.where(m_names, 1 - b_used, 0)
    b_place = tl.where(b_used > 0, tl.cumsum(b_used, 0), b_count + tl.cumsum(b_unused, 0)) - 1
    tl.store(tile_experts_ptr + tile * E + b_place, tl.where(b_used > 0, names, -1), mask=m_names)
    tl.store(tile_counts_ptr + tile, b_count)


class _Launches(NamedTuple):
    """Ranks of the rows and their dtype, the launches that order them by rank, and the list of each tile's experts."""

    tiles: int
    integer: torch.dtype
    rank: Callable[..., None]
    compare: Callable[..., None] | None
    # The table of a counting sort, sets by blocks of rows, and its two launches.
    table: tuple[int, int]
    count: Callable[..., None] | None
    scatter: Callable[..., None] | None
    list_experts: Callable[..., None]


def expert_order(experts: Tensor, num_experts: int, block_m: int) -> tuple[Tensor, Tensor, Tensor]:
    """Launch: ``experts [B, k]`` int32 -> ``order [B]``, ``tile_experts [tiles, E]``, ``tile_counts [tiles]``."""
    rows, k = experts.shape
    device = experts.device
    launches = _prepare(rows, num_experts, k, block_m)
    order = torch.empty((rows,), dtype=torch.int32, device=device)
    tile_experts = torch.empty((launches.tiles, num_experts), dtype=torch.int32, device=device)
    tile_counts = torch.empty((launches.tiles,), dtype=torch.int32, device=device)
    if rows == 0:
        return order, tile_experts, tile_counts
    experts = experts if experts.stride(1) == 1 else experts.contiguous()
    stride = experts.stride(0)
    ranks = torch.empty((rows,), dtype=launches.integer, device=device)
    launches.rank(experts, ranks, rows, stride)
    if launches.compare is not None:
        launches.compare(ranks, order, rows)
    elif launches.count is not None:
        counts = torch.zeros(launches.table, dtype=torch.int32, device=device)
        launches.count(ranks, counts, rows)
        launches.scatter(ranks, counts.view(-1).cumsum(0, dtype=torch.int32), order, rows)
    else:
        order = torch.sort(ranks, stable=True).indices.to(torch.int32)
    launches.list_experts(experts, order, tile_experts, tile_counts, rows, stride)
    return order, tile_experts, tile_counts


@prepared
def _prepare(rows: int, num_experts: int, k: int, block_m: int) -> _Launches:
    blocks, tiles = triton.cdiv(rows, BLOCK), triton.cdiv(rows, block_m)
    way, sets = path(rows, num_experts, k), comb(num_experts, k)
    compare = count = scatter = None
    if way == "compare":
        # Small blocks: a multiprocessor each, and few comparisons one after the other.
        compare = launcher(expert_order_compare_kernel, (triton.cdiv(rows, 64),), BLOCK=64, num_warps=4)
    elif way == "count":
        count = launcher(expert_order_count_kernel, (blocks,), SETS=sets, BLOCK=BLOCK, num_warps=8)
        scatter = launcher(expert_order_scatter_kernel, (blocks,), SETS=sets, BLOCK=BLOCK, num_warps=8)
    block_e = triton.next_power_of_2(num_experts)
    return _Launches(
        tiles=tiles,
        integer=torch.int32 if _widest(num_experts, k) < 2**31 else torch.int64,
        rank=launcher(expert_order_rank_kernel, (blocks,), K=k, BLOCK=BLOCK, num_warps=4),
        compare=compare,
        table=(sets, blocks),
        count=count,
        scatter=scatter,
        list_experts=launcher(
            expert_order_tiles_kernel,
            (tiles,),
            K=k,
            E=num_experts,
            TILE=block_m,
            BLOCK_M=min(triton.next_power_of_2(block_m), max(1, 2048 // block_e)),
            BLOCK_E=block_e,
            num_warps=4,
        ),
    )
