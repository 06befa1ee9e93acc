"""Tables that may be larger than memory, a chunk of their rows at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_ROWS = 2**18


def row_chunks(rows: int, size: int | None = None) -> Iterator[slice]:
    """Slices that cover ``rows`` rows in order, of at most ``size`` (:data:`CHUNK_ROWS`) each."""
    size = size or CHUNK_ROWS
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def rows_not_finite(table: Tensor) -> Tensor:
    """The rows of a dense floating table ``[N, F]`` that hold NaN or infinity: int64, ascending."""
    found = [torch.empty(0, dtype=torch.int64, device=table.device)]
    for rows in row_chunks(len(table)) if table.numel() else ():
        part = table[rows]
        # Extremes need no memory; `isfinite` of all numbers would take a copy of them and two masks.
        if not all(torch.isfinite(extreme) for extreme in part.aminmax()):
            found.append((~torch.isfinite(part)).any(dim=1).nonzero().flatten() + rows.start)
    return torch.cat(found)
