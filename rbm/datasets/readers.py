"""From raw files (or scikit-learn) to PyG graphs.

PyG's dataset classes write a ``processed`` folder beside the raw files and later unpickle what they find there. Its
readers, which those classes call, do neither: they go from raw files to a graph in memory. So a read-only root works,
nothing is written into anyone's folder, and no processed file of unknown origin is ever opened.
"""

import pickle
import warnings
import zipfile
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch
import torch_geometric.datasets
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.io import parse_npz, read_planetoid_data
from torch_geometric.transforms import LargestConnectedComponents, NormalizeFeatures
from torch_geometric.utils import coalesce, to_undirected

from rbm.datasets.registry import DatasetInfo
from rbm_kernels.sparse_expert_matmul.reference import csr

# Where load_dataset hands over CSR features unasked; its documentation says why.
MAX_SPARSE_DENSITY = 0.02
MIN_SPARSE_NUMEL = 2**24

_NPZ_KEYS = tuple(f"{part}_{field}" for part in ("adj", "attr") for field in ("data", "indices", "indptr", "shape"))

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
    """Refuses every name that Planetoid's files have no use for: a pickle may otherwise run any code."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _PICKLE_GLOBALS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no Planetoid file needs")
        return super().find_class(module, name)


def find_raw_folder(info: DatasetInfo, root: str | Path | None, *, download: bool = False) -> Path:
    """The folder with the raw files: ``<root>/<class>/<name>/raw``, or, as PyG itself has it, ``<root>/<name>/raw``.

    Args:
        info: the dataset.
        root: folder of datasets; may be read-only.
        download: let PyG fetch missing files into ``root`` (which must then be writable). Never done unasked.

    Raises:
        ValueError: no root.
        FileNotFoundError: the root or raw files are missing.
        RuntimeError: the download failed.
    """
    folder = f"{info.pyg_class}/{info.pyg_name}/raw"
    if root is None:
        raise ValueError(
            f"root: got None, but {info.name} is read from files; pass the folder that holds {folder} "
            "(--root FOLDER), or use the dataset 'digits', which needs no files"
        )
    root = Path(root).expanduser()
    candidates = (root / folder, root / info.pyg_name / "raw")
    for candidate in candidates:
        if all((candidate / file).is_file() for file in info.raw_files):
            return candidate
    if download:
        _download(info, root)
        return candidates[0]
    if not root.is_dir():
        problem, expected = f"the folder {root} does not exist", f"a folder that holds {folder}"
    else:
        present = max(candidates, key=lambda path: sum((path / file).is_file() for file in info.raw_files))
        missing = [file for file in info.raw_files if not (present / file).is_file()]
        problem, expected = f"{present} lacks {', '.join(missing)}", "the raw files of PyG's layout there"
    raise FileNotFoundError(
        f"root: {problem}; {info.name} expects {expected}. Pass another folder (--root FOLDER), "
        f"or let PyG fetch the files into it (download=True)"
    )


def _download(info: DatasetInfo, root: Path) -> None:
    dataset = getattr(torch_geometric.datasets, info.pyg_class)
    try:
        # force_reload: PyG shall process what it fetched, not open a processed file that lay there before.
        dataset(str(root / info.pyg_class), info.pyg_name, force_reload=True)
    except OSError as error:
        raise RuntimeError(
            f"download: PyG could not fetch {info.name} into {root}: {error}. Check the network and that the folder is "
            f"writable, or put {', '.join(info.raw_files)} into {root / info.pyg_class / info.pyg_name / 'raw'} by hand"
        ) from error


def read_planetoid(info: DatasetInfo, folder: Path) -> Data:
    """A Planetoid graph with its public split and row-normalised features.

    Raises:
        ValueError: a raw file is corrupt, or its pickle asks for more than arrays, sparse matrices and lists.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the files name SciPy's and NumPy's old modules
        for file in info.raw_files:
            if not file.endswith("test.index"):
                _check_pickle(folder / file)
        try:
            data = read_planetoid_data(str(folder), info.pyg_name)
        except (ValueError, TypeError, IndexError, RuntimeError, AttributeError) as error:
            raise ValueError(f"root: the Planetoid files in {folder} do not fit together: {error}") from error
    return NormalizeFeatures()(data)


