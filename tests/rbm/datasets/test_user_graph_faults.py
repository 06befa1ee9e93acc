"""Users' graphs that cannot be read: each fault has its own message, and no file can run code."""

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from faulty_graphs import MASKS, NODES, parts, write_folder, write_npz
from intruder import Intruder
from torch_geometric.data import Data, HeteroData

from rbm.datasets import load_graph, validate_data
from rbm.datasets.user_graph import load_unlabelled_graph


def unsplit(**changes) -> dict[str, np.ndarray]:
    return parts(**dict.fromkeys(MASKS), **changes)


def write_pt(folder: Path, **changes) -> Path:
    tensors = {n: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for n, v in parts(**changes).items()}
    torch.save(tensors, folder / "graph.pt")
    return folder / "graph.pt"


FAULTS = {
    "no x": ({"x": None}, r"lacks x; expected x \(or features\), edge_index \(or edges; .*\) and y \(or labels\)"),
    "no edges": ({"edge_index": None}, "lacks edge_index; expected"),
    "no labels, no edges": ({"y": None, "edge_index": None}, "lacks edge_index, y; expected"),
    "another name": ({"y": None, "target": np.zeros(6)}, r"lacks y; expected .* \(it has \S*target\S*\)"),
    "two names": ({"features": np.ones((6, 2))}, "holds both x and features, expected one of them"),
    "two names of a mask": ({"train": np.arange(2)}, "holds both train_mask and train, expected one of them"),
    "x flat": ({"x": np.ones(6)}, r"x has shape \[6\], expected .* \[nodes, features\], .*; use x\[:, None\]"),
    "x empty": ({"x": np.ones((6, 0))}, r"x has shape \[6, 0\], .* not empty"),
    "x complex": ({"x": np.ones((6, 2)) * 1j}, "is (torch.)?complex128, .*expected .*numbers"),
    "edges in threes": ({"edge_index": np.zeros((3, 4), int)}, r"edge_index has shape \[3, 4\], expected \[2, M\]"),
    "edges flat": ({"edge_index": np.zeros(4, int)}, r"edge_index has shape \[4\], expected \[2, M\] or \[M, 2\]"),
    "edges outside": ({"edge_index": np.array([[0, 6], [1, 2]])}, r"edge_index holds node ids from 0 to 6, .* 0 to 5"),
    "edges negative": ({"edge_index": np.array([[0, -1], [1, 2]])}, "edge_index holds node ids from -1 to 2"),
    "edges not whole": ({"edge_index": np.array([[0, 0.5], [1, 2]])}, r"edge_index holds numbers .* not whole"),
    "edges infinite": ({"edge_index": np.array([[0, np.inf], [1, 2]])}, r"edge_index holds numbers .* not whole"),
    "edges as flags": ({"edge_index": np.ones((2, 3), bool)}, "edge_index is torch.bool, expected whole numbers"),
    "labels short": ({"y": np.zeros(5, int)}, r"y has shape \[5\], expected \[6\], a class for each node"),
    "labels long": ({"y": np.ones(7, int)}, r"y has shape \[7\], expected \[6\], a class for each node$"),
    "labels one-hot": ({"y": np.eye(2)[[0, 1, 0, 1, 0, 1]]}, r"y has shape \[6, 2\], .*; for one-hot rows, use y"),
    "labels of two columns": ({"y": np.ones((6, 2))}, r"y has shape \[6, 2\], .*; keep one of its columns"),
    "labels not whole": ({"y": np.linspace(0, 1, 6)}, "y holds numbers that are not whole, expected whole ones"),
    "labels not finite": ({"y": np.array([0, 1, 0, 1, 0, np.inf])}, "y holds numbers that are not whole"),
    "labels not exact": ({"y": np.array([0, 1, 0, 1, 0, 1e300])}, "y holds floating-point numbers beyond 2.53, which"),
    "two masks": ({"test_mask": None}, "has train_mask, val_mask but lacks test_mask; expected all or none"),
    "mask misspelt": ({"val_mask": None, "val_msk": np.arange(2)}, "has train_mask, test_mask but lacks val_mask"),
    "mask short": ({"val_mask": np.ones(5, bool)}, "val_mask has 5 entries, expected one for each of 6 nodes"),
    "ids outside": ({"test_mask": np.array([4, 6])}, "test_mask holds node ids from 4 to 6, expected 0 to 5"),
    "ids negative": ({"test_mask": np.array([-1, 4])}, "test_mask holds node ids from -1 to 4, expected 0 to 5"),
    "ids twice": ({"test_mask": np.array([4, 4])}, "test_mask names a node twice, expected each node id once"),
    "ids not whole": ({"test_mask": np.array([4.5])}, "test_mask holds numbers that are not whole"),
    "masks twice": ({"masks": np.eye(6, 3)}, "holds both masks and train_mask, expected one of them"),
    "logits short": ({"logits": np.ones((5, 2))}, r"teacher_logits has shape \[5, 2\], expected \[6, 2\]: a row"),
    "logits narrow": ({"logits": np.ones((6, 1))}, r"teacher_logits has shape \[6, 1\], expected \[6, 2\]"),
    "logits flat": ({"logits": np.ones(6)}, r"teacher_logits has shape \[6\], expected \[6, 2\]"),
    "class counts": ({"num_classes": np.array([2, 3])}, r"num_classes is \[2, 3\], expected one number, at least 1"),
    "classes beyond all numbers": ({"num_classes": np.array(10**9)}, r"num_classes .*class number"),
    "too few classes": (
        {"num_classes": np.array(1)},
        "num_classes is 1, but y holds the class number 1, .*to 2 or more",
    ),
    "no label": ({"y": np.full(6, -1)}, "y has no label, expected a class number from 0 for some nodes"),
    "no class": ({"num_classes": np.array(-2)}, "num_classes is -2, expected one number, at least 1"),
}


