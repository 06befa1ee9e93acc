"""Processing tables that may be larger than memory in chunks of rows."""

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_ROWS = 2**18


def row_chunks(rows: int, size: int | None = None) -> Iterator[slice]:
    """Slices that cover ``rows`` rows in order, each of at most ``size`` rows (:data:`CHUNK_ROWS` by default)."""
    size = size or CHUNK_ROWS
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def rows_not_finite(table: Tensor) -> Tensor:
    """The rows of a dense floating table ``[N, F]`` that contain NaN or infinity: int64, ascending."""
    found = [torch.empty(0, dtype=torch.int64, device=table.device)]
    for rows in row_chunks(len(table)) if table.numel() else ():
        part = table[rows]
        # Minimum and maximum need no memory; `isfinite` on all numbers would need a copy and two masks.
        if not all(torch.isfinite(extreme) for extreme in part.aminmax()):
            found.append((~torch.isfinite(part)).any(dim=1).nonzero().flatten() + rows.start)
    return torch.cat(found)
