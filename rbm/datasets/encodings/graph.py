"""Graph operations shared by the encodings: checks, and the adjacency matrix for messages."""

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor


def check_edges(edge_index: Tensor, num_nodes: int) -> None:
    """Raise unless ``edge_index`` is int64 ``[2, M]`` with ids in ``[0, num_nodes)``."""
    if not isinstance(edge_index, Tensor) or edge_index.dtype != torch.int64:
        kind = edge_index.dtype if isinstance(edge_index, Tensor) else type(edge_index).__name__
        raise TypeError(f"edge_index: got {kind}, expected a torch.int64 tensor; use edge_index.long()")
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise ValueError(f"edge_index: got shape {list(edge_index.shape)}, expected [2, edges], sources above targets")
    if edge_index.numel() and not (int(edge_index.min()) >= 0 and int(edge_index.max()) < num_nodes):
        raise ValueError(
            f"edge_index: got node ids from {int(edge_index.min())} to {int(edge_index.max())}, expected 0 to"
            f" {num_nodes - 1}; renumber the nodes or drop these edges"
        )


def in_matrix(sources: np.ndarray, targets: np.ndarray, shape: tuple[int, int], dtype: type) -> sp.csr_matrix:
    """``A`` with ``A[v, u]`` the number of edges from ``u`` to ``v``; a duplicate edge counts twice."""
    return sp.csr_matrix((np.ones(sources.size, dtype), (targets, sources)), shape)
