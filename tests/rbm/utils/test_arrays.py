"""NumPy files: the sizes that a header declares are checked against the file and the memory."""

import numpy as np
import pytest

from rbm.utils import arrays
from rbm.utils.arrays import check_memory, open_npy, read_npz


def test_memory_that_no_machine_has():
    check_memory("a row", 2**20)
    with pytest.raises(ValueError, match=r"^a table would take 1,073,741,824.0 GiB of memory, and this process"):
        check_memory("a table", 2**60)


@pytest.mark.parametrize(("limit", "fits"), [("1000", False), ("100000", True), ("max", True)])
def test_memory_that_a_container_has(tmp_path, monkeypatch, limit, fits):
    (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(arrays, "_CONTAINER", tmp_path / "memory.max")
    if fits:
        check_memory("a table", 50_000)
    else:
        with pytest.raises(ValueError, match="a table would take"):
            check_memory("a table", 50_000)


def test_an_array_stays_in_its_file(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(6.0).reshape(2, 3))
    for mode in ("r", "c"):
        array = open_npy(tmp_path / "x.npy", mode)
        assert isinstance(array, np.memmap)
        assert array.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_arrays_by_name(tmp_path):
    np.savez_compressed(tmp_path / "x.npz", a=np.arange(3), b=np.ones(2), c=np.zeros((0, 4)))
    names, found = read_npz(tmp_path / "x.npz", ("a", "c", "d"))
    assert (names, set(found)) == (["a", "b", "c"], {"a", "c"})
    assert found["a"].tolist() == [0, 1, 2]
    assert found["c"].shape == (0, 4)
    assert set(read_npz(tmp_path / "x.npz", lambda name: name > "a")[1]) == {"b", "c"}


def test_a_file_that_is_none(tmp_path):
    for name in ("none.npy", "none.npz"):
        with pytest.raises(ValueError, match=r"No such file"):
            (open_npy(tmp_path / name) if name.endswith("npy") else read_npz(tmp_path / name, ()))
