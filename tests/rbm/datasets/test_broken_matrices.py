"""Raw files with invalid sparse indices: SciPy would access memory outside the matrix, or crash the process."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from rbm.datasets import load_dataset


def unsound() -> sp.csr_matrix:
    matrix = sp.csr_matrix(np.eye(4, dtype=np.float32))
    matrix.indices[:] += 10_000_000
    return matrix


def write_amazon(folder: Path, broken: str) -> None:
    arrays = {"labels": np.arange(4) % 2}
    for part in ("adj", "attr"):
        matrix = unsound() if part == broken else sp.csr_matrix(np.eye(4, dtype=np.float32))
        fields = {"data": matrix.data, "indices": matrix.indices, "indptr": matrix.indptr, "shape": matrix.shape}
        arrays |= {f"{part}_{key}": value for key, value in fields.items()}
    np.savez(folder / "amazon_electronics_photo.npz", **arrays)


@pytest.mark.parametrize("broken", ["adj", "attr"])
def test_amazon(tmp_path, broken):
    folder = tmp_path / "Amazon/Photo/raw"
    folder.mkdir(parents=True)
    write_amazon(folder, broken)
    with pytest.raises(ValueError, match=r"root: .*photo\.npz is not a graph in npz form: .*Fetch the original file"):
        load_dataset("photo", tmp_path)


@pytest.mark.parametrize("broken", ["x", "tx", "allx"])
def test_planetoid(tmp_path, broken):
    folder = tmp_path / "Planetoid/Cora/raw"
    folder.mkdir(parents=True)
    for part in ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index"):
        content = unsound() if part == broken else sp.csr_matrix((4, 4))
        (folder / f"ind.cora.{part}").write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=rf"root: .*ind\.cora\.{broken} is not a Planetoid file: .*Fetch the original"):
        load_dataset("cora", tmp_path)


def test_attributed(tmp_path):
    folder = tmp_path / "AttributedGraphDataset/citeseer/raw"
    folder.mkdir(parents=True)
    sp.save_npz(folder / "attrs.npz", unsound())
    for name in ("edgelist.txt", "labels.txt"):
        (folder / name).write_text("0 1\n")
    with pytest.raises(ValueError, match=r"root: .*attrs\.npz is not a sparse matrix: .*Fetch the original file again"):
        load_dataset("citeseer", tmp_path, protocol="cpf")


def test_a_planetoid_pickle_that_asks_for_a_table_of_gigabytes(tmp_path):
    """``LONG_BINPUT`` with index 2^28: Python would allocate a table of 4 GiB for it."""
    folder = tmp_path / "Planetoid/Cora/raw"
    folder.mkdir(parents=True)
    for part in ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index"):
        (folder / f"ind.cora.{part}").write_bytes(b"\x80\x02]r\x00\x00\x00\x10.")
    with pytest.raises(ValueError, match=r"cora\.x is not a Planetoid file: it stores an object at place 268435456"):
        load_dataset("cora", tmp_path)


@pytest.mark.parametrize("ids", ["0\n" * 3, "0\n1\n", "0\n1\n1000000000000\n", "-1\n0\n1\n"])
def test_planetoid_test_ids_that_are_no_range(tmp_path, ids):
    """PyG makes a row for each id between the first and the last."""
    folder = tmp_path / "Planetoid/CiteSeer/raw"
    folder.mkdir(parents=True)
    x, y = sp.csr_matrix(np.eye(3, dtype=np.float32)), np.eye(3, dtype=np.int32)
    content = {"x": x, "tx": x, "allx": x, "y": y, "ty": y, "ally": y, "graph": {0: [1]}}
    for part, value in content.items():
        (folder / f"ind.citeseer.{part}").write_bytes(pickle.dumps(value))
    (folder / "ind.citeseer.test.index").write_text(ids)
    with pytest.raises(ValueError, match=r"do not fit together: .*test\.index does not name the 3 test nodes"):
        load_dataset("citeseer", tmp_path)
