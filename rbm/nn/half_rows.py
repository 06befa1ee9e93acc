"""Float16 features, possibly memory-mapped; rows become float32 when indexed."""

import torch
from torch import Tensor


def index_error(rows: str, index: object) -> TypeError:
    """The error for an index that selects no list of ``rows``, a class."""
    found = f"shape {list(index.shape)}" if isinstance(index, Tensor) else repr(index)
    return TypeError(
        f"the index of {rows} is {found}, expected a slice, a boolean mask or a list of rows; for one row i write"
        " rows[i : i + 1]"
    )


class HalfPrecisionRows:
    """Rows of a float16 matrix that become float32 when indexed, with optional float32 columns to their right.

    The matrix may be a memory-mapped file larger than memory, such as ``x.npy`` in a folder for
    :func:`rbm.datasets.load_graph`. A batch reads only the pages that contain its rows. All computations are in
    float32.

    Args:
        stored: float16 ``[B, Ds]``.
        dense: float32 ``[B, Dd]``, the columns to the right of ``stored``, or None.
    """

    dtype = torch.float32

    def __init__(self, stored: Tensor, dense: Tensor | None = None) -> None:
        self.stored, self.dense = stored, dense

    @property
    def shape(self) -> torch.Size:
        extra = 0 if self.dense is None else self.dense.shape[1]
        return torch.Size((self.stored.shape[0], self.stored.shape[1] + extra))

    @property
    def device(self) -> torch.device:
        return self.stored.device

    def __getitem__(self, index: slice | Tensor) -> Tensor:
        """Float32 rows of a slice, of a boolean mask ``[B]``, or of integer indices ``[b]``.

        Raises:
            TypeError: the index selects anything else, such as a single row.
        """
        rows = self.stored[index].float()
        if rows.dim() != 2:
            raise index_error("HalfPrecisionRows", index)
        return rows if self.dense is None else torch.cat([rows, self.dense[index]], dim=1)

    def to_dense(self) -> Tensor:
        """All rows as one float32 tensor in memory."""
        return self[:]

    def concat_columns(self, dense: Tensor) -> "HalfPrecisionRows":
        """These rows with the columns ``dense`` to their right."""
        dense = dense.to(self.device, self.dtype)
        return HalfPrecisionRows(self.stored, dense if self.dense is None else torch.cat([self.dense, dense], dim=1))
