"""The graph in all files of the fuzzer."""

import numpy as np
import scipy.sparse as sp
import torch

N, F, CLASSES = 40, 6, 3


def dense() -> np.ndarray:
    return np.random.default_rng(0).random((N, F), dtype=np.float32)


def sparse() -> sp.csr_matrix:
    return sp.csr_matrix(dense() * (np.arange(N * F).reshape(N, F) % 3 == 0))


def edges() -> np.ndarray:
    return np.stack([np.arange(N), (np.arange(N) + 1) % N])


def arrays() -> dict[str, np.ndarray]:
    place = np.arange(N)
    masks = {"train_mask": place < 10, "val_mask": place % 20 == 10, "test_mask": place % 20 == 15}
    return {"x": dense(), "edge_index": edges(), "y": place % CLASSES, **masks}


def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays().items()}
