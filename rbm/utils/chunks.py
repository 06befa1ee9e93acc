"""Rows of tables that may be larger than memory: chunks of them, and random samples."""

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_ROWS = 2**18


def row_chunks(rows: int, size: int | None = None) -> Iterator[slice]:
    """Slices that cover ``rows`` rows in order, each of at most ``size`` rows (:data:`CHUNK_ROWS` by default)."""
    size = size or CHUNK_ROWS
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def drawn_rows(rows: int, most: int, seed: int) -> Tensor:
    """At most ``most`` of ``rows`` row numbers, drawn at random by the seed: int64, ascending."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[:most].sort().values


def rows_not_finite(table: Tensor) -> Tensor:
    """The rows of a dense floating table ``[N, F]`` that contain NaN or infinity: int64, ascending."""
    found = [torch.empty(0, dtype=torch.int64, device=table.device)]
    for rows in row_chunks(len(table)) if table.numel() else ():
        part = table[rows]
        # Minimum and maximum need no memory; `isfinite` on all numbers would need a copy and two masks.
        if not all(torch.isfinite(extreme) for extreme in part.aminmax()):
            found.append((~torch.isfinite(part)).any(dim=1).nonzero().flatten() + rows.start)
    return torch.cat(found)
