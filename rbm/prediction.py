"""Predictions of a finished student for rows of features from a file."""

import csv
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn

from rbm.checkpoint import write_atomically
from rbm.sparse import Features, Rows, SparseRows, as_rows
from rbm_kernels.sparse_expert_matmul.reference import csr

FORMATS = (".csv", ".npy")


def read_features(path: Path | str, num_features: int) -> Rows:
    """Read ``[B, num_features]`` as float32 from ``.npy``, from ``.npz``, or from ``.csv``.

    An ``.npz`` holds an array ``x``, or what ``scipy.sparse.save_npz`` writes: that stays sparse.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not readable (pickled arrays are refused), another shape, or rows that are not finite.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"features file {path} does not exist")
    try:
        if path.suffix == ".csv":
            rows = np.loadtxt(path, delimiter=",", ndmin=2, dtype=np.float32)
        elif path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                sparse = "format" in arrays
                rows = None if sparse else arrays["x"]
            if sparse:
                rows = sp.csr_matrix(sp.load_npz(path), dtype=np.float32)
        else:
            rows = np.load(path, allow_pickle=False)
        if not sp.issparse(rows):
            rows = np.asarray(rows, dtype=np.float32)
    except (ValueError, OSError, KeyError, EOFError) as error:
        raise ValueError(
            f"features file {path} cannot be read ({error}); expected .npy, .npz with an array x or a SciPy sparse"
            " matrix, or .csv of numbers"
        ) from error
    if rows.ndim != 2 or rows.shape[1] != num_features:
        raise ValueError(
            f"features file {path} holds an array of shape {list(rows.shape)}, expected [*, {num_features}]:"
            " one row a node, the features that the student was trained on"
        )
    if sp.issparse(rows):
        rows.sum_duplicates()  # and sorts the columns of each row
        bad = np.unique(rows.nonzero()[0][~np.isfinite(rows.data[rows.data != 0])])
    else:
        bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if bad.size:
        raise ValueError(f"features file {path}: row {bad[0]} holds NaN or infinity ({bad.size} such rows)")
    if sp.issparse(rows):
        return SparseRows(csr(*(torch.from_numpy(part) for part in (rows.indptr, rows.indices, rows.data)), rows.shape))
    return torch.from_numpy(np.ascontiguousarray(rows))


@torch.no_grad()
def predict_probabilities(student: nn.Module, x: Features, *, batch_size: int = 65536) -> Tensor:
    """Class probabilities ``[B, C]`` of the rows ``x [B, F]``, dense or sparse, in batches."""
    rows = as_rows(x)
    starts = range(0, max(1, rows.shape[0]), batch_size)
    return torch.cat([torch.softmax(student(rows[start : start + batch_size]), dim=-1) for start in starts])


def write_predictions(probabilities: Tensor, path: Path | str) -> None:
    """Write ``.csv`` (row, class, its probability) or ``.npy`` (all probabilities, ``[B, C]`` float32).

    Raises:
        ValueError: another ending, before anything is written.
    """
    path = check_format(path)
    array = probabilities.cpu().numpy()

    def write(partial: Path) -> None:
        if path.suffix == ".npy":
            with open(partial, "wb") as file:
                np.save(file, array)
            return
        with open(partial, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["row", "class", "probability"])
            for row, (label, share) in enumerate(zip(array.argmax(axis=1), array.max(axis=1), strict=True)):
                writer.writerow([row, label, f"{share:.6f}"])

    write_atomically(path, write)


def check_format(path: Path | str) -> Path:
    """The path, if its ending says how to write predictions; ValueError otherwise."""
    path = Path(path)
    if path.suffix not in FORMATS:
        raise ValueError(f"predictions file {path} ends in {path.suffix!r}, expected one of {', '.join(FORMATS)}")
    return path
