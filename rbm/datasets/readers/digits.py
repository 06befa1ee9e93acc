"""The graph ``digits``, made of scikit-learn's images of digits; it needs no files."""

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected


def read_digits(num_neighbors: int = 8) -> Data:
    """Scikit-learn's handwritten digits: each image is joined to its nearest images, in both directions.

    Features are the 64 pixels scaled to [0, 1]. Pixels are whole numbers from 0 to 16, so squared distances are exact
    in float64, and ties go to the lower node id. Every machine therefore builds the same graph.
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
    return Data(x=x, edge_index=edge_index, y=torch.from_numpy(digits.target).to(torch.int64))
