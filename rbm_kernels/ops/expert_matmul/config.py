"""Tiles of the kernels: a table by machine and precision, adjusted to the shape. Nothing is tuned at run time.

The tiles of sm_90 are the fastest of those that were timed on an H100 (benchmarks/results/gpu_tune.csv), except for
odd widths, which were not timed. ``python -m benchmarks.compiled.static_report`` lists the registers of each. A
multiprocessor has 65,536, so two programs of 256 threads fit if each thread has at most 128. ``python -m
benchmarks.tuning.tune`` times other tiles and prints rows for the tables.

A slice of the rows is kept in shared memory, with as many features as fit next to two slices of the weights, because
loads pause at the end of each slice. Rows of odd width are read element by element, each with its own address and mask.
This takes registers, so such widths have smaller tiles of their own in half precision.
"""

from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

from rbm_kernels._launching import prepared
from rbm_kernels.checks import MOST_SIZE
from rbm_kernels.ops.expert_order import pass_columns
from rbm_kernels.ops.expert_order.op import binomials, ranks_fit

# Features of the bias that the backward kernel multiplies at once: the minimum tile size of a matrix instruction.
UNION_BLOCK = 16
# The minimum tile size that tl.dot supports in every precision.
_SMALLEST = 16


class Tile(NamedTuple):
    """A program's output tile, the slice of its inner dimension, its warps and the depth of its pipeline of loads.

    ``programs`` of them fit on one multiprocessor, by registers and by shared memory; the tests check this for the
    compiled code. With ``all_registers``, they share all its registers; otherwise ptxas decides, and may fit one more
    program by spilling.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs: int = 1
    all_registers: bool = False


# sm_80, sm_90, sm_100, sm_120: A100, H200, B200, RTX PRO 6000. Other architectures use the nearest lower entry.
_MULTIPROCESSORS = {80: 108, 90: 132, 100: 148, 120: 188}

# y from x, and grad_x from grad if the gates need no gradient. Two accumulators: a product, and the sum of products.
_FORWARD = {
    # 227 µs on an H100; one program of 128 x 128 takes 236 (benchmarks/results/gpu_tune.csv, as all times below).
    ("half", 90): Tile(128, 64, 128, 4, 1, 2),
    # The larger tile reads the rows half as often: at D = N = 512 and 1,024 it takes 4 % less time.
    ("wide half", 90): Tile(128, 128, 256, 8, 2),
    # The product is in tensor memory.
    ("half", 100): Tile(128, 128, 256, 8, 2),
    # Slices of 256 spill where a row has several.
    ("wide half", 100): Tile(128, 128, 128, 8, 2),
    # mma.sync keeps operands in registers too, so 128 x 128 x 64 takes nearly all of them.
    ("half", 80): Tile(128, 64, 128, 8, 2),
    ("half", 120): Tile(128, 64, 128, 8, 2),
    # One address per element: 128 columns spill on sm_90 with several passes, and 128 rows on sm_100.
    ("odd half", 80): Tile(128, 64, 64, 8, 2),
    ("odd half", 90): Tile(128, 64, 64, 8, 2),
    # By default ptxas fits three programs by spilling with Triton 3.6.
    ("odd half", 100): Tile(64, 64, 64, 8, 2, all_registers=True),
    ("odd half", 120): Tile(128, 64, 64, 8, 2),
    ("tf32", 80): Tile(64, 64, 64, 8, 2, 2),
    ("tf32", 90): Tile(64, 64, 64, 4, 2, 3),
    ("tf32", 100): Tile(64, 64, 64, 8, 2),
    ("tf32", 120): Tile(64, 64, 64, 8, 2),
    # Plain float32 has no matrix instruction. A second stage would leave registers for one program only, and a second
    # program hides more latency.
    ("ieee", 80): Tile(64, 64, 32, 8, 1, 2),
    # Three products on matrix instructions, see `precision.py`: 1.1 ms on an H100. Without them it was 9.0
    # (benchmarks/results/gpu_ncu.csv).
    ("ieee", 90): Tile(128, 64, 32, 4, 1, 2),
    # 64 columns spill with Triton 3.6.
    ("ieee", 100): Tile(64, 32, 32, 8, 2, 2),
    # 64 rows take more than 128 registers if there are few rows, or spill if there are many.
    ("ieee", 120): Tile(32, 64, 32, 8, 2, 2),
}

# The same for several passes: y starts from the float32 sums of the earlier passes, which takes registers.
_FORWARD_IN_PASSES = _FORWARD | {
    # The tile for one pass spills.
    ("half", 90): Tile(128, 128, 256, 8, 2),
    # Slices of 256 spill.
    ("half", 100): Tile(128, 128, 128, 8, 2),
}

# grad_x and grad_gates. Two accumulators and a tile of x: 128 x 128 spills on sm_90.
_BACKWARD = {
    # 322 µs on an H100; one program of 128 x 64 takes 393.
    ("half", 90): Tile(64, 64, 256, 4, 2, 2),
    # Two programs spill beyond 256 features. At D = N = 512 this tile takes a tenth less than the next.
    ("wide half", 90): Tile(64, 128, 256, 8, 2),
    ("half", 100): Tile(128, 64, 256, 8, 2),
    ("wide half", 100): Tile(128, 64, 128, 8, 2),
    # 64 x 64 with four warps would fit two programs, but spills.
    ("half", 80): Tile(64, 64, 128, 8, 2),
    ("half", 120): Tile(64, 64, 128, 8, 2),
    ("odd half", 80): Tile(64, 64, 64, 8, 2),
    # 128 rows spill; two stages spill with Triton 3.6.
    ("odd half", 90): Tile(64, 64, 256, 8, 3),
    ("odd half", 100): Tile(64, 64, 64, 8, 2),
    ("odd half", 120): Tile(64, 64, 64, 8, 2),
    ("tf32", 80): Tile(64, 64, 32, 8, 2),
    ("tf32", 90): Tile(64, 64, 64, 4, 3, 2),
    ("tf32", 100): Tile(64, 64, 64, 8, 2),
    ("tf32", 120): Tile(64, 64, 32, 8, 2),
    # 64 x 32 spills on sm_90, 32 x 64 leaves room for only one program.
    ("ieee", 80): Tile(32, 32, 32, 8, 2, 2),
    ("ieee", 90): Tile(64, 64, 32, 4, 2, 2),
    ("ieee", 100): Tile(32, 32, 32, 8, 2, 2),
    ("ieee", 120): Tile(32, 32, 32, 8, 2, 2),
}

_BACKWARD_IN_PASSES = _BACKWARD | {
    # The tile for one pass spills with Triton 3.9.
    ("half", 90): Tile(64, 128, 256, 8, 2),
    # Slices of 256 spill at k = 8.
    ("half", 100): Tile(128, 64, 128, 8, 2),
}

# Partial sums of grad_weight: tile over (N, D), slice over rows.
_WEIGHT = {
    # Four stages take a fifth less time than two (H100).
    ("half", 90): Tile(128, 256, 64, 8, 4),
    # 128 x 256 spills with slices of 64 rows.
    ("half", 100): Tile(128, 128, 64, 8, 4),
    ("half", 80): Tile(128, 128, 32, 8, 4),
    ("half", 120): Tile(128, 128, 32, 8, 4),
    # Other architectures use the tile for aligned rows.
    ("odd half", 80): Tile(64, 128, 64, 8, 3),
    ("odd half", 90): Tile(128, 128, 64, 8, 3),
    ("tf32", 80): Tile(64, 128, 32, 8, 3, 2),
    ("tf32", 90): Tile(128, 128, 32, 8, 3),
    ("tf32", 100): Tile(64, 128, 32, 8, 3, 2),
    ("tf32", 120): Tile(64, 128, 32, 8, 3),
    # A slice is summed by itself before it is added. 32 rows per slice keep a share's sum of slices short
    # (tests/rbm_kernels/test_expert_matmul_accuracy.py measures the error).
    ("ieee", 80): Tile(64, 64, 32, 8, 3, 2),
    # 128 x 64 with four warps takes 1.49 ms on an H100 instead of 1.56, but spills with Triton 3.9.
    ("ieee", 90): Tile(128, 128, 32, 8, 1),
    ("ieee", 100): Tile(64, 64, 32, 8, 3, 2),
    ("ieee", 120): Tile(64, 64, 32, 8, 3, 2),
}

# Cost of one more pass over the rows, in additional experts per tile union. An expert takes 2 D N operations per row:
# 166 ps at D = N = 256 and 790 TFLOP/s. A pass reads x again and reads and writes float32 sums, in half precision
# 2 D + 8 N bytes: 595 ps at 4.3 TB/s. For grad_x and grad_gates it is 2 N + 10 D: 714 ps. Without any overlap, this
# gives 3.6 and 4.3.
_PASS_COST = 4
# Cost of its launches, in rows times experts: 11 µs, for an order and a matmul at about 2 µs per launch. Not measured.
_PASS_LAUNCHES = 2**16

# Waves of programs for the weight's gradient. All shares have the same length, except the last share of each expert.
# Every additional wave writes and reads a partial sum for each program: one wave takes 251 µs on an H100, two take 270.
# In float32 a share's sum is kept short, see the tile.
_WEIGHT_WAVES = {"half": 1, "tf32": 1, "ieee": 2}


def precision_of(x: Tensor) -> str:
    """``half``, ``tf32`` or ``ieee``: how the kernels multiply rows of this dtype."""
    if x.dtype != torch.float32:
        return "half"
    if torch.compiler.is_compiling():  # the setting cannot be traced; here it only decides about an order
        return "ieee"
    # PyTorch's own setting, read from where all three of its interfaces store it.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


# Multiply-adds that rows may spend on experts they do not use, if that saves the launch of an order. Timed on an H100
# (benchmarks/results/gpu_ordering.csv, D = N = 256 and 64): in half precision and TensorFloat-32 an order costs as much
# as it saves at 2,704 rows of 256 features; in float32, whose products take longer, it pays off at 256 rows.
_WASTE = {"half": 2**31, "tf32": 2**31, "ieee": 2**27}
# Rows up to which the weight's gradient reads all rows for every expert, in one launch instead of four and a running
# sum. Replayed on an H100, 64 rows take 10 µs instead of 19, 256 take 32 instead of 21, and 2,704 take 324 instead of
# 45 (gpu_ordering.csv, bfloat16, D = N = 256).
_FEW_ROWS = 256
# Up to this number of multiply-adds for experts that rows do not use.
_MOST_WASTE = 2**32
# Tiles of 128 rows for each of 132 multiprocessors.
MANY_ROWS = 128 * 132
# Heights of tiles for 1,024 to 4,095 rows. In TensorFloat-32, only tiles of 128 make the gradient of the rows read a
# transposed copy of the weights, see `precision.reads_by_column`.
_MIDDLING = {"half": 64, "tf32": 128, "ieee": 32}


def numbers_fit(num_experts: int, out_features: int, in_features: int) -> bool:
    """Whether int32 suffices for the kernels, which number the weights of one expert and the biases of all.

    ``launch._pad`` adds up to seven features, and partial sums of the weight's gradient have one more for the bias.
    """
    return max(num_experts * out_features, out_features * (in_features + 8)) <= MOST_SIZE


def is_small(rows: int, k: int, num_experts: int, weights: int, precision: str) -> bool:
    """Whether all rows meet every expert, in their given order; ``weights`` is the number of elements of all experts.

    At D = N = 256, E = 8, k = 3 up to 6,553 rows, and in plain float32 up to 409.
    """
    return rows * (num_experts - k) * weights <= _WASTE[precision] * num_experts


def sums_all_rows(rows: int, k: int, num_experts: int, weights: int) -> bool:
    """Whether the weight's gradient reads all rows for every expert, instead of each expert's from a list."""
    return rows <= _FEW_ROWS and rows * (num_experts - k) * weights <= _MOST_WASTE * num_experts


def tile_rows(rows: int, precision: str = "half") -> int:
    """Rows that share a list of experts: 128, or as many as took the least time on an H100 for so few rows.

    Few rows are few tiles, and smaller ones use more multiprocessors. But each tile reads the weights of its experts:
    with tiles of 16, 2,704 rows take 41 µs forward, and 16 with tiles of 64 (gpu_ordering.csv, bfloat16).
    """
    if rows >= 4096:
        return 128
    return _MIDDLING[precision] if rows >= 1024 else 16


def slice_rows(rows: int) -> int:
    """Most rows of a slice of the weight's gradient."""
    if rows >= MANY_ROWS:
        return 128
    return 64 if rows >= 64 * 64 else 16


