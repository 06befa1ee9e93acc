"""The citation graphs: Planetoid's pickles, and the CiteSeer of the CPF protocol.

PyG's dataset classes write a ``processed`` folder next to the raw files and later unpickle what they find there. The
readers that these classes call do neither: they turn raw files into a graph in memory. They are used here so that a
read-only root works, nothing is written into the user's folder, and no processed file of unknown origin is opened.
"""

import io
import pickle
import pickletools
import warnings
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch
from torch_geometric.data import Data
from torch_geometric.io import read_planetoid_data
from torch_geometric.transforms import LargestConnectedComponents

from rbm.datasets.readers.edges import check_ids, undirected
from rbm.datasets.readers.matrices import SPARSE_NAMES, check_compressed, scipy_csr
from rbm.datasets.readers.text import read_table
from rbm.datasets.registry import DatasetInfo
from rbm.utils.arrays import check_memory, read_npz

# All that Planetoid's pickles need: arrays, sparse matrices and a dictionary of lists, under old and new module names.
_PICKLE_GLOBALS = {
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.numeric", "_frombuffer"),
    ("numpy._core.numeric", "_frombuffer"),
    ("scipy.sparse.csr", "csr_matrix"),
    ("scipy.sparse._csr", "csr_matrix"),
    ("collections", "defaultdict"),
    ("__builtin__", "list"),
    ("builtins", "list"),
    ("_codecs", "encode"),
}


class _PlanetoidUnpickler(pickle.Unpickler):
    """Refuses every name that Planetoid's files do not need: a pickle could otherwise run any code."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _PICKLE_GLOBALS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no Planetoid file needs")
        return super().find_class(module, name)


def read_planetoid(info: DatasetInfo, folder: Path) -> Data:
    """Read a Planetoid graph with its public split and features as stored.

    Raises:
        ValueError: a raw file is corrupt, or its pickle contains more than arrays, sparse matrices and lists.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the files name SciPy's and NumPy's old modules
        pickles = [file for file in info.raw_files if not file.endswith("test.index")]
        parts = {file.rpartition(".")[2]: _check_pickle(folder / file) for file in pickles}
        try:
            _check_test_ids(folder / info.raw_files[-1], parts["tx"])
            data = read_planetoid_data(str(folder), info.pyg_name)
            if data.y.shape != data.x.shape[:1] or (data.num_edges and int(data.edge_index.min()) < 0):
                raise ValueError(f"features {list(data.x.shape)}, labels {list(data.y.shape)}, or edges are wrong")
            check_ids(data.edge_index.numpy(), data.x.size(0), folder / info.raw_files[-2])
            return data
        except Exception as error:  # PyG raises nearly any error for wrong parts
            raise ValueError(f"root: the Planetoid files in {folder} do not fit together: {error}") from error


def _check_test_ids(path: Path, tx: sp.csr_matrix) -> None:
    """PyG makes a row for each id from the first to the last, so the ids must be nearly consecutive."""
    ids = np.unique(read_table(path, np.int64, columns=1))
    if len(ids) != tx.shape[0] or ids.min() < 0 or ids.max() - ids.min() >= 2 * len(ids):
        raise ValueError(f"{path} does not name the {tx.shape[0]} test nodes, whose ids nearly follow one another")


def _check_memo(content: bytes) -> None:
    """Refuse a memo index beyond the file's length: Python allocates a table as long as the largest index."""
    for code, place, _ in pickletools.genops(content):
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and place > len(content):
            raise ValueError(f"it stores an object at place {place}")


def _check_pickle(path: Path) -> object:
    """Load a pickle; if it holds a sparse matrix, check its indices."""
    try:
        content = path.read_bytes()
        _check_memo(content)
        part = _PlanetoidUnpickler(io.BytesIO(content), encoding="latin1").load()
        if sp.issparse(part):
            check_compressed(part.data, part.indices, part.indptr, part.shape)
            check_memory(f"its shape {list(part.shape)}", part.shape[0] * part.shape[1] * part.dtype.itemsize)
        return part
    except Exception as error:  # a broken pickle raises nearly anything
        raise ValueError(f"root: {path} is not a Planetoid file: {error}. Fetch the original file again") from error


def read_attributed(info: DatasetInfo, folder: Path) -> Data:
    """Read a graph of PyG's ``AttributedGraphDataset``: undirected, without self-loops, classes numbered from 0.

    Its files are ``attrs.npz`` (SciPy, one row per node), ``edgelist.txt`` (two ids per line) and ``labels.txt`` (id
    and class).

    Raises:
        ValueError: a file is corrupt, or the files do not fit together.
    """
    attributes, edge_list, label_list = (folder / file for file in info.raw_files)
    try:
        features = scipy_csr(read_npz(attributes, SPARSE_NAMES)[1])
        check_memory(f"dense features {list(features.shape)}", 4 * features.shape[0] * features.shape[1])
    except ValueError as error:
        raise ValueError(
            f"root: {attributes} is not a sparse matrix: {error}. Fetch the original file again"
        ) from error
    num_nodes = features.shape[0]
    edges, labels = (read_table(path, np.int64, columns=2) for path in (edge_list, label_list))
    if not np.array_equal(np.sort(labels[:, 0]), np.arange(num_nodes)):
        raise ValueError(f"root: {label_list} does not name each of the {num_nodes} nodes of {attributes.name} once")
    _, classes = np.unique(labels[np.argsort(labels[:, 0]), 1], return_inverse=True)
    return Data(
        x=torch.from_numpy(features.toarray().astype(np.float32)),
        edge_index=undirected(edges, num_nodes, edge_list),
        y=torch.from_numpy(classes.astype(np.int64)),
    )


def largest_component(data: Data, info: DatasetInfo) -> Data:
    """The largest connected component, checked to be the one of the protocol ``cpf``.

    Raises:
        ValueError: its number of nodes or edges is not the expected one.
    """
    data = LargestConnectedComponents()(data)
    found = (data.num_nodes, data.num_edges // 2)
    if found != info.component:
        raise ValueError(
            f"root: the largest component of {info.name} has {found[0]} nodes and {found[1]} undirected edges, "
            f"expected {info.component[0]} and {info.component[1]}; these are not the files of the protocol 'cpf'"
        )
    return data
