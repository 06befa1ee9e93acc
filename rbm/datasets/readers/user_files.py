"""A graph of one's own, from files: what they may be called and look like, and how they are opened safely."""

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import BaseStorage, EdgeStorage, GlobalStorage, NodeStorage

from rbm.datasets.readers.features import UNREADABLE, csr_from_scipy
from rbm.datasets.readers.text import read_table
from rbm.utils.files import optional

# Each part of a graph and the names that it may have, in every file format.
NAMES = {
    "x": ("x", "features"),
    "edge_index": ("edge_index", "edges"),
    "y": ("y", "labels"),
    "teacher_logits": ("teacher_logits", "logits"),
    "masks": ("masks",),
    "train_mask": ("train_mask", "train"),
    "val_mask": ("val_mask", "val", "valid"),
    "test_mask": ("test_mask", "test"),
}
_SPARSE = ("data", "indices", "indptr", "shape")  # what scipy.sparse.save_npz writes for a CSR matrix
_EXPECTED = "x (or features), edge_index (or edges) and y (or labels)"


def read_parts(path: Path) -> dict[str, Any]:
    """The parts of a graph that a file or folder holds, under the keys of ``NAMES``, as tensors, not yet checked.

    Names beside those of ``NAMES`` are passed over, and what a folder holds in another form (then ``./name``); they are
    listed under ``"others"``.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        ValueError: it cannot be read, or not without running what it holds, or names a part twice.
    """
    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        raise FileNotFoundError(f"dataset: {path} does not exist; expected a file or folder that holds a graph")
    if path.suffix in (".pt", ".pth"):
        return _named(path, _read_saved(path))
    if path.suffix == ".npz":
        return _named(path, _read_npz(path))
    raise ValueError(f"dataset: {path} ends in {path.suffix!r}, expected .pt, .pth, .npz or a folder of files")


def _named(path: Path, found: dict[str, Any]) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    for part, names in NAMES.items():
        present = [name for name in names if found.get(name) is not None]
        if len(present) > 1:
            raise ValueError(f"dataset: {path} holds both {present[0]} and {present[1]}, expected one of them")
        if present:
            parts[part] = found[present[0]]
    known = {name for names in NAMES.values() for name in names}
    parts["num_classes"] = found.get("num_classes")
    parts["others"] = sorted(map(str, set(found) - known - {"num_classes"}))
    return parts


# A saved graph


def _read_saved(path: Path) -> dict[str, Any]:
    # PyTorch's unpickler for weights makes tensors, containers and these classes, and runs nothing else.
    allowed = [Data, DataEdgeAttr, DataTensorAttr, BaseStorage, NodeStorage, EdgeStorage, GlobalStorage]
    try:
        with torch.serialization.safe_globals(allowed):
            # mmap: pages of a large graph are read when they are needed. Files of PyTorch before 1.6 do not allow it.
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"dataset: {path} holds more than tensors and a PyG Data, or is corrupt, and is not opened, since a pickle "
            f"may run any code ({reason}). Save a plain graph: torch.save(Data(x=..., edge_index=..., y=...), path)"
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"dataset: {path} is no file of torch.save: {error}") from error
    if isinstance(saved, Data):
        saved = saved.to_dict()
    if not isinstance(saved, dict):
        raise ValueError(
            f"dataset: {path} holds {type(saved).__name__}, expected a PyG Data or a dictionary of tensors"
        )
    return saved


# Arrays


