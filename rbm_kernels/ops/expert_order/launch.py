"""Launches that order rows. The function `path` decides which method is used.

Nothing depends on values or synchronises with the host, so the launches can be captured in a CUDA graph.
"""

from collections.abc import Callable
from math import comb
from typing import Literal, NamedTuple

import torch
import triton
from torch import Tensor

from rbm_kernels._launching import launcher, machine_of, prepared, with_adjacent_features
from rbm_kernels.ops.expert_order import kernels
from rbm_kernels.ops.expert_order.op import widest_number

# Groups of rows that one program handles together when it sorts by a digit.
GROUPS = 16
# Maximum bits per digit: a table of 128 counts for each share of the rows.
DIGIT_BITS = 7
# Minimum bits per digit; the highest may then be zero in all ranks. The scatter kernel gathers along the 2^bits values
# of a digit. Triton 3.6 puts all of them into one warp, which then spans 32 / 2^bits groups of rows, and fails to
# compile if the eight warps together span more than the GROUPS that there are.
LEAST_BITS = 4
# For "select": the maximum number of all rows, and of rows that one program selects for its tiles.
SELECTED_FROM, SELECTED = 8192, 128
# Maximum k for which each program computes the ranks itself; for larger k, ranks have a launch of their own.
SELECTED_K = 4


def path(rows: int, block_m: int) -> Literal["select", "count"]:
    """Choose the method of ordering from shapes alone.

    - ``select``: one launch. Each program computes the ranks of all rows and selects the rows of its tiles: up to 8,192
      rows in tiles of up to 128. Ranks are a separate launch if k exceeds 4 or they need 64 bits on the way.
    - ``count``: a stable counting sort by each digit of the rank, lowest digit first: two launches per digit.
    """
    return "select" if rows <= SELECTED_FROM and block_m <= SELECTED else "count"


def height(rows: int, block_m: int) -> int:
    """Rows of a tile that kernels go through: ``block_m``, or fewer if one tile has all rows and room for more.

    The same for many numbers of rows, because it is compiled for. A kernel would go through the empty part as well.
    """
    return min(block_m, max(SELECTED, triton.next_power_of_2(rows)))


class _Digit(NamedTuple):
    """The two launches that sort by one digit of the rank."""

    count: Callable[..., None]
    scatter: Callable[..., None]


class _Launches(NamedTuple):
    """``select`` (after ``rank``, if separate), or a sort by each digit followed by the list of each tile's experts."""

    tiles: int
    rank: Callable[..., None] | None
    select: Callable[..., None] | None
    integer: torch.dtype
    share: int
    # Counts by share of the rows and value of a digit.
    table: tuple[int, int]
    digits: tuple[_Digit, ...]
    list_experts: Callable[..., None]


def expert_order(experts: Tensor, num_experts: int, block_m: int) -> tuple[Tensor, Tensor, Tensor]:
    """Launch: ``experts [B, k]`` int32 -> ``order [B]``, ``tile_experts [tiles, E]``, ``tile_counts [tiles]``."""
    rows, k = experts.shape
    device = experts.device
    launches = _prepare(rows, num_experts, k, block_m, machine_of(device).multiprocessors)
    order = torch.empty((rows,), dtype=torch.int32, device=device)
    tile_experts = torch.empty((launches.tiles, num_experts), dtype=torch.int32, device=device)
    tile_counts = torch.empty((launches.tiles,), dtype=torch.int32, device=device)
    if rows == 0:
        return order, tile_experts, tile_counts
    experts = with_adjacent_features(experts)
    stride = experts.stride(0)
    if launches.select is not None and launches.rank is None:
        launches.select(experts, None, order, tile_experts, tile_counts, rows, stride)
        return order, tile_experts, tile_counts
    ranks = torch.empty((rows,), dtype=launches.integer, device=device)
    if launches.select is not None:
        launches.rank(experts, ranks, rows, stride)
        launches.select(experts, ranks, order, tile_experts, tile_counts, rows, stride)
        return order, tile_experts, tile_counts
    counts = torch.empty(launches.table, dtype=torch.int32, device=device)
    # Each digit sorts from one of these into the other, the last digit into the result.
    before, after = (torch.empty_like(order) if len(launches.digits) > 1 else order), order
    if len(launches.digits) % 2 == 0:
        before, after = after, before
    for digit in launches.digits:
        digit.count(experts, ranks, before, counts, rows, stride, launches.share)
        digit.scatter(ranks, before, counts, after, rows, launches.share)
        before, after = after, before
    launches.list_experts(experts, order, tile_experts, tile_counts, rows, stride)
    return order, tile_experts, tile_counts


@prepared
def _prepare(rows: int, num_experts: int, k: int, block_m: int, multiprocessors: int) -> _Launches:
    block_m = height(rows, block_m)
    sets = comb(num_experts, k)
    bits = max(1, (sets - 1).bit_length())
    wide = widest_number(num_experts, k) >= 2**31
    of_sets = {"SETS": sets, "K": k, "WIDE": wide}
    block_e = triton.next_power_of_2(num_experts)
    of_tiles = {
        "K": k,
        "E": num_experts,
        "TILE": block_m,
        "BLOCK_M": min(triton.next_power_of_2(block_m), max(1, 2048 // block_e)),
        "BLOCK_E": block_e,
    }
    tiles = triton.cdiv(rows, block_m)
    rank = select = None
    if path(rows, block_m) == "select":
        ranked = wide or k > SELECTED_K
        if ranked:
            rank = launcher(
                kernels.expert_order_rank_kernel, (triton.cdiv(rows, 128),), **of_sets, BLOCK=128, num_warps=4
            )
        block = max(128, triton.next_power_of_2(rows))
        # One program per multiprocessor is enough: most of its work is done for all rows.
        together = max(1, min(triton.cdiv(tiles, multiprocessors), SELECTED // block_m))
        select = launcher(
            kernels.expert_order_select_kernel,
            (triton.cdiv(tiles, together),),
            **of_sets | of_tiles,
            BITS=bits,
            RANKED=ranked,
            BLOCK_G=block // kernels.GROUP.value,
            TILES=together,
            BLOCK_T=triton.next_power_of_2(together * block_m),
            num_warps=min(32, max(4, block // 256)),
            programs=1,
        )

    number = triton.cdiv(bits, DIGIT_BITS)
    width = max(LEAST_BITS, triton.cdiv(bits, number))
    # Two programs per multiprocessor, as long as their table, which each of them reads, is not larger than the table of
    # one program with the widest digits.
    programs = multiprocessors * min(2, 2 ** (DIGIT_BITS - width))
    block = kernels.GROUP.value * GROUPS
    share = block * triton.cdiv(rows, block * programs)
    shares = triton.cdiv(rows, max(1, share))
    digits = []
    for shift in range(0, number * width, width):
        options = {"SHIFT": shift, "BITS": width, "BLOCK_G": GROUPS, "num_warps": 8}
        count = launcher(kernels.expert_order_count_kernel, (shares,), **of_sets, **options)
        scatter = launcher(kernels.expert_order_scatter_kernel, (shares,), **options, BLOCK_S=2048 >> width)
        digits.append(_Digit(count, scatter))
    return _Launches(
        tiles=tiles,
        rank=rank,
        select=select,
        integer=torch.int64 if wide else torch.int32,
        share=share,
        table=(shares, 2**width),
        digits=tuple(digits),
        list_experts=launcher(kernels.expert_order_tiles_kernel, (tiles,), **of_tiles, num_warps=4),
    )