def _check_pickle(path: Path) -> None:
    try:
        with path.open("rb") as file:
            _PlanetoidUnpickler(file, encoding="latin1").load()
    except Exception as error:  # a broken pickle raises nearly anything
        raise ValueError(f"root: {path} is not a Planetoid file: {error}. Fetch the original file again") from error


def read_npz_graph(info: DatasetInfo, folder: Path, *, binarize: bool = False) -> Data:
    """The largest connected component of an Amazon or Coauthor graph, undirected and without self-loops.

    Features are CSR, as stored (Coauthor's are counts); ``binarize`` gives PyG's form, where every positive value is 1.

    Raises:
        ValueError: the file is corrupt or lacks an array.
    """
    path = folder / info.raw_files[0]
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in (*_NPZ_KEYS, "labels")}
        features = _sparse(arrays, "attr")
        num_nodes = features.shape[0]
        # PyG binarises features in a dense copy of them all: give it none, and add ours when the component is known.
        data = parse_npz(arrays | _empty_features(num_nodes), to_undirected=True)
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"root: {path} is not a graph in npz form: {error}. Fetch the original file again") from error
    data.kept = torch.arange(num_nodes)
    data = LargestConnectedComponents()(data)
    kept = features[data.kept.numpy()].astype(np.float32)
    if binarize:
        kept.data = (kept.data > 0).astype(np.float32)
    kept.sum_duplicates()  # and sorts the columns of each row
    x = csr(*(torch.from_numpy(part) for part in (kept.indptr, kept.indices, kept.data)), kept.shape)
    return Data(x=x, edge_index=data.edge_index, y=data.y)


def pack_features(x: Tensor, sparse_features: str = "auto") -> Tensor:
    """Features as CSR or dense, as ``sparse_features`` of :func:`rbm.datasets.load_dataset` says."""
    if sparse_features == "auto":
        entries = x.values().numel() if x.layout == torch.sparse_csr else int(torch.count_nonzero(x))
        sparse = x.numel() >= MIN_SPARSE_NUMEL and entries <= MAX_SPARSE_DENSITY * x.numel()
    else:
        sparse = sparse_features == "always"
    if sparse == (x.layout == torch.sparse_csr):
        return x
    return as_csr(x) if sparse else x.to_dense()


def as_csr(x: Tensor) -> Tensor:
    """A dense matrix as CSR."""
    matrix = sp.csr_matrix(x.cpu().numpy())
    parts = (torch.from_numpy(part).to(x.device) for part in (matrix.indptr, matrix.indices, matrix.data))
    return csr(*parts, tuple(x.shape))


def _sparse(arrays: dict[str, np.ndarray], part: str) -> sp.csr_matrix:
    data, indices, indptr, shape = (arrays[f"{part}_{field}"] for field in ("data", "indices", "indptr", "shape"))
    return sp.csr_matrix((data, indices, indptr), shape)


def _empty_features(num_nodes: int) -> dict[str, np.ndarray]:
    none = np.empty(0, dtype=np.float32)
    index = np.empty(0, dtype=np.int32)
    start = np.zeros(num_nodes + 1, dtype=np.int32)
    shape = np.array([num_nodes, 0])
    return {"attr_data": none, "attr_indices": index, "attr_indptr": start, "attr_shape": shape}


def read_digits(num_neighbors: int = 8) -> Data:
    """Scikit-learn's handwritten digits: each image is joined to its nearest images, and they to it.

    Features are the 64 pixels scaled to [0, 1]. Pixels are whole numbers from 0 to 16, so squared distances are exact
    in float64; equal distances go to the lower node id. So every machine builds the same graph.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    squares = (digits.data**2).sum(axis=1)
    distances = squares[:, None] + squares[None, :] - 2.0 * digits.data @ digits.data.T
    np.fill_diagonal(distances, np.inf)
    neighbors = torch.from_numpy(np.argsort(distances, axis=1, kind="stable")[:, :num_neighbors].copy())
    target = torch.arange(neighbors.size(0)).repeat_interleave(num_neighbors)
    edge_index = to_undirected(torch.stack([neighbors.flatten(), target]), num_nodes=neighbors.size(0))
    x = torch.from_numpy(digits.data / 16.0).to(torch.float32)
    return Data(x=x, edge_index=coalesce(edge_index), y=torch.from_numpy(digits.target).to(torch.int64))
