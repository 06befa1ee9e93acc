"""Which nodes of the training graph new rows are joined to, and the encodings that they have from them."""

from bisect import bisect_left
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rbm.datasets.encodings import transfer
from rbm.datasets.readers.text import read_table
from rbm.utils.arrays import open_npy
from rbm.utils.files import check_ending

_EDGES_AT_ONCE = 2**22


def neighbor_encodings(known: Tensor, rows: np.ndarray, joined: np.ndarray, count: int) -> Tensor:
    """Encodings ``[count, D]`` of new rows, see :func:`rbm.datasets.encodings.transfer`.

    Args:
        known: encodings of the training graph's nodes, floating ``[N, D]``.
        rows: int64 ``[M]``, of each edge the row, 0 to ``count - 1``.
        joined: int64 ``[M]``, of each edge the node that its row is joined to, 0 to ``N - 1``.
        count: how many rows there are; one that no edge names gets zeros.
    """
    # Only the nodes that these rows are joined to: the training graph may be large.
    nodes, places = np.unique(joined, return_inverse=True)
    pairs = torch.from_numpy(np.stack([places, rows + len(nodes)]))
    everyone = transfer(known[torch.from_numpy(nodes)], torch.arange(len(nodes)), pairs, len(nodes) + count)
    return everyone[len(nodes) :]


class Neighbors:
    """A file of whole numbers ``[M, 2]``: a row of the features, and a node of the training graph that it is joined to.

    A row that is a node of that graph itself is joined to that node alone. A ``.npy`` whose rows ascend is read piece
    by piece; any other one, and a ``.csv``, is held and put in order in memory, 40 bytes an edge.

    Args:
        path: ``.npy`` or ``.csv``.
        known: encodings of the training graph's nodes, floating ``[N, D]``.
        rows: how many rows of features there are, if that is known yet.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not readable, not whole numbers of that shape, or a number out of range.
    """

    def __init__(self, path: Path | str, known: Tensor, rows: int | None) -> None:
        self.path, self.known = check_ending("neighbors file", path, (".npy", ".csv")), known
        if not self.path.is_file():
            raise FileNotFoundError(f"neighbors file {path} does not exist")
        self._edges, self._order = None, None
        try:
            if self.path.suffix == ".csv":
                self._edges = read_table(self.path, np.int64)
            edges = self._open()
            kind, shape = edges.dtype, list(edges.shape)
        except ValueError as error:
            raise ValueError(f"neighbors file {path} cannot be read ({error}); expected .npy or .csv") from error
        if len(shape) != 2 or shape[1] != 2 or kind.kind not in "iu":
            raise ValueError(f"neighbors file {path} holds {kind} of shape {shape}, expected whole numbers [M, 2]")
        self.count, self._place = shape[0], 0
        ascending, last = True, 0
        for start in range(0, self.count, _EDGES_AT_ONCE):
            edges = np.array(self._open()[start : start + _EDGES_AT_ONCE])
            self._check(edges[:, 0], start, rows, "rows of features")
            self._check(edges[:, 1], start, len(known), "nodes of the training graph")
            ascending = ascending and last <= edges[0, 0] and bool((np.diff(edges[:, 0].astype(np.int64)) >= 0).all())
            last = edges[-1, 0]
        if not ascending:
            edges = np.array(self._open())
            self._order = np.argsort(edges[:, 0], kind="stable")
            self._edges = edges[self._order]

    def encodings(self, start: int, stop: int) -> Tensor:
        """Those of rows ``start`` to ``stop - 1``, ``[stop - start, D]``: see :func:`rbm.datasets.encodings.transfer`.

        Calls go on where the last one stopped.
        """
        edges = self._open()
        end = bisect_left(range(self.count), stop, lo=self._place, key=lambda edge: int(edges[edge, 0]))
        rows, joined = np.array(edges[self._place : end], dtype=np.int64).T
        self._place = end
        return neighbor_encodings(self.known, rows - start, joined, stop - start)

    def check_rows(self, rows: int) -> None:
        """Raise ValueError if an edge names a row that has not come, now that all ``rows`` have."""
        if self._place < self.count:
            line = self._place if self._order is None else self._order[self._place]
            self._check(self._open()[self._place : self._place + 1, 0], line, rows, "rows of features")

    def _open(self) -> np.ndarray:
        # Mapped anew each time, as features are: pages that were read do not add up.
        return self._edges if self._edges is not None else open_npy(self.path)

    def _check(self, ids: np.ndarray, start: int, count: int | None, what: str) -> None:
        bad = np.flatnonzero(ids < 0 if count is None else (ids < 0) | (ids >= count))
        if bad.size:
            expected = "0 or more" if count is None else f"0 to {count - 1}, one of the {count} {what}"
            raise ValueError(
                f"neighbors file {self.path}: line {start + bad[0]} names {ids[bad[0]]}, expected {expected}"
            )