@pytest.mark.parametrize("write", [write_npz, write_folder, write_pt])
@pytest.mark.parametrize("fault", FAULTS)
def test_fault(tmp_path, write, fault):
    changes, message = FAULTS[fault]
    path = write(tmp_path, **changes)
    with pytest.raises(ValueError, match=f"dataset: {re.escape(str(path))}.*{message}"):
        load_graph(path)


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        (np.eye(6, 2), r"masks has shape \[6, 2\], expected \[6, 3\]"),
        (np.eye(5, 3), r"masks has shape \[5, 3\], expected \[6, 3\]"),
        (np.full((6, 3), 2), "masks holds other values than 0 and 1"),
    ],
)
def test_bad_masks_in_one_array(tmp_path, masks, message):
    np.savez(tmp_path / "graph.npz", **unsplit(masks=masks))
    with pytest.raises(ValueError, match=message):
        load_graph(tmp_path / "graph.npz")


@pytest.mark.parametrize("name", ["trian_mask", "Train", "train_idx", "validation", "testing_nodes", "split_idx"])
def test_a_misspelt_mask_is_no_random_split(tmp_path, name):
    np.savez(tmp_path / "graph.npz", **unsplit(**{name: np.arange(2)}))
    with pytest.raises(ValueError, match=f"holds {name}, but no masks of a known name.*remove them for a split"):
        load_graph(tmp_path / "graph.npz")


@pytest.mark.parametrize("name", ["train_mask.pt", "train.txt", "TRAIN.CSV", "split/"])
def test_masks_in_an_unknown_form_are_no_random_split(tmp_path, name):
    folder = tmp_path / "graph"
    folder.mkdir()
    for part, value in unsplit().items():
        np.save(folder / f"{part}.npy", value)
    (folder / name).mkdir() if name.endswith("/") else (folder / name).write_text("0\n1\n")
    with pytest.raises(ValueError, match=rf"holds \./{name.rstrip('/')}, but no masks of a known name and form"):
        load_graph(folder)


