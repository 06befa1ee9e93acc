"""Encodings for rows of features: of the training graph's nodes that the rows are, or from their neighbours there."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rbm.datasets.encodings import transfer
from rbm.datasets.readers.node_ids import NodeIds, read_nodes
from rbm.datasets.readers.text import read_table
from rbm.utils.arrays import NpyFile
from rbm.utils.files import check_ending

_EDGES_AT_ONCE = 2**22
ALL = "all"  # instead of a file of nodes
NAMED = 10  # rows without encodings that a message names


def neighbor_encodings(known: Tensor, rows: np.ndarray, joined: np.ndarray, count: int) -> Tensor:
    """Encodings ``[count, D]`` of new rows, see :func:`rbm.datasets.encodings.transfer`.

    Args:
        known: encodings of the training graph's nodes, floating ``[N, D]``.
        rows: int64 ``[M]``, the row of each edge, 0 to ``count - 1``.
        joined: int64 ``[M]``, the neighbour of each edge, a node from 0 to ``N - 1``.
        count: the number of rows; a row without an edge gets zeros.
    """
    # Select only the neighbours of these rows: the training graph may be large.
    nodes, places = np.unique(joined, return_inverse=True)
    pairs = torch.from_numpy(np.stack([places, rows + len(nodes)]))
    encodings = transfer(known[torch.from_numpy(nodes)], torch.arange(len(nodes)), pairs, len(nodes) + count)
    return encodings[len(nodes) :]


def unencoded_message(
    what: str, missing: int, count: int, reason: str, first: Sequence[int], ids: NodeIds | None = None
) -> str | None:
    """A sentence on rows or nodes whose encodings are zeros, or None if there are none.

    Args:
        what: what they are, in the singular.
        missing: the number of them.
        count: the number of all.
        reason: a verb and its objects.
        first: the first of them, at most :data:`NAMED`, which are named.
        ids: names them by their ids instead.
    """
    if not missing:
        return None
    *_, noun = what.split()
    named = ", ".join(map(str, first) if ids is None else map(repr, ids.of(np.array(first))))
    return (
        f"{missing:,} of {count:,} {what}s {reason}, and have zeros for encodings: {noun}{'s' * (missing > 1)} {named}"
        f"{f' and {missing - len(first):,} more' if missing > len(first) else ''}"
        f"{' (counted from 0)' if ids is None else ''}"
    )


class Neighbors:
    """A file of whole numbers ``[M, 2]``: a row of the features, and a node of the training graph that it is joined to.

    In a directed graph, the node is the start of an edge to the row. A row that is itself a node of that graph is not
    joined to it: its encodings are that node's (:class:`Nodes`). A ``.npy`` with ascending rows is read in chunks. Any
    other ``.npy``, and a ``.csv``, is loaded and sorted in memory, 40 bytes per edge.

    Args:
        path: ``.npy`` or ``.csv`` (which may have a header).
        known: encodings of the training graph's nodes, floating ``[N, D]``.
        rows: the number of rows of features, if known yet.
        ids: ids of the training graph's nodes, which a ``.csv`` then names; or None.

    Attributes:
        missing: the number of rows so far that have no edge in the file; their encodings are zeros.
        first_missing: the first ten of them.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: not readable, not whole numbers of that shape, or a number out of range.
    """

    def __init__(self, path: Path | str, known: Tensor, rows: int | None, ids: NodeIds | None = None) -> None:
        self.path, self.known, self._edges, self._order = Path(path), known, None, None
        self.missing, self.first_missing = 0, []
        self._table = _Table("neighbors file", path, ids, 2)
        kind, shape = self._table.dtype, self._table.shape
        if len(shape) != 2 or shape[1] != 2 or kind.kind not in "iu":
            raise ValueError(f"neighbors file {path} holds {kind} of shape {shape}, expected whole numbers [M, 2]")
        self.count, self._place = shape[0], 0
        ascending, last = True, 0
        for start in range(0, self.count, _EDGES_AT_ONCE):
            edges = self._table.rows(start, min(start + _EDGES_AT_ONCE, self.count))
            self._check(edges[:, 0], start, rows, "rows of features")
            self._check(edges[:, 1], start, len(known), "nodes of the training graph")
            ascending = ascending and last <= edges[0, 0] and bool((np.diff(edges[:, 0].astype(np.int64)) >= 0).all())
            last = edges[-1, 0]
        if not ascending:
            edges = self._table.rows(0, self.count)
            self._order = np.argsort(edges[:, 0], kind="stable")
            self._edges = edges[self._order]

    def encodings(self, start: int, stop: int, wanted: np.ndarray | None = None) -> Tensor:
        """Encodings of rows ``start`` to ``stop - 1``, ``[stop - start, D]``.

        See :func:`rbm.datasets.encodings.transfer`. Each call must start where the last one stopped. Rows that are not
        ``wanted``, bool ``[stop - start]``, do not count as missing.
        """
        end = bisect_left(range(self.count), stop, lo=self._place, key=self._row_of)
        rows, joined = np.array(self._pairs(self._place, end), dtype=np.int64).T
        self._place = end
        lacking = np.bincount(rows - start, minlength=stop - start) == 0
        lacking = np.flatnonzero(lacking if wanted is None else lacking & wanted) + start
        self.missing += len(lacking)
        self.first_missing += lacking[: NAMED - len(self.first_missing)].tolist()
        return neighbor_encodings(self.known, rows - start, joined, stop - start)

    def check_rows(self, rows: int) -> None:
        """Raise ValueError if an edge names a row beyond the ``rows`` rows of features."""
        if self._place < self.count:
            pair = self._place if self._order is None else self._order[self._place]
            self._check(self._pairs(self._place, self._place + 1)[:, 0], pair, rows, "rows of features")

    def missing_message(self, rows: int) -> str | None:
        """A sentence on the rows without an edge in the file, or None."""
        return unencoded_message("row", self.missing, rows, f"have no neighbour in {self.path}", self.first_missing)

    def _row_of(self, edge: int) -> int:
        return int(self._pairs(edge, edge + 1)[0, 0])

    def _pairs(self, start: int, stop: int) -> np.ndarray:
        return self._table.rows(start, stop) if self._edges is None else self._edges[start:stop]

    def _check(self, ids: np.ndarray, start: int, count: int | None, what: str) -> None:
        last = np.iinfo(np.int64).max if count is None else count - 1
        bad = np.flatnonzero((ids < 0) | (ids > last))
        if bad.size:
            expected = f"0 to {last}" if count is None else f"0 to {last}, one of the {count} {what}"
            raise ValueError(
                f"neighbors file {self.path}: pair {start + bad[0]} (counted from 0) names {ids[bad[0]]}, expected"
                f" {expected}"
            )


class Nodes:
    """Rows that are nodes of the training graph, given by a file of whole numbers ``[B]`` (or ``[B, 1]``).

    Args:
        path: ``.npy`` or ``.csv`` (which may have a header) with the node of each row of features; or :data:`ALL` if
            the rows are all nodes in order.
        known: encodings of the training graph's nodes, floating ``[N, D]``; None if the student takes none.
        rows: the number of rows of features, if known yet.
        neighbors: provides the encodings of new rows, whose node is -1; None if there are no such rows. Its edges of
            other rows are not used.
        ids: ids of the training graph's nodes, which a ``.csv`` then names; or None.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: not readable, not whole numbers of that shape, a number out of range, or not one per row.
    """

    def __init__(
        self,
        path: Path | str,
        known: Tensor | None,
        rows: int | None,
        neighbors: Neighbors | None = None,
        ids: NodeIds | None = None,
    ) -> None:
        self.path, self.known, self.neighbors, self.ids = Path(path), known, neighbors, ids
        self._in_order = str(path) == ALL
        self._total = len(ids) if known is None else len(known)
        if self._in_order:
            self.count = self._total
        else:
            if not self.path.suffix:
                raise ValueError(
                    f"nodes is {str(path)!r}, expected a .npy or .csv file with the node of each row of features, or"
                    f" the word {ALL}"
                )
            self._table = _Table("nodes file", path, ids, 1)
            kind, shape = self._table.dtype, self._table.shape
            if kind.kind not in "iu" or not (len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)):
                raise ValueError(f"nodes file {path} holds {kind} of shape {shape}, expected whole numbers [B]")
            self.count = shape[0]
            for start in range(0, self.count, _EDGES_AT_ONCE):
                self._check(self._of(start, min(start + _EDGES_AT_ONCE, self.count)), start)
        if rows is not None:
            self.check_rows(rows)

    def encodings(self, start: int, stop: int) -> Tensor:
        """Encodings of rows ``start`` to ``stop - 1``, ``[stop - start, D]``; calls must be in order, without gaps."""
        if stop > self.count:
            raise self._unequal(f"at least {stop}")
        nodes = self._of(start, stop)
        found = self.known[torch.from_numpy(np.maximum(nodes, 0))]
        if self.neighbors is not None:
            new = nodes < 0
            others = self.neighbors.encodings(start, stop, new)
            found[torch.from_numpy(new)] = others[torch.from_numpy(new)]
        return found

    def names(self, start: int, stop: int) -> list[str]:
        """The ids of rows ``start`` to ``stop - 1``, empty for new rows; only if there are ids."""
        return self.ids.of(self._of(start, stop))

    def check_rows(self, rows: int) -> None:
        """Raise ValueError unless there is one node per row, for ``rows`` rows."""
        if rows != self.count:
            raise self._unequal(str(rows))
        if self.neighbors is not None:
            self.neighbors.check_rows(rows)

    def missing_message(self, rows: int) -> str | None:
        """A sentence on the new rows without an edge in the file of neighbours, or None."""
        return None if self.neighbors is None else self.neighbors.missing_message(rows)

    def _unequal(self, rows: str) -> ValueError:
        if self._in_order:
            problem = f"the training graph has {self.count} nodes, which nodes={ALL} takes in their order"
            remedy = "name a file with the node of each row instead"
        else:
            problem = f"nodes file {self.path} holds {self.count} numbers"
            remedy = "write one for each row, -1 for a new node"
        return ValueError(f"{problem}, and there are {rows} rows of features; {remedy}")

    def _of(self, start: int, stop: int) -> np.ndarray:
        if self._in_order:
            return np.arange(start, stop)
        nodes = self._table.rows(start, stop).reshape(-1)
        if nodes.dtype == np.uint64 and (beyond := np.flatnonzero(nodes > np.iinfo(np.int64).max)).size:
            raise self._unknown(start + beyond[0], nodes[beyond[0]])  # it would become a negative number, such as -1
        return np.array(nodes, dtype=np.int64)

    def _check(self, nodes: np.ndarray, start: int) -> None:
        bad = np.flatnonzero((nodes < (0 if self.neighbors is None else -1)) | (nodes >= self._total))
        if bad.size:
            raise self._unknown(start + bad[0], nodes[bad[0]])

    def _unknown(self, row: int, node: int) -> ValueError:
        new = "-1 for a new node with --neighbors" if self.neighbors is None else "-1 for a new node"
        return ValueError(
            f"nodes file {self.path}: row {row} (counted from 0) names {node}, expected 0 to {self._total - 1}, one of"
            f" the {self._total} nodes of the training graph, or {new}"
        )


class _Table:
    """A file of whole numbers. With ``ids``, the last column of a ``.csv`` holds ids, which become numbers of nodes.

    A ``.npy`` is read in parts, like features. A ``.csv`` with a header alone has no rows of ``columns``
    numbers; one without any byte is taken for a failed write.
    """

    def __init__(self, what: str, path: Path | str, ids: NodeIds | None, columns: int) -> None:
        self._name = f"{what} {path}"
        file = check_ending(what, path, (".npy", ".csv"))
        if not file.is_file():
            raise FileNotFoundError(f"{self._name} does not exist")
        with self._readable():
            if file.suffix == ".npy":
                self._held = NpyFile(file)
            elif not file.stat().st_size:
                raise ValueError("it is empty, not even a header")
            else:
                held = read_nodes(file, ids) if ids is not None else read_table(file, np.int64, header=True)
                self._held = held if held.size else held.reshape(0, columns)
        self.dtype, self.shape = self._held.dtype, list(self._held.shape)

    def rows(self, start: int, stop: int) -> np.ndarray:
        """The rows ``start`` to ``stop - 1``; ValueError if another process has changed the file."""
        if isinstance(self._held, np.ndarray):
            return self._held[start:stop]
        with self._readable():
            return self._held.read(start, stop)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self._name} cannot be read ({error}); expected .npy or .csv") from error
