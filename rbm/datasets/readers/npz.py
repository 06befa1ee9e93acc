"""Amazon's and Coauthor's graphs, from the npz files of the "Pitfalls of GNN evaluation" benchmark."""

from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch
from torch_geometric.data import Data
from torch_geometric.io import parse_npz
from torch_geometric.transforms import LargestConnectedComponents

from rbm.datasets.readers.features import UNREADABLE, csr_from_scipy
from rbm.datasets.registry import DatasetInfo

_NPZ_KEYS = tuple(f"{part}_{field}" for part in ("adj", "attr") for field in ("data", "indices", "indptr", "shape"))


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
        features, _ = (_sparse(arrays, part) for part in ("attr", "adj"))
        num_nodes = features.shape[0]
        # PyG binarises features in a dense copy of them all: give it none, and add ours when the component is known.
        data = parse_npz(arrays | _empty_features(num_nodes), to_undirected=True)
    except (*UNREADABLE, KeyError) as error:
        raise ValueError(f"root: {path} is not a graph in npz form: {error}. Fetch the original file again") from error
    data.kept = torch.arange(num_nodes)
    data = LargestConnectedComponents()(data)
    kept = features[data.kept.numpy()].astype(np.float32)
    if binarize:
        kept.data = (kept.data > 0).astype(np.float32)
    return Data(x=csr_from_scipy(kept), edge_index=data.edge_index, y=data.y)


def _sparse(arrays: dict[str, np.ndarray], part: str) -> sp.csr_matrix:
    data, indices, indptr, shape = (arrays[f"{part}_{field}"] for field in ("data", "indices", "indptr", "shape"))
    matrix = sp.csr_matrix((data, indices, indptr), shape)
    matrix.check_format(full_check=True)  # SciPy would read and write wherever wrong indices point
    return matrix


def _empty_features(num_nodes: int) -> dict[str, np.ndarray]:
    none = np.empty(0, dtype=np.float32)
    index = np.empty(0, dtype=np.int32)
    start = np.zeros(num_nodes + 1, dtype=np.int32)
    shape = np.array([num_nodes, 0])
    return {"attr_data": none, "attr_indices": index, "attr_indptr": start, "attr_shape": shape}
