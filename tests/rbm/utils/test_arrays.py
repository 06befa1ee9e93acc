"""NumPy files: the sizes that a header declares are checked against the file and the memory."""

import os

import numpy as np
import pytest

from rbm.utils import arrays
from rbm.utils.arrays import NpyFile, check_memory, open_npy, read_npz


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


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(7,), (7, 3), (7, 1), (0, 3), (7, 0)])
@pytest.mark.parametrize("dtype", ["<f4", ">i8", "?"])
def test_parts_of_a_file(order, shape, dtype, tmp_path):
    array = np.asarray(np.random.default_rng(0).integers(0, 9, shape), dtype=dtype, order=order)
    np.save(tmp_path / "x.npy", array)
    file = NpyFile(tmp_path / "x.npy")
    assert (file.shape, file.dtype) == (array.shape, array.dtype)
    for start, stop in ((0, len(array)), (min(2, len(array)), min(5, len(array))), (0, 0)):
        part = file.read(start, stop)
        assert part.dtype == array.dtype
        assert np.array_equal(part, array[start:stop])


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_file_that_is_truncated_while_it_is_read(order, tmp_path, monkeypatch):
    """Regression test: a part was copied from a map, and the process ended by SIGBUS."""
    path = tmp_path / "x.npy"
    np.save(path, np.ones((5_000, 3), order=order))
    file, empty = NpyFile(path), np.empty

    def truncated(*arguments):
        os.truncate(path, 4096)
        return empty(*arguments)

    monkeypatch.setattr(np, "empty", truncated)
    with pytest.raises(ValueError, match="another process has changed it since it was opened"):
        file.read(0, 5_000)