def holds(condition: bool) -> bool:
    """Whether a condition on sizes holds; while compiling, False if it depends on data, as the rows of a mask do."""
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # takes a second to import

    return guard_or_false(condition)


def order_of(rows: int, num_experts: int, k: int, precision: str) -> tuple[int, int]:
    """Tile height and number of passes: the arguments with which :func:`rbm_kernels.expert_order` makes the order."""
    if torch.compiler.is_compiling():  # symbols cannot be cached
        return tile_rows(rows, precision), passes(rows, num_experts, k)
    return _order_of(index(rows), index(num_experts), index(k), precision)


@prepared
def _order_of(rows: int, num_experts: int, k: int, precision: str) -> tuple[int, int]:
    return tile_rows(rows, precision), passes(rows, num_experts, k)


def passes(rows: int, num_experts: int, k: int) -> int:
    """Number of passes, from 1 to k, for the k experts of a row. This is the only place of the rule for many experts.

    A pass orders the rows by its own columns of the experts. There are fewer such sets, so unions shrink, down to one
    expert per tile with k passes. Each additional pass costs as much as ``_PASS_COST`` more experts in every tile's
    union, plus its launches. Ties go to the fewest passes. README.md has the counted unions on which this is based.

    Sets of one pass's experts must have ranks of 64 bits, so 16 of 1,024 experts take at least three passes.
    """
    num_experts, k = index(num_experts), index(k)  # binomials do not work with the compiler's symbols

    extra = _PASS_COST * rows + _PASS_LAUNCHES
    fewest = 1
    while not ranks_fit(num_experts, -(-k // fewest)):
        fewest += 1
    best, least = fewest, _cost_of_passes(rows, num_experts, k, fewest, extra)
    if fewest == 1 and least <= k * rows + extra:  # nothing to gain: the usual case, on every forward pass
        return best
    for number in range(fewest + 1, k + 1):
        cost = _cost_of_passes(rows, num_experts, k, number, extra)
        if cost < least:
            best, least = number, cost
    return best


def _cost_of_passes(rows: int, num_experts: int, k: int, number: int, extra: int) -> int:
    """``rows`` times the sum of the passes' unions, and ``extra`` for each pass after the first."""
    unions = sum(rows_times_union(rows, num_experts, c.stop - c.start) for c in pass_columns(k, number))
    return unions + (number - 1) * extra


def rows_times_union(rows: int, num_experts: int, size: int) -> int:
    """``rows`` times the expected mean number of experts per tile, if rows are ordered by ``size`` of their experts.

    Assumes experts drawn uniformly, the worst case. A tile spans ``s = block_m C(E, size) / rows`` sets, and each set
    that it enters adds one expert: ``size + s``. In revolving-door order the smallest experts vary fastest. If ``n``
    experts are below the mean of the ``(m + 1)``-th smallest, there are ``C(n, m)`` choices of the m smallest. If that
    is more than ``s``, the others hardly vary within a tile, and the union stays below ``size - m + n``. Uses integers
    only, so that the compiler can trace it with a symbol for the rows.
    """
    spanned = tile_rows(rows) * binomials(num_experts, size)[-1]
    below = [(m, (m + 1) * (num_experts + 1) // (size + 1) - 1) for m in range(1, size)]
    most = next((size - m + n for m, n in below if binomials(n, m)[-1] * rows >= spanned), num_experts)
    return min(size * rows + spanned, most * rows)


def forward_tile(
    architecture: int, precision: str, rows: int, in_features: int, out_features: int, passes: int = 1
) -> Tile:
    """Tile of :func:`kernels.expert_matmul_fwd_kernel`: rows, output features, input features."""
    table = _FORWARD if passes == 1 else _FORWARD_IN_PASSES
    tile = table[entry(table, precision, architecture, in_features, out_features)]
    return _fit(tile, tile_rows(rows, precision), out_features, in_features)


def backward_tile(
    architecture: int, precision: str, rows: int, in_features: int, out_features: int, passes: int = 1
) -> Tile:
    """Tile of :func:`kernels.expert_matmul_bwd_kernel`: rows, input features, output features."""
    table = _BACKWARD if passes == 1 else _BACKWARD_IN_PASSES
    tile = table[entry(table, precision, architecture, in_features, out_features)]
    return _fit(tile, tile_rows(rows, precision), in_features, out_features)


def weight_tile(architecture: int, precision: str, rows: int, in_features: int, out_features: int) -> Tile:
    """Tile of :func:`weight_kernels.expert_matmul_bwd_weight_kernel`: output features, input features, rows."""
    tile = _WEIGHT[entry(_WEIGHT, precision, architecture, in_features, out_features)]
    return _fit(tile, out_features, in_features, slice_rows(rows))


def small_weight_tile(precision: str, rows: int, in_features: int, out_features: int) -> Tile:
    """Tile of :func:`weight_kernels.expert_matmul_bwd_weight_small_kernel`: small, so few rows fill the machine."""
    tile = Tile(64, 64, 32, 8, 2) if precision == "ieee" else Tile(64, 64, 64 if precision == "half" else 32, 4, 3)
    return _fit(tile, out_features, in_features, slice_rows(rows))


def entry(
    table: dict[tuple[str, int], Tile], precision: str, architecture: int, in_features: int, out_features: int
) -> tuple[str, int]:
    """Key of the table entry for a machine and precision; odd widths, and those above 256, may have their own."""
    known = tabulated(architecture)
    odd, wide = (f"odd {precision}", known), (f"wide {precision}", known)
    # Eight half-precision elements are 16 bytes.
    if odd in table and (in_features % 8 or out_features % 8):
        return odd
    return wide if wide in table and max(in_features, out_features) > 256 else (precision, known)


def share_rows(architecture: int, precision: str, tile: Tile, weight_tiles: int, pairs: int, num_experts: int) -> int:
    """Rows per share of the weight's gradient, for ``pairs = B * k`` (row, expert) pairs over all experts.

    ``weight_tiles`` programs work on each share, and a share is a multiple of the tile's slices. The last share of each
    expert may be short. One share per expert is held back for these, so that the waves are full and no new wave starts
    for a few programs.
    """
    programs = _WEIGHT_WAVES[precision] * tile.programs * _MULTIPROCESSORS[tabulated(architecture)]
    shares = programs // weight_tiles
    shares = max(1, shares // 2, shares - num_experts)
    return max(1, -(-pairs // (shares * tile.block_k))) * tile.block_k


def tabulated(architecture: int) -> int:
    """The architecture whose tiles one uses: itself, or the nearest lower one of the tables."""
    return max((known for known in _MULTIPROCESSORS if known <= architecture), default=min(_MULTIPROCESSORS))


def _fit(tile: Tile, *sizes: int) -> Tile:
    """Shrink a tile to the given sizes. If it shrinks a lot, reduce its warps too: 16 x 64 does not keep eight busy."""
    block_m, block_n, block_k = (
        max(_SMALLEST, min(block, 1 << (size - 1).bit_length())) for block, size in zip(tile[:3], sizes, strict=True)
    )
    little = 4 * block_m * block_n <= tile.block_m * tile.block_n
    warps = min(tile.num_warps, 4) if little else tile.num_warps
    return tile._replace(block_m=block_m, block_n=block_n, block_k=block_k, num_warps=warps)
