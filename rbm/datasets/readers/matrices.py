"""Checks of matrices from files: SciPy and PyTorch would access memory wherever invalid indices point."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from rbm.utils.arrays import check_memory

# Arrays that scipy.sparse.save_npz writes in addition to ``shape``, ``format`` and ``data``, by format.
_ARRAYS = {
    "csr": ("indices", "indptr"),
    "csc": ("indices", "indptr"),
    "bsr": ("indices", "indptr"),
    "coo": ("row", "col"),
    "dia": ("offsets",),
}
SPARSE_NAMES = ("format", "shape", "data", *sorted({name for names in _ARRAYS.values() for name in names}))
# Rows, columns and entries are later counted in int32, see rbm.nn.sparse_rows.SparseRows.
_MOST = 2**31 - 1
_NUMBERS = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
# Those that PyTorch hardly computes with; NumPy converts them.
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def check_compressed(data: np.ndarray, indices: np.ndarray, indptr: np.ndarray, shape: tuple[int, int]) -> None:
    """Check a compressed sparse matrix before anything reads it.

    Args:
        data: numbers ``[nnz]``, or blocks ``[nnz, R, C]``.
        indices: minor index of each entry, int32 or int64 ``[nnz]``.
        indptr: start of each major index, int32 or int64 ``[shape[0] + 1]``.
        shape: major and minor size: rows and columns for CSR, columns and rows for CSC, counted in blocks for BSR.

    Raises:
        ValueError: a dtype, a length, ``indptr`` or an index is invalid.
    """
    _check_numbers(data)
    major, minor = shape
    for name, array, length in (("indices", indices, len(data)), ("indptr", indptr, major + 1)):
        _check_indices(name, array, length)
    if indptr[0] != 0 or indptr[-1] != len(indices) or (indptr[1:] < indptr[:-1]).any():
        raise ValueError(f"indptr does not ascend from 0 to the {len(indices)} entries")
    _check_range("indices", indices, minor)


def csr_from_tensor(matrix: Tensor) -> Tensor:
    """Check a CSR tensor and return it unchanged.

    Raises:
        ValueError: it is not a matrix, or :func:`check_compressed` rejects it.
    """
    if matrix.dim() != 2:
        raise ValueError(f"it has {matrix.dim()} dimensions, expected two")
    parts = (matrix.values(), matrix.col_indices(), matrix.crow_indices())
    check_compressed(*(part.detach().numpy() for part in parts), _shape(matrix.shape))
    return matrix


def check_tensor(value: Tensor, where: str, sparse: bool) -> None:
    """Raise ValueError unless a tensor of a graph holds real numbers in memory, dense or, with ``sparse``, as CSR."""
    known = (*_NUMBERS, *UNSIGNED) if value.layout == torch.strided else _NUMBERS
    if value.dtype not in known or value.device.type != "cpu" or not (sparse or value.layout == torch.strided):
        kind = f"{value.dtype}, {value.layout}, on device {value.device}"
        hint = "; an adjacency matrix A of SciPy becomes edges by numpy.stack(A.nonzero())"
        hint = hint if where.endswith("edge_index") and value.layout != torch.strided else ""
        raise ValueError(f"dataset: {where} is {kind}, expected dense real numbers in memory{hint}")
    try:
        if value.layout == torch.sparse_csr:
            csr_from_tensor(value)
        else:
            check_memory(f"its shape {list(value.shape)}", value.numel() * value.element_size())
    except ValueError as error:
        raise ValueError(f"dataset: {where} is no sound tensor: {error}") from error


def scipy_csr(arrays: Mapping[str, np.ndarray], prefix: str = "") -> sp.csr_matrix:
    """Make a CSR matrix with the stored dtype from the arrays that ``scipy.sparse.save_npz`` writes, in any format.

    Args:
        arrays: at least ``shape``, ``data`` and the arrays of the format; without ``format``, CSR is assumed.
        prefix: what all names begin with.

    Raises:
        ValueError: an array is missing, or they do not form a matrix.
    """
    kind = _text(arrays[f"{prefix}format"]) if f"{prefix}format" in arrays else "csr"
    if kind not in _ARRAYS:
        raise ValueError(f"its format is {kind!r}, expected one of {', '.join(_ARRAYS)}")
    needed = [f"{prefix}{name}" for name in ("shape", "data", *_ARRAYS[kind])]
    if missing := [name for name in needed if name not in arrays]:
        raise ValueError(f"it lacks {', '.join(missing)}")
    size, data, *parts = (arrays[name] for name in needed)
    _check_indices("shape", size, 2)
    shape = _shape(size.tolist())
    _CHECKS[kind](data, *parts, shape)
    check_memory(f"its {shape[0]:,} rows", 8 * (shape[0] + 1))
    if kind == "coo":
        return sp.coo_matrix((data, tuple(parts)), shape).tocsr()
    return getattr(sp, f"{kind}_matrix")((data, *parts), shape).tocsr()


def _check_blocks(data: np.ndarray, indices: np.ndarray, indptr: np.ndarray, shape: tuple[int, int]) -> None:
    if data.ndim != 3 or 0 in data.shape[1:] or shape[0] % data.shape[1] or shape[1] % data.shape[2]:
        raise ValueError(f"blocks of shape {list(data.shape)} do not tile {list(shape)}")
    check_compressed(data, indices, indptr, (shape[0] // data.shape[1], shape[1] // data.shape[2]))


def _check_coordinates(data: np.ndarray, row: np.ndarray, col: np.ndarray, shape: tuple[int, int]) -> None:
    _check_numbers(data)
    for name, array, count in (("row", row, shape[0]), ("col", col, shape[1])):
        _check_indices(name, array, len(data))
        _check_range(name, array, count)


def _check_diagonals(data: np.ndarray, offsets: np.ndarray, shape: tuple[int, int]) -> None:
    _check_numbers(data, dims=2)
    _check_indices("offsets", offsets, len(data))
    if len(np.unique(offsets)) < len(offsets) or (offsets <= -shape[0]).any() or (offsets >= shape[1]).any():
        raise ValueError(f"offsets are not distinct diagonals of a matrix of shape {list(shape)}")


_CHECKS = {
    "csr": lambda data, indices, indptr, shape: check_compressed(_flat(data), indices, indptr, shape),
    "csc": lambda data, indices, indptr, shape: check_compressed(_flat(data), indices, indptr, shape[::-1]),
    "bsr": _check_blocks,
    "coo": lambda data, row, col, shape: _check_coordinates(_flat(data), row, col, shape),
    "dia": _check_diagonals,
}


def _flat(data: np.ndarray) -> np.ndarray:
    _check_numbers(data, dims=1)
    return data


def _check_numbers(data: np.ndarray, dims: int | None = None) -> None:
    if data.dtype.kind not in "biuf":
        raise ValueError(f"its entries are {data.dtype}, expected real numbers")
    if data.ndim != dims and dims is not None:
        raise ValueError(f"its entries have shape {list(data.shape)}, expected {dims} dimensions")


def _check_indices(name: str, array: np.ndarray, length: int) -> None:
    if array.dtype not in (np.int32, np.int64):
        raise ValueError(f"{name} are {array.dtype}, expected int32 or int64")
    if array.shape != (length,):
        raise ValueError(f"{name} have shape {list(array.shape)}, expected [{length}]")
    if length > _MOST:
        raise ValueError(f"{name} are {length}, expected fewer than 2^31")


def _check_range(name: str, indices: np.ndarray, count: int) -> None:
    if len(indices) and not 0 <= indices.min() <= indices.max() < count:
        raise ValueError(f"{name} range from {indices.min()} to {indices.max()}, expected 0 to {count - 1}")


def _shape(sizes: Any) -> tuple[int, int]:
    shape = tuple(int(size) for size in sizes)
    if not all(0 <= size <= _MOST for size in shape):
        raise ValueError(f"its shape is {list(shape)}, expected sizes from 0 to 2^31 - 1")
    return shape


def _text(name: np.ndarray) -> str:
    value = name.item() if name.size == 1 else name.tolist()
    return value.decode("latin1") if isinstance(value, bytes) else str(value)
