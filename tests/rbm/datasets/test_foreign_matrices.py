"""Files with wrong headers, sizes or indices: each is refused in one sentence before memory is allocated."""

import io
import re
import warnings
import zipfile
from collections.abc import Callable

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from foreign_files import WIDTH, refusal, refusals_in_subprocess

N, F = 40, WIDTH


def matrix(kind: str = "csr") -> dict[str, np.ndarray]:
    """The arrays of a valid matrix as scipy.sparse.save_npz writes them."""
    file = io.BytesIO()
    dense = np.random.default_rng(0).random((N, F)) * (np.arange(N * F).reshape(N, F) % 3 == 0)
    options = {"blocksize": (2, 2)} if kind == "bsr" else {}
    sp.save_npz(file, getattr(sp, f"{kind}_matrix")(dense.astype(np.float32), **options))
    file.seek(0)
    return dict(np.load(file))


def put(name: str, place: int | slice, value: float, kind: str = "csr") -> dict[str, np.ndarray]:
    arrays = matrix(kind)
    arrays[name][place] = value
    return arrays


def part(name: str, value: Callable[[np.ndarray], np.ndarray], kind: str = "csr") -> dict[str, np.ndarray]:
    arrays = matrix(kind)
    return arrays | {name: value(arrays[name])}


MATRICES = {
    "start low": (put("indptr", 20, -(10**8)), "indptr does not ascend"),
    "start high": (put("indptr", 20, 10**6), "indptr does not ascend"),
    "first start": (put("indptr", 0, 5), "indptr does not ascend"),
    "last start": (put("indptr", -1, 10**6), "indptr does not ascend"),
    "columns": (put("indices", slice(None), 10**7), "indices range from 10000000"),
    "columns below": (put("indices", 3, -7), "indices range from -7"),
    "starts of 16 bits": (part("indptr", lambda old: old.astype(np.int16)), "indptr are int16"),
    "floating columns": (part("indices", lambda old: old.astype(np.float64)), "indices are float64"),
    "few columns": (part("indices", lambda old: old[:-4]), "indices have shape"),
    "few rows": (put("shape", 0, 10), "indptr have shape"),
    "shape below": (put("shape", 1, -6), r"its shape is \[40, -6\]"),
    "shape beyond": (put("shape", 1, 10**12), r"its shape is \[40, 10+\]"),
    "flags as shape": (part("shape", lambda old: old > 3), "shape are bool"),
    "complex": (part("data", lambda old: old * 1j), "entries are complex64"),
    "words": (part("data", lambda old: old.astype("U3")), "entries are <U3"),
    "csc": (put("indices", 5, 10**8, "csc"), "indices range from"),
    "csc starts": (put("indptr", 3, 10**6, "csc"), "indptr does not ascend"),
    "csc of many rows": (put("shape", 0, 2**31 - 1, "csc"), "would take 16.0 GiB"),
    "bsr": (put("indices", 5, 10**8, "bsr"), "indices range from"),
    "bsr blocks": (put("shape", 0, 39, "bsr"), "blocks of shape .* do not tile"),
    "coo": (put("row", 5, 10**8, "coo"), "row range from"),
    "coo below": (put("col", 5, -1, "coo"), "col range from -1"),
    "dia": (put("offsets", 0, 10**9, "dia"), "offsets are not distinct diagonals"),
    "dia twice": (put("offsets", 0, 1, "dia"), "offsets are not distinct diagonals"),
    "format": (part("format", lambda old: np.array("xyz")), "its format is 'xyz'"),
}


@pytest.mark.parametrize("kind", ["csr", "csc", "bsr", "coo", "dia"])
def test_sound_matrices_of_every_format_are_taken(tmp_path, kind):
    from rbm.datasets.readers.matrices import scipy_csr

    arrays = matrix(kind)
    np.savez(tmp_path / "x.npz", **arrays)
    assert np.array_equal(scipy_csr(arrays).toarray(), sp.load_npz(tmp_path / "x.npz").toarray())


# A graph of PyTorch's tensors, or of NumPy's arrays


def tensors(**changes) -> dict[str, object]:
    return {"x": torch.rand(N, F), "edge_index": torch.zeros(2, 3).long(), "y": torch.arange(N) % 2} | changes


def unchecked(crow, col, size=(N, F), make=torch.sparse_csr_tensor) -> torch.Tensor:
    """A compressed tensor that was not validated."""
    crow, col = torch.tensor(crow), torch.tensor(col)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns about its first sparse tensor
        return make(crow, col, torch.ones(col.shape[-1]), size, check_invariants=False)


