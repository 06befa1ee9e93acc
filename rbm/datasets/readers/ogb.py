"""Node graphs of the Open Graph Benchmark, from its CSV files.

OGB's own class loads a pickle that it stores next to them, which could run code. The CSV files are fast enough to read.
"""

from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import Data

from rbm.datasets.readers.edges import check_ids, undirected
from rbm.datasets.readers.text import read_table
from rbm.datasets.registry import DatasetInfo
from rbm.datasets.validation import check_class_numbers


def read_ogb(info: DatasetInfo, folder: Path, *, keep_duplicates: bool = False) -> Data:
    """Read an undirected graph with the official split and features as stored.

    Args:
        info: the dataset.
        folder: OGB's folder of the dataset, with ``raw`` and ``split``.
        keep_duplicates: return all edges as stored, followed by all edges reversed, as the RbM code does. An edge that
            is stored in both directions then occurs twice (ogbn-arxiv: 2 x 1,166,243 edges). By default, duplicates are
            merged and self-loops dropped.

    Raises:
        ValueError: a file is corrupt, or the files do not fit together.
    """
    raw = folder / "raw"
    num_nodes, num_edges = (_count(raw / f"num-{kind}-list.csv.gz") for kind in ("node", "edge"))
    x = read_table(raw / "node-feat.csv.gz", np.float32, rows=num_nodes)
    path = raw / "node-label.csv.gz"
    y = read_table(path, np.int64, rows=num_nodes, columns=1)[:, 0]
    if y.size and y.min() < 0:
        raise ValueError(f"{path} holds the class {y.min()}, expected numbers from 0")
    check_class_numbers(str(path), torch.from_numpy(y))
    masks = _masks([folder / file for file in info.raw_files if file.startswith("split/")], num_nodes)
    path = raw / "edge.csv.gz"
    edges = read_table(path, np.int64, rows=num_edges, columns=2)
    if keep_duplicates:
        check_ids(edges, num_nodes, path)
        edge_index = torch.from_numpy(np.concatenate([edges.T, edges.T[::-1]], axis=1))
    else:
        edge_index = undirected(edges, num_nodes, path)
    return Data(x=torch.from_numpy(x), edge_index=edge_index, y=torch.from_numpy(y), **masks)


def _count(path: Path) -> int:
    # OGB lists one count per graph, and each of these datasets is a single graph.
    count = int(read_table(path, np.int64, rows=1, columns=1)[0, 0])
    if count < 1:
        raise ValueError(f"{path} says {count}, expected at least 1; it is corrupt")
    return count


def _masks(paths: list[Path], num_nodes: int) -> dict[str, torch.Tensor]:
    masks = {}
    taken = torch.zeros(num_nodes, dtype=torch.bool)
    for name, path in zip(("train_mask", "val_mask", "test_mask"), paths, strict=True):
        ids = read_table(path, np.int64, columns=1)[:, 0]
        check_ids(ids, num_nodes, path)
        mask = torch.zeros(num_nodes, dtype=torch.bool)
        mask[torch.from_numpy(ids)] = True
        if int(mask.sum()) != ids.size or bool((mask & taken).any()):
            raise ValueError(f"{path} names a node twice, or one that another part of the split has; fetch it again")
        taken |= mask
        masks[name] = mask
    return masks