def _read_npz(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except UNREADABLE as error:
        raise ValueError(f"dataset: {path} is no .npz of plain arrays: {error}") from error
    if set(_SPARSE) <= set(found):
        layout = found.pop("format", np.array(b"csr"))
        if layout.item() not in (b"csr", "csr"):
            raise ValueError(f"dataset: {path} holds a sparse matrix as {layout.item()!r}, expected CSR")
        if "x" in found or "features" in found:
            raise ValueError(f"dataset: {path} holds features twice, dense and as {', '.join(_SPARSE)}")
        data, indices, indptr, shape = (found.pop(name) for name in _SPARSE)
        found["x"] = _csr(path, lambda: sp.csr_matrix((data, indices, indptr), shape))
    return {
        name: as_tensor(value, f"{path}, {name}", sparse=True) if _is_part(name) else None
        for name, value in found.items()
    }


def _is_part(name: str) -> bool:
    return any(name in names for names in NAMES.values()) or name == "num_classes"


def _csr(path: Path, read: Callable[[], sp.spmatrix]) -> Tensor:
    try:
        matrix = read().tocsr()
        matrix.check_format(full_check=True)
    except (*UNREADABLE, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"dataset: {path} holds no sound sparse matrix: {error}") from error
    return csr_from_scipy(matrix)


def as_tensor(value: Any, where: str, *, sparse: bool = False) -> Tensor:
    """An array or tensor as a tensor of a dtype that PyTorch computes with.

    Raises:
        ValueError: it holds no real numbers, or is a sparse tensor where ``sparse`` does not allow one.
    """
    if isinstance(value, Tensor):
        if value.is_complex() or not (sparse or value.layout == torch.strided):
            raise ValueError(f"dataset: {where} is {value.dtype}, {value.layout}, expected dense real numbers")
        return value
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        kind = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueError(f"dataset: {where} is {kind}, expected an array of numbers")
    if value.dtype.kind == "u" and value.dtype.itemsize > 1:
        value = value.astype(np.int64)
    if value.dtype == np.longdouble:
        value = value.astype(np.float64)
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    return torch.from_numpy(value)


# A folder


def _read_folder(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.suffix not in _READERS or not path.is_file() or not _is_part(path.stem):
            found[f"./{path.name}"] = None  # to be named where a part is missed
            continue
        if path.stem in found:
            raise ValueError(f"dataset: {folder} holds {path.stem} in two formats, expected one of them")
        found[path.stem] = _READERS[path.suffix](path)
    if not any(_is_part(name) for name in found):
        raise ValueError(
            f"dataset: {folder} holds no part of a graph, expected {_EXPECTED}, each as one of {', '.join(_READERS)}"
        )
    return _named(folder, found)


def _read_npy(path: Path) -> Tensor:
    try:
        # Pages are read when they are needed, and copied when someone writes to them.
        array = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"dataset: {path} is no .npy of plain numbers: {error}") from error
    return as_tensor(array, str(path))


def _read_npz_part(path: Path) -> Tensor:
    """What ``scipy.sparse.save_npz`` wrote, or the one array of an archive."""
    try:
        with np.load(path, allow_pickle=False) as file:
            names = file.files
            if "format" not in names and len(names) == 1:
                return as_tensor(file[names[0]], f"{path}, {names[0]}")
    except UNREADABLE as error:
        raise ValueError(f"dataset: {path} is no .npz of plain arrays: {error}") from error
    if "format" not in names:
        raise ValueError(
            f"dataset: {path} holds {', '.join(names) or 'nothing'}, expected one array or a sparse matrix"
        )
    return _csr(path, lambda: sp.load_npz(path))


def _read_csv(path: Path) -> Tensor:
    try:
        table = read_table(path, np.float64, header=True)
    except ValueError as error:
        raise ValueError(f"dataset: {error}") from error
    return _from_table(path, torch.from_numpy(table))


def _read_parquet(path: Path) -> Tensor:
    pyarrow = optional("pyarrow", "files", f"dataset: {path}", "or save the table as .npy")
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
        columns = [column.to_numpy() for column in table.columns]
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise ValueError(f"dataset: {path} is no Parquet table: {error}") from error
    if not columns:
        raise ValueError(f"dataset: {path} has no columns")
    if len(columns) == 1 and columns[0].dtype == object:  # a list of numbers in each row
        try:
            return _from_table(path, as_tensor(np.stack(columns[0]), str(path)))
        except ValueError as error:
            raise ValueError(f"dataset: {path} holds rows of unlike length, or no numbers: {error}") from error
    bad = [name for name, column in zip(table.column_names, columns, strict=True) if column.dtype.kind not in "biuf"]
    if bad:
        raise ValueError(f"dataset: {path} has the column {bad[0]!r}, which holds no numbers; drop it")
    return _from_table(path, as_tensor(np.column_stack(columns), str(path)))


def _from_table(path: Path, table: Tensor) -> Tensor:
    """Tables have an edge a row, always; of two edges an array's shape would not tell."""
    if path.stem in NAMES["edge_index"] and table.numel():
        if table.size(1) != 2:
            raise ValueError(f"dataset: {path} has {table.size(1)} columns, expected two, from and to")
        return table.t()
    return table[:, 0] if table.dim() == 2 and table.size(1) == 1 and path.stem not in NAMES["x"] else table


_READERS: dict[str, Callable[[Path], Tensor]] = {
    ".npy": _read_npy,
    ".npz": _read_npz_part,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
