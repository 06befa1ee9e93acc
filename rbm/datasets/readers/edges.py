"""Edges from raw files: checks, and conversion to the undirected form that the package uses."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def undirected(edges: np.ndarray, num_nodes: int, path: Path) -> Tensor:
    """Convert edges ``[M, 2]`` to an ``edge_index`` with both directions, sorted, without self-loops or duplicates.

    Raises:
        ValueError: ids outside the graph; the message names ``path``.
    """
    check_ids(edges, num_nodes, path)
    # Each edge is encoded as one number: sorting these takes a fraction of the time and memory of sorting pairs.
    keys = np.concatenate([edges[:, 0] * num_nodes + edges[:, 1], edges[:, 1] * num_nodes + edges[:, 0]])
    keys.sort()
    kept = keys % (num_nodes + 1) != 0  # v * num_nodes + v are the multiples
    kept[1:] &= keys[1:] != keys[:-1]
    keys = keys[kept]
    return torch.from_numpy(np.stack([keys // num_nodes, keys % num_nodes]))


def check_ids(ids: np.ndarray, num_nodes: int, path: Path) -> None:
    """Raise ValueError unless all ``ids`` are nodes; the message names ``path``."""
    if ids.size and not (ids.min() >= 0 and ids.max() < num_nodes):
        raise ValueError(
            f"{path} holds node ids from {ids.min()} to {ids.max()}, expected 0 to {num_nodes - 1}; it is corrupt, or "
            "belongs to another graph"
        )
