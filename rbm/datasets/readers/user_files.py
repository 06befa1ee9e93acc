"""A user's own graph from files: accepted names and formats, and how the files are opened safely."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import AttrType, BaseStorage, EdgeStorage, GlobalStorage, NodeStorage

from rbm.datasets.readers.features import csr_from_scipy
from rbm.datasets.readers.matrices import SPARSE_NAMES, UNSIGNED, check_tensor, scipy_csr
from rbm.datasets.readers.node_ids import (
    NodeIds,
    column_names,
    id_column,
    lacks_header,
    read_by_ids,
    read_edges,
    read_mask,
    read_named_rows,
)
from rbm.datasets.readers.parquet import TextColumnError, check_columns, numbers
from rbm.datasets.readers.text import read_table
from rbm.datasets.validation import MASKS, REMEDIES
from rbm.utils.arrays import open_npy, pickled_arrays, read_npz
from rbm.utils.files import optional
from rbm.utils.tensor_files import PicklesError, SparseTensorError, read_pickled

# Each part of a graph and its accepted names, for all file formats.
NAMES = {
    "x": ("x", "features", "node_features"),
    "edge_index": ("edge_index", "edges"),
    "y": ("y", "labels", "node_labels"),
    "teacher_logits": ("teacher_logits", "logits"),
    "masks": ("masks",),
    "train_mask": ("train_mask", "train_masks", "train"),
    "val_mask": ("val_mask", "val_masks", "val", "valid"),
    "test_mask": ("test_mask", "test_masks", "test"),
    "num_classes": ("num_classes",),
}
PART_OF = {name: part for part, names in NAMES.items() for name in names}  # the part of each name
# Tables whose columns are read in this order, with the beginnings of usual names.
_ORDERS = {
    "masks": {"train": "train", "val": "val", "test": "test"},
    "edge_index": {"from": "from|source|src|sender", "to": "to$|to_|target|dst|dest|receiver"},
}
# The number for a node that a table with ids lacks, where it may lack any.
_LACKING = {"y": -1.0, **dict.fromkeys((*MASKS, "masks"), 0.0)}
_SPARSE = ("data", "indices", "indptr", "shape")  # what scipy.sparse.save_npz writes for a CSR matrix
_LARGEST = 2**63 - 1
_OF_NAMES = "; names become numbers by numpy.unique(NAMES, return_inverse=True)[1]"
_OF_LABELS = f"{_OF_NAMES}; a column of the nodes' ids is called 'id'"
_OF_NODES = "; nodes are rows of x, counted from 0; to use names, write the name of each row into a column 'id' of x"
_OF_FEATURES = "; drop it, or call it 'id' if it names the nodes"
_OF_COLUMNS = "; drop it, or write numbers instead"
_OF_PARTS = {"y": _OF_LABELS, "edge_index": _OF_NODES}
_EXPECTED = "x (or features), edge_index (or edges) and y (or labels)"


def read_parts(path: Path) -> dict[str, Any]:
    """Read the parts of a graph from a file or folder as unchecked tensors, under the keys of ``NAMES``.

    Unknown names and files of other formats in a folder (as ``./name``) are ignored and listed under ``"others"``.

    Raises:
        FileNotFoundError: ``path`` does not exist.
        ValueError: it cannot be read, reading it could run code, or it contains a part twice.
    """
    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        base = "" if path.is_absolute() else f"; the path is relative to the current folder, {Path.cwd()}"
        raise FileNotFoundError(f"dataset: {path} does not exist; expected a file or folder that holds a graph{base}")
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
    parts["others"] = sorted(map(str, found.keys() - PART_OF.keys()))
    return parts


# A saved graph


def _read_saved(path: Path) -> dict[str, Any]:
    # PyTorch's unpickler for weights creates tensors, containers and these classes only, and runs no other code.
    # AttrType and a defaultdict are in a Data whose subgraph was taken, and in one that ToUndirected() made.
    allowed = [Data, DataEdgeAttr, DataTensorAttr, BaseStorage, NodeStorage, EdgeStorage, GlobalStorage, AttrType]
    try:
        saved = read_pickled(path, allowed)
    except PicklesError as error:
        raise ValueError(
            f"dataset: {path} holds more than tensors and a PyG Data, or is corrupt, and is not opened, since a pickle "
            f"may run any code ({error}). Save a plain graph: torch.save(Data(x=..., edge_index=..., y=...), path)"
        ) from error
    except SparseTensorError as error:
        raise ValueError(f"dataset: {path} {error}") from error
    except ValueError as error:
        raise ValueError(f"dataset: {path} is not a file written by torch.save: {error}") from error
    if isinstance(saved, tuple) and len(saved) > 1 and isinstance(saved[0], Data | dict):
        # The file in processed/ of a PyG dataset: the graphs in one, their slices (None for one graph), the class.
        if saved[1] is not None:
            raise ValueError(
                f"dataset: {path} holds several graphs, expected one; save one by torch.save(DATASET[0], NEW)"
            )
        saved = saved[0]
    if isinstance(saved, Data):
        try:
            saved = saved.to_dict()
        except Exception as error:  # a Data whose parts were replaced may raise anything
            raise ValueError(f"dataset: {path} holds a PyG Data that is damaged: {error}") from error
    if not isinstance(saved, dict):
        kind = type(saved).__name__
        remedy = "; save one by torch.save(LIST[0], NEW)" if kind == "list" else REMEDIES.get(kind, "")
        raise ValueError(f"dataset: {path} holds {kind}, expected a PyG Data or a dictionary of tensors{remedy}")
    return {name: value for name, value in saved.items() if value is not None}


# Arrays


def _read_npz(path: Path) -> dict[str, Any]:
    pickled = pickled_arrays(path)
    try:
        names, found = _arrays(path, (*PART_OF, *SPARSE_NAMES))
    except ValueError as error:
        if pickled:
            raise ValueError(_unpickled(path, pickled)) from error
        raise
    lacks = [part for part in ("edge_index", "y") if not any(name in found for name in NAMES[part])]
    if {"adj_data", "adj_indices", "adj_indptr", "adj_shape"} <= set(names) and "edge_index" in lacks:
        return _benchmark(path)
    if pickled and lacks:
        raise ValueError(_unpickled(path, pickled))
    if set(_SPARSE) <= set(names):
        layout = found.get("format", np.array(b"csr"))
        if layout.size != 1 or layout.item() not in (b"csr", "csr"):
            raise ValueError(f"dataset: {path} holds a sparse matrix as {layout.tolist()!r}, expected CSR")
        if any(name in found for name in NAMES["x"]):
            raise ValueError(f"dataset: {path} holds features twice, dense and as {', '.join(_SPARSE)}")
        found["x"] = csr_from_scipy(_sparse(path, found))
        names = ["x", *(name for name in names if name not in (*_SPARSE, "format"))]
    return {name: as_tensor(found[name], f"{path}, {name}", sparse=True) if name in PART_OF else None for name in names}


def _benchmark(path: Path) -> dict[str, Any]:
    """Read a file of the gnn-benchmark (Shchur et al. 2018): two CSR matrices, labels, and other parts if added."""
    names, found = _arrays(path, lambda name: name.startswith(("adj_", "attr_")) or name in PART_OF)
    adjacency = _sparse(path, found, "adj_").tocoo()
    parts = {name: as_tensor(value, f"{path}, {name}") for name, value in found.items() if name in PART_OF}
    parts["edge_index"] = torch.from_numpy(np.stack([adjacency.row, adjacency.col]).astype(np.int64))
    if "attr_data" in found:
        if "x" in parts:
            raise ValueError(f"dataset: {path} holds features twice, as x and as attr_data")
        parts["x"] = csr_from_scipy(_sparse(path, found, "attr_"))
    if adjacency.nnz and not (adjacency.data == adjacency.data[0]).all():
        parts["adj_data"] = None  # weights, which are not read
    return {name: None for name in names if not name.startswith(("adj_", "attr_"))} | parts


def _unpickled(path: Path, names: list[str]) -> str:
    """Advice for a graph whose matrices are pickles, as ``numpy.savez`` writes SciPy matrices."""
    return (
        f"dataset: {path} holds {', '.join(names[:8])} as Python objects, and is not opened, since a pickle may run any"
        " code. Where you trust its origin, convert it once, best where it can do no harm: a = numpy.load(FILE,"
        " allow_pickle=True), then numpy.savez(NEW, x=MATRIX.toarray(), edges=numpy.stack(MATRIX.nonzero()),"
        " y=LABELS), where a['NAME'].item() is a MATRIX of SciPy"
    )


def _arrays(path: Path, wanted: Iterable[str] | Callable[[str], bool]) -> tuple[list[str], dict[str, np.ndarray]]:
    try:
        return read_npz(path, wanted)
    except ValueError as error:
        raise ValueError(f"dataset: {path} is no .npz of plain arrays: {error}") from error


def _sparse(path: Path, arrays: dict[str, np.ndarray], prefix: str = "") -> sp.csr_matrix:
    try:
        return scipy_csr(arrays, prefix)
    except ValueError as error:
        raise ValueError(f"dataset: {path} holds no sound sparse matrix: {error}") from error


def as_tensor(value: Any, where: str, *, sparse: bool = False) -> Tensor:
    """Convert an array or tensor to a tensor with a dtype that PyTorch computes with.

    Raises:
        ValueError: it does not hold real numbers, it is sparse although ``sparse`` is false, or it is a CSR tensor with
            invalid indices.
    """
    if isinstance(value, Tensor):
        check_tensor(value, where, sparse)
        value = value.as_tensor() if isinstance(value, EdgeIndex) else value.detach()
        if value.dtype not in UNSIGNED:
            return value
        value = value.numpy()
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        kind = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
        names = isinstance(value, np.ndarray) and value.dtype.kind in "US"
        raise ValueError(f"dataset: {where} is {kind}, expected an array of numbers{_OF_NAMES if names else ''}")
    if value.dtype.kind == "u" and value.dtype.itemsize > 1:
        if value.size and value.max() > _LARGEST:
            raise ValueError(f"dataset: {where} holds {value.max()}, expected numbers below 2^63")
        value = value.astype(np.int64)
    if value.dtype == np.longdouble:
        value = value.astype(np.float64)
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    return torch.from_numpy(value)


# A folder


def part_files(path: Path) -> list[Path]:
    """The files that :func:`read_parts` reads, in the order of their names: ``path`` itself, unless it is a folder."""
    if not path.is_dir():
        return [path]
    return [file for file in _visible(path) if file.suffix in _READERS and file.is_file() and file.stem in PART_OF]


def _visible(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]


def _read_folder(folder: Path) -> dict[str, Any]:
    paths, parts = _visible(folder), part_files(folder)
    others = [path for path in paths if path not in parts and path.suffix in _READERS]
    if parts and others and not any(PART_OF[path.stem] == "x" for path in parts):
        # The features have another name. Edges of ids would then raise an error first, which hides the cause.
        return _named(folder, {path.stem if path in parts else f"./{path.name}": path for path in paths})
    named = [path for path in parts if PART_OF[path.stem] == "x" and _checked(id_column, path)]
    ids = x = None
    if len(named) == 1:
        names, x = _checked(read_named_rows, named[0])
        ids = _checked(NodeIds, names, named[0])
        if x is None:
            raise ValueError(_only_ids(named[0]))
    # Other files are mentioned in the message if a part is missing.
    found: dict[str, Any] = {f"./{path.name}": None for path in paths if path not in parts}
    for path in parts:
        if path.stem in found:
            raise ValueError(f"dataset: {folder} holds {path.stem} in two formats, expected one of them")
        _checked(_check_columns, path, ids)
        found[path.stem] = _READERS[path.suffix](path) if ids is None else x if path in named else _by_id(path, ids)
    if not parts:
        raise ValueError(
            f"dataset: {folder} holds no part of a graph, expected {_EXPECTED}, each as one of {', '.join(_READERS)}"
        )
    return _named(folder, found) | {"node_ids": ids}


def _check_columns(path: Path, ids: NodeIds | None) -> None:
    """Raise ValueError if a table has ids beside its numbers, although the features have none, or if the columns of a
    table of masks or edges are named in another order than they are read.
    """
    part, columns = PART_OF[path.stem], column_names(path)
    others = ids is None and part not in ("x", "edge_index") and len(columns) > 1
    if others and (name := id_column(path)):  # else logits would have a class more
        raise ValueError(
            f"{path} has ids in its column {name!r}, expected a column of ids in x too; write one, or drop it"
        )
    expected = _ORDERS.get(part, {})
    found = [what for name in columns for what, pattern in expected.items() if re.match(pattern, name.lower())]
    if found != [*expected] and sorted(found) == sorted(expected):
        raise ValueError(f"{path} has columns in the order {', '.join(found)}, expected {', '.join(expected)}")


def _by_id(path: Path, ids: NodeIds) -> Tensor:
    """A part of a graph whose nodes have ids; ``.npy`` and ``.npz`` files use row numbers."""
    part = PART_OF[path.stem]
    if path.suffix in (".csv", ".parquet"):
        if part == "edge_index":
            return _checked(read_edges, path, ids)
        if _checked(id_column, path):
            if part not in MASKS and len(column_names(path)) == 1:
                raise ValueError(_only_ids(path))
            return _from_table(path, _checked(read_by_ids, path, ids, lacking=_LACKING.get(part)))
        if path.suffix == ".csv" and lacks_header(path, ids):
            raise ValueError(
                f"dataset: {path} begins with the id of a node, expected a header such as id,label; write one"
            )
        if part in MASKS and (nodes := _checked(read_mask, path, ids)) is not None:
            return nodes
    return _READERS[path.suffix](path)


def _only_ids(path: Path) -> str:
    what = {"x": "features", "y": "labels"}.get(PART_OF[path.stem], "numbers")
    return f"dataset: {path} has ids and no other column, expected {what} beside them"


def _checked(read: Callable, *arguments: Any, **options: Any) -> Any:
    try:
        return read(*arguments, **options)
    except TextColumnError as error:
        remedy = _OF_NAMES if PART_OF[arguments[0].stem] == "y" else _OF_COLUMNS
        raise ValueError(_no_numbers(arguments[0], error.column, remedy)) from error
    except ValueError as error:
        raise ValueError(f"dataset: {error}") from error


def _read_npy(path: Path) -> Tensor:
    try:
        array = open_npy(path, "c")
    except ValueError as error:
        raise ValueError(f"dataset: {path} is no .npy of plain numbers: {error}") from error
    return as_tensor(array, str(path))


def _read_npz_part(path: Path) -> Tensor:
    """Read a matrix written by ``scipy.sparse.save_npz``, or the only array of an archive."""
    names, _ = _arrays(path, ())
    sparse, single = "format" in names, len(names) == 1
    _, found = _arrays(path, SPARSE_NAMES if sparse else names if single else ())
    if sparse:
        return csr_from_scipy(_sparse(path, found))
    if not single:
        raise ValueError(
            f"dataset: {path} holds {', '.join(names) or 'nothing'}, expected one array or a sparse matrix"
        )
    return as_tensor(found[names[0]], f"{path}, {names[0]}")


def _read_csv(path: Path) -> Tensor:
    try:
        table = read_table(path, np.float64, header=True)
    except ValueError as error:
        hint = _OF_PARTS.get(PART_OF[path.stem], "")
        raise ValueError(f"dataset: {error}{hint if 'expected numbers between' in str(error) else ''}") from error
    return _from_table(path, torch.from_numpy(table))


def _read_parquet(path: Path) -> Tensor:
    optional("pyarrow", "files", f"dataset: {path}", "or save the table as .npy")
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
        check_columns(table.schema)
        values = numbers(table) if table.num_columns else None
    except TextColumnError as error:
        remedy = _OF_PARTS.get(PART_OF[path.stem], _OF_FEATURES)
        raise ValueError(_no_numbers(path, error.column, remedy)) from error
    except Exception as error:  # a damaged file raises nearly anything
        raise ValueError(f"dataset: {path} is no Parquet table of numbers: {error}") from error
    if values is None:
        raise ValueError(f"dataset: {path} has no columns")
    return _from_table(path, as_tensor(values, str(path)))


def _no_numbers(path: Path, column: str, remedy: str) -> str:
    return f"dataset: {path} has the column {column!r}, which holds no numbers{remedy}"


def _from_table(path: Path, table: Tensor) -> Tensor:
    """Tables always have one edge per row; for two edges, the shape alone would be ambiguous."""
    part = PART_OF[path.stem]
    if part == "edge_index" and table.numel():
        if table.size(1) != 2:
            raise ValueError(
                f"dataset: {path} has {table.size(1)} columns, expected two, from and to; edge weights are not used"
            )
        return table.t()
    return table[:, 0] if table.shape[1:] == (1,) and part not in ("x", "teacher_logits") else table


_READERS: dict[str, Callable[[Path], Tensor]] = {
    ".npy": _read_npy,
    ".npz": _read_npz_part,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
