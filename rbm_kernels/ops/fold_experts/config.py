"""Tiles of the kernels: both only read and write each weight once."""

from typing import NamedTuple

from rbm_kernels._launching import next_power_of_2


class Tile(NamedTuple):
    """Outputs and features of a program's tile, and its warps."""

    block_n: int
    block_d: int
    num_warps: int = 4


def choose_tile(out_features: int, in_features: int, *, backward: bool) -> Tile:
    """Choose by shape: a warp reads at least 64 adjacent bytes, and there are many programs.

    Forward, a tile has 2,048 weights: 256 programs at N = D = 256 and E = 8. Backward, a program goes through all rows
    of its columns, so its columns are as few as keep 64 bytes adjacent: 64 programs at that shape.
    """
    block_d = max(16, min(32 if backward else 64, next_power_of_2(in_features)))
    return Tile(max(16, min(4096 // block_d if backward else 2048 // block_d, next_power_of_2(out_features))), block_d)