STARTS = list(range(N + 1))
# PyTorch 2.14 and newer check sparse tensors before we do.
REFUSED = "|holds a sparse tensor that PyTorch .* refuses"
TENSORS = {
    "starts": (
        tensors(x=unchecked([0] * 20 + [10**9] + [N] * 20, [0] * N)),
        "x is no sound tensor: indptr does not" + REFUSED,
    ),
    "columns": (
        tensors(x=unchecked(STARTS, [10**7] * N)),
        "x is no sound tensor: indices range from 10000000" + REFUSED,
    ),
    "csc": (
        tensors(x=unchecked([0] * 6 + [N], [10**7] * N, make=torch.sparse_csc_tensor)),
        "layout torch.sparse_csc" + REFUSED,
    ),
    "coo": (
        tensors(x=torch.sparse_coo_tensor([[10**7], [1]], [1.0], (N, F), check_invariants=False)),
        "layout torch.sparse_coo" + REFUSED,
    ),
    "wide": (tensors(x=unchecked(STARTS, [0] * N, size=(N, 2**40))), "expected sizes from 0 to 2"),
    "meta": (tensors(x=torch.rand(N, F, device="meta")), "x is .*on device meta, expected dense real numbers"),
    "complex": (tensors(x=torch.rand(N, F) * 1j), "x is torch.complex64"),
    "expanded": (tensors(x=torch.ones(1, 1).expand(N, 2**45)), "would take .* of memory"),
    "labels": (tensors(y=torch.tensor([0, 10**12] * (N // 2))), "y holds the class number 1000000000000, expected"),
    "classes": (tensors(num_classes=10**12), "num_classes holds the class number 999999999999"),
    "masks": (
        tensors(**dict.fromkeys(("train_mask", "val_mask", "test_mask"), torch.tensor([0, 2] * (N // 2)))),
        "train_mask names a node twice, expected each node id once, or 0 or 1 for each of 40",
    ),
    "far labels": (tensors(y=torch.tensor([0, 1e30] * (N // 2))), r"y holds floating-point numbers beyond 2\^53"),
}


@pytest.mark.filterwarnings("ignore")
def test_matrices_and_tensors_that_lie(tmp_path):
    for name, (arrays, _) in MATRICES.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
    for name, (saved, _) in TENSORS.items():
        torch.save(saved, tmp_path / f"{name}.pt")
    answers = refusals_in_subprocess(sorted(tmp_path.iterdir()))
    expected = {f"{name}.npz": message for name, (_, message) in MATRICES.items()}
    expected |= {f"{name}.pt": message for name, (_, message) in TENSORS.items()}
    wrong = {name: answers[name] for name, message in expected.items() if not re.search(message, answers[name])}
    assert not wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not hasattr(torch, "quantize_per_tensor"), reason="this PyTorch has no quantized tensors")
def test_saved_tensors_that_are_quantized(tmp_path):
    torch.save(tensors(x=torch.quantize_per_tensor(torch.rand(N, F), 0.1, 0, torch.qint8)), tmp_path / "graph.pt")
    assert "x is torch.qint8" in refusal(tmp_path / "graph.pt")


def header(shape: tuple[int, ...], descr: str = "<f4") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


HEADERS = {
    "tera": (header((5 * 2**40, F)), "declares .* bytes, but 960 follow"),
    "below": (header((-3, F)), r"declares the shape \[-3, 6\]"),
    "beyond": (header((2**70, F)), "declares|too large"),
    "more": (header((N + 1, F)), "declares .* 984 bytes, but 960 follow"),
    "objects": (header((N, F), "|O"), "Python objects"),
    "nested": (b"\x93NUMPY\x01\x00\x00\x20" + b"(" * 0x2000, "cannot be read"),
}


def test_headers_that_lie(tmp_path):
    body, paths = np.zeros((N, F), np.float32).tobytes(), []
    for name, (lie, _) in HEADERS.items():
        paths += [tmp_path / f"{name}.npy", tmp_path / f"{name}.npz"]
        paths[-2].write_bytes(lie + body)
        with zipfile.ZipFile(paths[-1], "w") as archive:
            archive.writestr("x.npy", lie + body)
    for path in paths:
        assert re.search(HEADERS[path.stem][1], refusal(path))


def test_arrays_that_nobody_asks_for_are_not_read(tmp_path):
    path = tmp_path / "graph.npz"
    np.savez(path, **{name: value.numpy() for name, value in tensors().items()})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("notes.npy", header((2**40,)))
    assert refusal(path) == "taken"


def test_an_array_larger_than_memory_is_refused_by_its_size(tmp_path):
    path = tmp_path / "graph.npz"
    np.savez(path, **{name: value.numpy() for name, value in tensors().items() if name != "x"})
    info = zipfile.ZipInfo("x.npy")
    info.compress_type = zipfile.ZIP_DEFLATED
    lie = header((2**30, 2**10))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(info, lie)
        archive.getinfo("x.npy").file_size = len(lie) + 2**42
    assert re.search("would take 4,096.0 GiB of memory", refusal(path))


@pytest.mark.parametrize("packed", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_a_saved_graph_that_was_packed_again_or_damaged(tmp_path, packed):
    path = tmp_path / "graph.pt"
    torch.save(tensors(), path)
    with zipfile.ZipFile(path) as archive:
        parts = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    if packed == zipfile.ZIP_DEFLATED:
        with zipfile.ZipFile(path, "w", packed) as archive:
            for name, content in parts.items():
                archive.writestr(name, content)
        expected = "it is a compressed archive, which torch.save never writes"
    else:
        content = bytearray(path.read_bytes())
        content[content.index(parts["graph/data/0"]) + 3] ^= 64  # the exponent of a feature
        path.write_bytes(content)
        expected = "its part graph/data/0 is not what was written"
    assert expected in refusal(path)


def test_checksums_that_were_not_written_are_not_compared(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensors(), tmp_path / "graph.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert refusal(tmp_path / "graph.pt") == "taken"


def test_a_file_of_pytorch_before_1_6_is_taken(tmp_path):
    torch.save(tensors(), tmp_path / "graph.pt", _use_new_zipfile_serialization=False)
    assert refusal(tmp_path / "graph.pt") == "taken"


def test_names_that_would_drive_a_terminal_are_not_repeated(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("\x1b[2J.npy", header((0,)))
    assert "it holds an array whose name is not text" in refusal(tmp_path / "x.npz")
