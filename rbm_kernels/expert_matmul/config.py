"""Which tiles the kernels use: a table by machine and precision, sizes by shape, nothing tuned while a user waits.

Counted from compiled code (``tests/rbm_kernels/static_expert_matmul.py``, Triton 3.9, D = N = 256, E = 8, k = 3). A
multiprocessor has 65,536 registers: programs of 256 threads share it in two when they hold at most 128 registers each.
"""

from typing import NamedTuple

# Features of the bias that the backward kernel multiplies at once: the smallest tile of a matrix instruction.
UNION_BLOCK = 16
# The smallest side of a tile that tl.dot takes in every precision.
_SMALLEST = 16


class Tile(NamedTuple):
    """A program's output tile, the slice of its inner dimension, its warps and the depth of its pipeline of loads."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# sm_80, sm_90, sm_100, sm_120: A100, H200, B200, RTX PRO 6000. Another machine takes the nearest below it.
_MULTIPROCESSORS = {80: 108, 90: 132, 100: 148, 120: 188}

# y from x, and grad_x from grad where the gates need no gradient. One accumulator.
_FORWARD = {
    # The widest tile whose accumulator fits: 254 registers, no spill; it reads x once for N <= 256. 144 KB of 227 KB.
    ("half", 90): Tile(128, 256, 64, 8, 3),
    # The accumulator lives in tensor memory, operands pass through registers: 204 registers, 129 KB.
    ("half", 100): Tile(128, 256, 64, 8, 3),
    # mma.sync keeps both operands in registers: 128 x 256 spills (40 to 72 bytes), this holds 189 and 180; 80 KB.
    ("half", 80): Tile(128, 128, 64, 8, 3),
    ("half", 120): Tile(128, 128, 64, 8, 3),
    # TF32 doubles the bytes of a slice, so it is half as deep: 90 to 154 registers, 56 to 72 KB.
    ("tf32", 80): Tile(64, 128, 32, 8, 3),
    ("tf32", 90): Tile(64, 128, 32, 8, 3),
    ("tf32", 100): Tile(64, 128, 32, 8, 3),
    ("tf32", 120): Tile(64, 128, 32, 8, 3),
    # Plain float32 has no matrix instruction: 16 accumulators a thread leave registers for two programs and more.
    ("ieee", 80): Tile(64, 64, 16, 8, 2),
    ("ieee", 90): Tile(64, 64, 16, 8, 2),
    ("ieee", 100): Tile(64, 64, 16, 8, 2),
    ("ieee", 120): Tile(64, 64, 16, 8, 2),
}

# grad_x and grad_gates. Two accumulators and a tile of x: 128 x 128 spills on every machine.
_BACKWARD = {
    ("half", 80): Tile(64, 128, 32, 8, 3),
    ("half", 90): Tile(64, 128, 64, 8, 3),
    ("half", 100): Tile(64, 128, 32, 8, 3),
    ("half", 120): Tile(64, 128, 32, 8, 3),
    ("tf32", 80): Tile(64, 64, 32, 8, 2),
    ("tf32", 90): Tile(64, 64, 32, 8, 2),
    ("tf32", 100): Tile(64, 64, 32, 8, 2),
    ("tf32", 120): Tile(64, 64, 32, 8, 2),
    ("ieee", 80): Tile(32, 32, 16, 4, 2),
    ("ieee", 90): Tile(32, 32, 16, 4, 2),
    ("ieee", 100): Tile(32, 32, 16, 4, 2),
    ("ieee", 120): Tile(32, 32, 16, 4, 2),
}

# Partial sums of grad_weight: tile over (N, D), slice over rows. The loads follow the tile's number and the row's
# number (two loads before the row itself), which costs two stages of the pipeline.
_WEIGHT = {
    ("half", 80): Tile(128, 128, 32, 8, 5),
    ("half", 90): Tile(128, 128, 64, 8, 5),
    ("half", 100): Tile(128, 128, 32, 8, 5),
    ("half", 120): Tile(128, 128, 32, 8, 5),
    ("tf32", 80): Tile(64, 128, 32, 8, 4),
    ("tf32", 90): Tile(64, 128, 32, 8, 4),
    ("tf32", 100): Tile(64, 128, 32, 8, 4),
    ("tf32", 120): Tile(64, 128, 32, 8, 4),
    ("ieee", 80): Tile(64, 64, 16, 8, 3),
    ("ieee", 90): Tile(64, 64, 16, 8, 3),
    ("ieee", 100): Tile(64, 64, 16, 8, 3),
    ("ieee", 120): Tile(64, 64, 16, 8, 3),
}

# Programs of the weight's gradient for each multiprocessor: two fit side by side in some precisions, and two short waves
# waste less at their end than one long one. Each share costs 4 * N * D bytes written and read.
_WEIGHT_PROGRAMS = 2


def tile_rows(rows: int) -> int:
    """Rows that share a list of experts: 128 once they fill the machine, fewer where that would leave it empty.

    From the number of rows alone, so that the order can be made before anything else is known.
    """
    if rows >= 128 * 132:
        return 128
    return 64 if rows >= 64 * 64 else 16


def forward_tile(architecture: int, precision: str, rows: int, in_features: int, out_features: int) -> Tile:
    """Tile of :func:`kernels.expert_matmul_fwd_kernel`: rows, output features, input features."""
    return _fit(_FORWARD[precision, _known(architecture)], tile_rows(rows), out_features, in_features)


def backward_tile(architecture: int, precision: str, rows: int, in_features: int, out_features: int) -> Tile:
    """Tile of :func:`kernels.expert_matmul_bwd_kernel`: rows, input features, output features."""
    return _fit(_BACKWARD[precision, _known(architecture)], tile_rows(rows), in_features, out_features)


def weight_tile(architecture: int, precision: str, rows: int, in_features: int, out_features: int) -> Tile:
    """Tile of :func:`kernels.expert_matmul_bwd_weight_kernel`: output features, input features, rows."""
    return _fit(_WEIGHT[precision, _known(architecture)], out_features, in_features, tile_rows(rows))


def share_rows(architecture: int, weight_tiles: int, pairs: int, block_k: int) -> int:
    """Rows of a share of the weight's gradient, of ``pairs = B * k`` (row, expert) pairs over all experts.

    ``weight_tiles`` programs work on each share; a share is a whole number of slices of ``block_k`` rows.
    """
    wanted = max(1, _WEIGHT_PROGRAMS * _MULTIPROCESSORS[_known(architecture)] // weight_tiles)
    return max(1, -(-pairs // (wanted * block_k))) * block_k


def _known(architecture: int) -> int:
    return max((known for known in _MULTIPROCESSORS if known <= architecture), default=min(_MULTIPROCESSORS))


def _fit(tile: Tile, *sizes: int) -> Tile:
    """Shrink a tile to the sizes at hand, and its warps with it: an output of 16 x 64 does not feed eight."""
    block_m, block_n, block_k = (
        max(_SMALLEST, min(block, 1 << (size - 1).bit_length())) for block, size in zip(tile[:3], sizes, strict=True)
    )
    warps = tile.num_warps if block_m * block_n >= 64 * 64 else 4
    return Tile(block_m, block_n, block_k, min(warps, tile.num_warps), tile.num_stages)