def test_other_files_of_a_folder_are_passed_over(tmp_path):
    write_folder(tmp_path)
    for name in ("README.md", "notes.csv", "notes.npy", "train.txt", ".hidden.npy", "y"):
        (tmp_path / name).write_text("no numbers")
    assert load_graph(tmp_path).num_nodes == NODES


def test_numbers_beyond_float32_are_told_as_such(tmp_path):
    x = np.ones((NODES, 2))
    x[2, 1] = 1e60
    data = load_graph(write_npz(tmp_path, x=x))
    with pytest.raises(ValueError, match=r"\(node 2\), expected finite numbers of float32, up to 3\.4e38; .*scale"):
        validate_data(data)


def test_labels_that_no_class_can_have_fail_later(tmp_path):
    data = load_graph(write_npz(tmp_path, y=np.array([0, 1, 0, 1, 0, -2])))
    with pytest.raises(ValueError, match=r"data\.y: 1 labels are out of range \(node 5; node 5 has -2\)"):
        validate_data(data)
    np.savez(tmp_path / "graph.npz", **unsplit(y=np.full(6, -1)))
    with pytest.raises(ValueError, match=r"graph\.npz, y has no label"):
        load_graph(tmp_path / "graph.npz")


def test_classes_without_a_node_are_told(tmp_path, caplog):
    gaps = np.array([0, 1, 5, 0, 1, 5])
    data = load_graph(write_npz(tmp_path, y=gaps))
    assert data.num_classes == 6
    told = "no node has class 2, 3, 4, but classes are all numbers from 0 to 5, so these 3 count. "
    assert f"graph.npz, y: {told}" in caplog.text
    caplog.clear()
    validate_data(data)  # does not warn again
    assert "no node has class" not in caplog.text
    del data.num_classes
    validate_data(data)
    assert f"data.y: {told}" in caplog.text
    caplog.clear()
    # Follow the advice in the warning.
    assert load_graph(write_npz(tmp_path, y=np.unique(gaps, return_inverse=True)[1])).num_classes == 3
    assert load_graph(write_npz(tmp_path, y=gaps, num_classes=np.array(6))).num_classes == 6
    assert load_graph(write_npz(tmp_path, y=np.array([0, 1, 0, 1, 0, -1]))).num_classes == 2
    assert "no node has class" not in caplog.text


# Paths


def test_nothing_there(tmp_path):
    for name in ("nowhere", "nowhere.npz", "no/where.pt"):
        with pytest.raises(FileNotFoundError, match=f"dataset: .*{name} does not exist; expected a file or folder"):
            load_graph(tmp_path / name)


@pytest.mark.parametrize("name", ["graph.txt", "graph", "graph.npy"])
def test_unknown_suffix(tmp_path, name):
    (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match=r"ends in '.*', expected \.pt, \.pth, \.npz or a folder of files"):
        load_graph(tmp_path / name)


def test_a_folder_without_a_graph(tmp_path):
    (tmp_path / "readme.txt").write_text("")
    with pytest.raises(ValueError, match=r"holds no part of a graph, expected x .*, each as one of \.npy, \.npz"):
        load_graph(tmp_path)


def test_a_part_in_two_formats(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "y.csv").write_text("0\n")
    with pytest.raises(ValueError, match="holds y in two formats, expected one of them"):
        load_graph(tmp_path)


# Pickles


def test_a_saved_graph_cannot_run_code(tmp_path):
    torch.save({**parts(), "y": Intruder(tmp_path / "intruded")}, tmp_path / "graph.pt")
    (tmp_path / "old.pt").write_bytes(pickle.dumps(Intruder(tmp_path / "intruded"), protocol=2))
    torch.save(Data(x=torch.ones(6, 2), y=Intruder(tmp_path / "intruded")), tmp_path / "data.pt")
    for name in ("graph.pt", "old.pt", "data.pt"):
        with pytest.raises(ValueError, match=r"may run any code \(.*\)\. Save a plain graph: torch\.save\(Data"):
            load_graph(tmp_path / name)
    assert not (tmp_path / "intruded").exists()


