"""Features in every format that ``rbm predict`` reads."""

from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

F, ROWS = 6, 23


def numbers() -> np.ndarray:
    """Float32 ``[ROWS, F]``."""
    x = np.random.default_rng(0).normal(size=(ROWS, F)).astype(np.float32)
    return np.where(x > 0.5, x.round(3), 0).astype(np.float32)  # sparse, and exact as text


def save_parquet(path: Path, x: np.ndarray, *, lists: bool = False, index: bool = False) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"x": list(x)} if lists else {f"f{i}": column for i, column in enumerate(x.T)}
    columns |= {"__index_level_0__": range(len(x))} if index else {}
    parquet.write_table(pyarrow.table(columns), path)


def halves(x: np.ndarray) -> sp.csr_matrix:
    """Each entry stored as two halves, zeros as well, with the columns of a row in no order."""
    columns = np.tile([*range(F)[::-1], *range(F)], len(x))
    values = np.concatenate([x[:, ::-1], x], axis=1).ravel() / 2
    return sp.csr_matrix((values, columns, np.arange(0, len(columns) + 1, 2 * F)), x.shape)


SAVE = {
    "float32.npy": np.save,
    "fortran.npy": lambda path, x: np.save(path, np.asfortranarray(x)),
    "float64.npy": lambda path, x: np.save(path, x.astype(">f8")),
    "dense.npz": lambda path, x: np.savez(path, x=x),
    "sparse.npz": lambda path, x: sp.save_npz(path, sp.csr_matrix(x)),
    "halves.npz": lambda path, x: sp.save_npz(path, halves(x)),
    "plain.csv": lambda path, x: np.savetxt(path, x, delimiter=",", fmt="%.3f"),
    "header.csv": lambda path, x: np.savetxt(path, x, delimiter=",", fmt="%.3f", header="a,b,c,d,e,f", comments=""),
    "columns.parquet": save_parquet,
    "lists.parquet": lambda path, x: save_parquet(path, x, lists=True),
}
