"""Conversion of features between dense and CSR, and row normalisation."""

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from rbm.config import SPARSE_FEATURES
from rbm.utils.arrays import check_memory
from rbm.utils.chunks import row_chunks
from rbm_kernels.ops.sparse_expert_matmul.reference import csr

# When load_dataset returns CSR features by default; its docstring explains why.
MAX_SPARSE_DENSITY = 0.02
MIN_SPARSE_NUMEL = 2**24
_NUMBERS_AT_ONCE = 2**24


def check_sparse_features(sparse_features: str) -> None:
    """Raise ValueError unless ``sparse_features`` is one of ``SPARSE_FEATURES``."""
    if sparse_features not in SPARSE_FEATURES:
        raise ValueError(f"sparse_features: got {sparse_features!r}, expected one of {', '.join(SPARSE_FEATURES)}")


def pack_features(x: Tensor, sparse_features: str = "auto") -> Tensor:
    """Convert features to CSR or dense according to ``sparse_features`` of :func:`rbm.datasets.load_dataset`."""
    if sparse_features == "auto":
        entries = x.values().numel() if x.layout == torch.sparse_csr else int(torch.count_nonzero(x))
        sparse = x.numel() >= MIN_SPARSE_NUMEL and entries <= MAX_SPARSE_DENSITY * x.numel()
    else:
        sparse = sparse_features == "always"
    if sparse == (x.layout == torch.sparse_csr):
        return x
    if sparse:
        return as_csr(x)
    check_memory(f"dense features {list(x.shape)}", x.numel() * x.element_size())
    return x.to_dense()


def as_csr(x: Tensor) -> Tensor:
    """Convert a dense matrix to CSR. float16, which SciPy does not support, becomes float32, some rows at a time."""
    if x.dtype == torch.float16:
        parts = row_chunks(len(x), max(1, _NUMBERS_AT_ONCE // x.shape[1]))
        matrix = sp.vstack([sp.csr_matrix(x[rows].float().cpu().numpy()) for rows in parts], format="csr")
    else:
        matrix = sp.csr_matrix(x.cpu().numpy())
    parts = (torch.from_numpy(part).to(x.device) for part in (matrix.indptr, matrix.indices, matrix.data))
    return csr(*parts, tuple(x.shape))


def csr_from_scipy(matrix: sp.csr_matrix) -> Tensor:
    """Copy a SciPy matrix to a float32 CSR tensor with sorted columns; duplicate entries are summed."""
    matrix = sp.csr_matrix(matrix, dtype=np.float32, copy=True)
    matrix.sum_duplicates()  # and sorts the columns of each row
    return csr(*(torch.from_numpy(part) for part in (matrix.indptr, matrix.indices, matrix.data)), matrix.shape)


def csr_in_order(x: Tensor) -> Tensor:
    """A CSR tensor as float32 with sorted columns; repeated entries, which other code refuses, are summed."""
    parts = (x.values().to(torch.float32), x.col_indices(), x.crow_indices())
    matrix = sp.csr_matrix(tuple(part.numpy() for part in parts), tuple(x.shape))
    return x.to(torch.float32) if matrix.has_canonical_format else csr_from_scipy(matrix)


def row_normalized(x: Tensor) -> Tensor:
    """Divide each row by its sum like PyG's ``NormalizeFeatures``, where sums below 1 count as 1.

    Raises:
        ValueError: a CSR tensor with negative entries, which PyG's shift by the minimum would turn into a dense one.
    """
    if x.layout == torch.strided:
        from torch_geometric.data import Data
        from torch_geometric.transforms import NormalizeFeatures

        return NormalizeFeatures()(Data(x=x)).x
    values = x.values()
    if values.numel() and float(values.min()) < 0:
        raise ValueError("normalize_features: got True, expected False for sparse features with negative entries")
    start = x.crow_indices()
    row = torch.arange(x.size(0)).repeat_interleave(start.diff())
    sums = torch.zeros(x.size(0), dtype=values.dtype).index_add_(0, row, values).clamp_(min=1.0)
    return csr(start, x.col_indices(), values / sums[row], tuple(x.shape))
