"""Rows of features from a file, read in chunks: files may be larger than memory.

A chunk is one batch of predictions, at most 16 MiB of float32.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from rbm.datasets.readers.features import csr_from_scipy
from rbm.datasets.readers.matrices import SPARSE_NAMES, scipy_csr
from rbm.datasets.readers.parquet import check_columns, is_list, numbers
from rbm.datasets.readers.text import read_chunks
from rbm.nn.sparse_rows import Rows, SparseRows
from rbm.utils.arrays import NpyFile, read_npz
from rbm.utils.files import check_ending, optional

_PIECE_NUMBERS, _PIECE_ROWS = 2**22, 2**14


@dataclass(frozen=True)
class FeatureFile:
    """Features ``[rows, width]`` in a file that is opened but not yet read.

    Attributes:
        path: the file.
        rows: the number of rows; None if it is only known after reading (``.csv``).
        pieces: yields float32 rows ``[b, width]`` in order, dense or sparse. Raises ValueError if the file turns out to
            be damaged, at the first row with NaN or infinity, or if another process has changed a ``.npy``.
    """

    path: Path
    rows: int | None
    pieces: Callable[[], Iterator[Rows]]


def open_features(path: Path | str, width: int, meaning: str = "features") -> FeatureFile:
    """Open a ``.npy``, ``.npz``, ``.csv`` or ``.parquet`` file of numbers ``[rows, width]``.

    An ``.npz`` contains an array ``x``, or a matrix from ``scipy.sparse.save_npz``, which stays sparse; it is read at
    once because it is compressed. A ``.csv`` may have a header. A ``.parquet`` (needs ``pyarrow``) has one column per
    feature; a column of lists counts as that many features.

    Args:
        path: the file.
        width: the required number of columns.
        meaning: what the columns are, for the message about a wrong width.

    Raises:
        FileNotFoundError: the file does not exist.
        ModuleNotFoundError: Parquet without ``pyarrow``.
        ValueError: an ending not listed above, a file that cannot be read (pickled arrays are refused), or another
            shape.
    """
    path = check_ending("features file", path, _OPEN)
    if not path.is_file():
        raise FileNotFoundError(f"features file {path} does not exist")
    with _readable(path):
        shape, read = _OPEN[path.suffix](path, _rows_at_once(width))
    if len(shape) != 2 or (shape[1] != width and shape != (0, None)):
        shown = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(
            f"features file {path} holds an array of shape [{shown}], expected [*, {width}]: one row per node, the"
            f" student's {meaning}"
        )

    def pieces() -> Iterator[Rows]:
        start = 0
        with _readable(path):
            for array in read():
                if array.shape[1] != width:
                    raise ValueError(f"rows from {start} on hold {array.shape[1]} numbers, not {width}")
                yield _checked(path, array, start)
                start += array.shape[0]
            if shape[0] is not None and start != shape[0]:
                raise ValueError(f"it names {shape[0]} rows and holds {start}")

    return FeatureFile(path, shape[0], pieces)


def _rows_at_once(width: int) -> int:
    return max(1, min(_PIECE_ROWS, _PIECE_NUMBERS // max(1, width)))


class _BadRowError(ValueError):
    """A row of an intact file has invalid values; reported with a message of its own."""


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except _BadRowError as error:
        raise ValueError(str(error)) from None
    except ModuleNotFoundError:
        raise
    except Exception as error:  # a damaged file raises nearly anything
        raise ValueError(
            f"features file {path} cannot be read ({error}); expected .npy, .npz with an array x or a SciPy sparse"
            " matrix, or .csv or .parquet of numbers, whole as it was written"
        ) from error


def _checked(path: Path, array: Any, start: int) -> Rows:
    if sp.issparse(array):
        bad = np.unique(array.nonzero()[0][~np.isfinite(array.data[array.data != 0])])
    else:
        with np.errstate(over="ignore"):  # numbers beyond float32 become infinite and are reported below
            array = np.require(array, np.float32, ["C", "W", "O"])  # without a copy if it is one already
        bad = np.flatnonzero(~np.isfinite(array).all(axis=1))
    if bad.size:
        raise _BadRowError(
            f"features file {path}: row {start + bad[0]} holds NaN or infinity ({bad.size} such rows from {start} to"
            f" {start + array.shape[0] - 1}), expected numbers of float32, up to 3.4e38"
        )
    return SparseRows(csr_from_scipy(array)) if sp.issparse(array) else torch.from_numpy(array)


_Read = tuple[tuple[int | None, ...], Callable[[], Iterator[Any]]]


def _open_npy(path: Path, at_once: int) -> _Read:
    file = NpyFile(path)
    _check_numbers(file.dtype)

    def read() -> Iterator[np.ndarray]:
        for start in range(0, file.shape[0], at_once):
            yield file.read(start, min(start + at_once, file.shape[0]))

    return file.shape, read


def _check_numbers(dtype: np.dtype) -> None:
    if dtype.kind not in "biuf":
        raise ValueError(f"it holds {dtype}, not real numbers")


def _open_npz(path: Path, at_once: int) -> _Read:
    names, _ = read_npz(path, ())
    if "format" in names:
        with np.errstate(over="ignore"):  # as in _checked
            rows = scipy_csr(read_npz(path, SPARSE_NAMES)[1]).astype(np.float32)
        rows.sum_duplicates()  # and sorts the columns of each row
    elif "x" in names:
        rows = read_npz(path, ("x",))[1]["x"]
        _check_numbers(rows.dtype)
    else:
        raise ValueError(f"it holds {', '.join(names[:8]) or 'nothing'}")
    return rows.shape, lambda: (rows[start : start + at_once] for start in range(0, rows.shape[0], at_once))


def _open_csv(path: Path, at_once: int) -> _Read:
    def chunks() -> Iterator[np.ndarray]:
        return read_chunks(path, np.float32, header=True)

    first = next(chunks(), None)
    if first is None:
        raise ValueError("it holds no row")

    def read() -> Iterator[np.ndarray]:
        for chunk in chunks():
            yield from (chunk[start : start + at_once] for start in range(0, len(chunk), at_once))

    return (None, first.shape[1]), read


def _open_parquet(path: Path, at_once: int) -> _Read:
    pyarrow = optional("pyarrow", "files", f"features file {path}", "or save it as .npy")
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    schema, types = file.schema_arrow, pyarrow.types
    check_columns(schema)
    kinds = (types.is_integer, types.is_floating, types.is_boolean)
    for name, kind in zip(schema.names, schema.types, strict=True):
        if not any(is_numeric(kind.value_type if is_list(kind) else kind) for is_numeric in kinds):
            raise ValueError(f"its column {name!r} is {kind}, not numbers")

    def read(rows: int = at_once) -> Iterator[np.ndarray]:
        return (numbers(batch) for batch in file.iter_batches(batch_size=rows))

    width = len(schema)
    if any(map(is_list, schema.types)):
        first = next(read(1), None)
        width = None if first is None else first.shape[1]

    return (file.metadata.num_rows, width), read


_OPEN: dict[str, Callable[[Path, int], _Read]] = {
    ".npy": _open_npy,
    ".npz": _open_npz,
    ".csv": _open_csv,
    ".parquet": _open_parquet,
}