def test_arrays_cannot_run_code(tmp_path):
    trap = np.empty(6, object)
    trap[:] = [Intruder(tmp_path / "intruded")] * 6
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ValueError, match=r"graph\.npz holds y as Python objects, and is not opened"):
        load_graph(write_npz(tmp_path, y=trap))
    with pytest.raises(ValueError, match=r"y\.npy is no \.npy of plain numbers"):
        load_graph(write_folder(folder, y=trap))
    (folder / "y.npy").unlink()
    np.savez(folder / "y.npz", trap)
    with pytest.raises(ValueError, match=r"y\.npz is no \.npz of plain arrays"):
        load_graph(folder)
    assert not (tmp_path / "intruded").exists()


def test_pickled_matrices_are_refused_with_the_way_to_convert_them(tmp_path):
    """Many graphs are published in this form: SciPy matrices in object arrays."""
    matrix = sp.csr_matrix(np.eye(NODES, k=1))
    objects = {"attr_matrix": np.array(matrix, dtype=object), "adj_matrix": np.array(matrix, dtype=object)}
    np.savez(tmp_path / "graph.npz", labels=np.arange(NODES) % 2, **objects)
    with pytest.raises(ValueError, match=r"holds attr_matrix, adj_matrix as Python objects, .*convert it once"):
        load_graph(tmp_path / "graph.npz")
    # Follow the advice in the message.
    arrays = np.load(tmp_path / "graph.npz", allow_pickle=True)
    features, adjacency = (arrays[name].item() for name in objects)
    edges = np.stack(adjacency.nonzero())
    np.savez(tmp_path / "new.npz", x=features.toarray(), edges=edges, y=arrays["labels"])
    data = load_graph(tmp_path / "new.npz", small_classes="share")
    assert (data.num_nodes, data.num_edges) == (NODES, NODES - 1)


def test_pickles_that_are_no_part_are_passed_over(tmp_path):
    assert load_graph(write_npz(tmp_path, names=np.array(["a", 3], dtype=object))).num_nodes == NODES


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ([1, 2], "holds list, expected a PyG Data or a dictionary of tensors"),
        (torch.ones(3), "holds Tensor, expected a PyG Data or a dictionary of tensors"),
        ({"x": torch.ones(6, 2), "edge_index": torch.ones(2, 3), "y": [0, 1]}, "y is list, expected an array"),
        ({"x": torch.ones(6, 2).to_sparse(), "edge_index": torch.ones(2, 3), "y": torch.ones(6)}, "x has layout"),
        ({"x": torch.ones(6, 2), "edge_index": torch.eye(6).to_sparse(), "y": torch.ones(6)}, "edge_index is .*dense"),
        ({"x": torch.ones(6, 2), 3: torch.ones(6)}, r"lacks edge_index, y; .* \(it has 3\)"),
    ],
)
def test_what_else_a_saved_file_may_hold(tmp_path, saved, message):
    torch.save(saved, tmp_path / "graph.pt")
    with pytest.raises(ValueError, match=message):
        load_graph(tmp_path / "graph.pt")


# Broken files


@pytest.mark.parametrize("name", ["graph.pt", "graph.pth", "graph.npz"])
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 broken", b"no graph at all"])
def test_broken_file(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"dataset: .*{re.escape(name)} (is no|holds more than)"):
        load_graph(tmp_path / name)


