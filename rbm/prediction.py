"""Predictions of a finished student for rows of features from a file.

A student that was trained with encodings needs them beside the features. Nodes that arrive later get theirs as unseen
nodes of the inductive setting do: from the nodes of the training graph that they are joined to.
"""

import csv
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rbm.checkpoint import write_atomically
from rbm.encodings import transfer
from rbm.sparse import Features, Rows, SparseRows, as_rows, beside
from rbm_kernels.sparse_expert_matmul.reference import csr

FORMATS = (".csv", ".npy")


def read_inputs(path: Path | str, run: Path | str, width: int, neighbors: Path | str | None = None) -> Rows:
    """Rows that the student of a run folder takes, ``[B, width]``: features from a file, and encodings beside them.

    Args:
        path: features, see :func:`read_features`; with all ``width`` columns they hold the encodings themselves.
        run: folder of the run, whose ``encodings.safetensors`` holds those of the training graph's nodes.
        width: columns that the student takes.
        neighbors: ``.npy`` or ``.csv`` of whole numbers ``[M, 2]``: a row of the features, and a node of the training
            graph that it is joined to. A row that is a node of that graph itself is joined to that node alone.

    Raises:
        FileNotFoundError, ValueError: as :func:`read_features`, or no way to tell the rows' encodings.
    """
    stored = Path(run) / "encodings.safetensors"
    known = load_file(stored)["encodings"] if stored.is_file() else None
    if known is None:
        if neighbors is not None:
            raise ValueError(f"neighbors: got {neighbors}, but the student of {run} takes features alone; leave it out")
        return read_features(path, width)
    if neighbors is None:
        features = width - known.shape[1]
        return read_features(
            path,
            width,
            f"{features} features and {known.shape[1]} encodings; or pass the {features} features alone and --neighbors"
            " FILE, which says what nodes of the training graph each row is joined to",
        )
    rows = read_features(path, width - known.shape[1])
    edges = _read_neighbors(neighbors, rows.shape[0], known.shape[0])
    nodes = torch.arange(known.shape[0])
    edges = torch.stack([edges[:, 1], edges[:, 0] + len(nodes)])
    everyone = transfer(known, nodes, edges, len(nodes) + rows.shape[0])
    return beside(rows, everyone[len(nodes) :])


def _read_neighbors(path: Path | str, rows: int, nodes: int) -> Tensor:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"neighbors file {path} does not exist")
    try:
        if path.suffix == ".csv":
            edges = np.loadtxt(path, delimiter=",", ndmin=2, dtype=np.int64)
        else:
            edges = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"neighbors file {path} cannot be read ({error}); expected .npy or .csv") from error
    if edges.ndim != 2 or edges.shape[1] != 2 or not np.issubdtype(edges.dtype, np.integer):
        raise ValueError(
            f"neighbors file {path} holds {edges.dtype} of shape {list(edges.shape)}, expected whole numbers [M, 2]"
        )
    for column, count, what in ((0, rows, "rows of features"), (1, nodes, "nodes of the training graph")):
        bad = np.flatnonzero((edges[:, column] < 0) | (edges[:, column] >= count))
        if bad.size:
            raise ValueError(
                f"neighbors file {path}: line {bad[0]} names {edges[bad[0], column]}, expected 0 to {count - 1}, one of"
                f" the {count} {what}"
            )
    return torch.from_numpy(edges.astype(np.int64))


def read_features(path: Path | str, num_features: int, meaning: str = "features") -> Rows:
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
            f" one row a node, the student's {meaning}"
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
