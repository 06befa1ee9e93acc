"""Features that stay where they lie, in half the bytes: a file that is mapped into memory may be larger than memory."""

import torch
from torch import Tensor


class HalfPrecisionRows:
    """Rows of a float16 matrix, made float32 when they are asked for, with further columns beside them.

    The matrix may be a file: of ``x.npy`` in a folder for :func:`rbm.datasets.load_graph` a batch reads the pages that
    its rows lie on. Nothing is computed in half precision.

    Args:
        stored: float16 ``[B, Ds]``.
        dense: float32 ``[B, Dd]`` that stand to the right, or None.
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
        """The rows of a slice, a boolean mask or integer indices, float32."""
        rows = self.stored[index].float()
        return rows if self.dense is None else torch.cat([rows, self.dense[index]], dim=1)

    def to_dense(self) -> Tensor:
        """All of them, float32, in memory."""
        return self[:]

    def concat_columns(self, dense: Tensor) -> "HalfPrecisionRows":
        """These rows with the columns ``dense`` to their right."""
        dense = dense.to(self.device, self.dtype)
        return HalfPrecisionRows(self.stored, dense if self.dense is None else torch.cat([self.dense, dense], dim=1))