def overwrite(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[50:80] = bytes(byte ^ 0x5A for byte in content[50:80])
    path.write_bytes(content)


def test_overwritten_archives(tmp_path):
    numbers = np.random.default_rng(0).normal(size=(6, 40))
    path = tmp_path / "graph.npz"
    np.savez_compressed(path, **{"x": numbers} | parts(x=None))
    overwrite(path)
    with pytest.raises(ValueError, match=r"graph\.npz is no \.npz of plain arrays"):
        load_graph(path)
    folder = write_folder(tmp_path, x=None)
    for save in (
        lambda file: np.savez_compressed(file, numbers),
        lambda file: sp.save_npz(file, sp.csr_matrix(numbers)),
    ):
        save(folder / "x.npz")
        overwrite(folder / "x.npz")
        with pytest.raises(ValueError, match=r"x\.npz (is no \.npz of plain arrays|holds no sound sparse matrix)"):
            load_graph(folder)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".parquet"])
def test_broken_part(tmp_path, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    write_folder(tmp_path, y=None)
    for content in (b"", b"no numbers"):
        (tmp_path / f"y{suffix}").write_bytes(content)
        with pytest.raises(ValueError, match=rf"y{suffix} is no "):
            load_graph(tmp_path)


def csr(**changes) -> dict[str, np.ndarray]:
    sound = {"data": np.ones(2), "indices": np.array([0, 1]), "indptr": np.array([0, 1, 2, 2, 2, 2, 2])}
    return parts(x=None, shape=np.array([6, 2])) | sound | changes


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (csr(indices=np.array([0, 2])), "holds no sound sparse matrix"),
        (csr(indptr=np.array([0, 1, 2, 1, 2, 2, 2])), "holds no sound sparse matrix"),
        (csr(indptr=np.array([0, 1, 2])), "holds no sound sparse matrix"),
        (csr(format=np.array(b"csc")), "holds a sparse matrix as b'csc', expected CSR"),
        (csr(x=np.ones((6, 2))), "holds features twice, dense and as data, indices, indptr, shape"),
        ({name: value for name, value in csr().items() if name != "shape"}, r"lacks x; .*it has data, indices, indptr"),
    ],
)
def test_broken_sparse_features(tmp_path, arrays, message):
    np.savez(tmp_path / "graph.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        load_graph(tmp_path / "graph.npz")


def test_an_archive_of_several_arrays_is_no_part(tmp_path):
    write_folder(tmp_path, y=None)
    np.savez(tmp_path / "y.npz", a=np.ones(6), b=np.ones(6))
    with pytest.raises(ValueError, match=r"y\.npz holds a, b, expected one array or a sparse matrix"):
        load_graph(tmp_path)


def test_an_adjacency_matrix_is_no_list_of_edges(tmp_path):
    sp.save_npz(write_folder(tmp_path, edge_index=None) / "edges.npz", sp.eye(6, format="csr"))
    with pytest.raises(ValueError, match=r"edge_index is .*sparse_csr.*; .* becomes edges by numpy\.stack\(A\.nonzero"):
        load_graph(tmp_path)


@pytest.mark.parametrize(
    ("saved", "remedy"),
    [(HeteroData(a={"x": torch.ones(2, 2)}), r"use its to_homogeneous\(\)"), ([Data()], "save one by torch.save")],
)
def test_other_graphs_of_pyg_are_refused_with_a_remedy(tmp_path, saved, remedy):
    torch.save(saved, tmp_path / "graph.pt")
    with pytest.raises(ValueError, match=f"holds {type(saved).__name__}, expected a PyG Data .*{remedy}"):
        load_graph(tmp_path / "graph.pt")


def test_a_heterogeneous_graph_in_memory_is_refused_with_a_remedy():
    with pytest.raises(TypeError, match=r"data: got HeteroData, expected .*; use its to_homogeneous\(\)"):
        validate_data(HeteroData(a={"x": torch.ones(2, 2)}))


def test_a_path_may_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_pt(tmp_path)
    for load in (load_graph, load_unlabelled_graph):
        assert load("~/graph.pt").num_nodes == NODES


def test_each_edge_gets_its_reverse_once(tmp_path):
    path = write_pt(tmp_path, edge_index=np.array([[0, 1, 1], [1, 0, 2]]))
    assert load_graph(path, undirected=True).edge_index.T.tolist() == [[0, 1], [1, 0], [1, 2], [2, 1]]
