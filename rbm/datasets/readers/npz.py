"""The Amazon and Coauthor graphs, from the npz files of the "Pitfalls of GNN evaluation" benchmark."""

from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.io import parse_npz
from torch_geometric.transforms import LargestConnectedComponents

from rbm.datasets.readers.features import csr_from_scipy
from rbm.datasets.readers.matrices import scipy_csr
from rbm.datasets.registry import DatasetInfo
from rbm.datasets.validation import check_class_numbers
from rbm.utils.arrays import read_npz

_NPZ_KEYS = tuple(f"{part}_{field}" for part in ("adj", "attr") for field in ("data", "indices", "indptr", "shape"))


def read_npz_graph(info: DatasetInfo, folder: Path, *, binarize: bool = False) -> Data:
    """The largest connected component of an Amazon or Coauthor graph, undirected and without self-loops.

    Features are CSR, as stored (Coauthor's are counts); ``binarize`` sets every positive value to 1, as PyG does.

    Raises:
        ValueError: the file is corrupt or lacks an array.
    """
    path = folder / info.raw_files[0]
    try:
        names, arrays = read_npz(path, (*_NPZ_KEYS, "labels"))
        if missing := [key for key in (*_NPZ_KEYS, "labels") if key not in names]:
            raise ValueError(f"it lacks {', '.join(missing)}")
        features, adjacency = (scipy_csr(arrays, f"{part}_") for part in ("attr", "adj"))
        num_nodes, labels = features.shape[0], arrays["labels"]
        if adjacency.shape != (num_nodes, num_nodes) or labels.shape != (num_nodes,) or labels.dtype.kind not in "iu":
            raise ValueError(
                f"features {list(features.shape)}, adjacency {list(adjacency.shape)} and labels {list(labels.shape)} of"
                f" {labels.dtype} do not fit together"
            )
        check_class_numbers("labels", torch.from_numpy(labels.astype(np.int64)))
        # PyG binarises features in a dense copy: pass empty features, and add ours once the component is known.
        data = parse_npz(arrays | _empty_features(num_nodes), to_undirected=True)
    except ValueError as error:
        raise ValueError(f"root: {path} is not a graph in npz form: {error}. Fetch the original file again") from error
    data.kept = torch.arange(num_nodes)
    data = LargestConnectedComponents()(data)
    kept = features[data.kept.numpy()].astype(np.float32)
    if binarize:
        kept.data = (kept.data > 0).astype(np.float32)
    return Data(x=csr_from_scipy(kept), edge_index=data.edge_index, y=data.y)


def _empty_features(num_nodes: int) -> dict[str, np.ndarray]:
    none = np.empty(0, dtype=np.float32)
    index = np.empty(0, dtype=np.int32)
    start = np.zeros(num_nodes + 1, dtype=np.int32)
    shape = np.array([num_nodes, 0])
    return {"attr_data": none, "attr_indices": index, "attr_indptr": start, "attr_shape": shape}
