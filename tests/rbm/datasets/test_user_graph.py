"""Users' own graphs: the same graph from every kind of file."""

from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Data

import rbm
from rbm.datasets import load_dataset, load_graph, unseen_fraction, validate_data
from rbm.datasets.load import graph_checksum
from rbm.datasets.splits import per_class_masks
from rbm.datasets.user_graph import _mask

NODES, CLASSES = 30, 3
ALTERNATIVES = {
    "x": "features",
    "edge_index": "edges",
    "y": "labels",
    "train_mask": "train",
    "val_mask": "valid",
    "test_mask": "test",
    "teacher_logits": "logits",
}
MASKS = ("train_mask", "val_mask", "test_mask")


def arrays() -> dict[str, np.ndarray]:
    """A directed graph with a self-loop and a duplicate edge; half of its features are zero."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NODES, 4)).astype(np.float32) * (rng.random((NODES, 4)) < 0.5)
    edges = np.concatenate([rng.integers(NODES, size=(2, 40)), [[3, 5, 5], [3, 6, 6]]], axis=1)
    place = np.arange(NODES)
    return {
        "x": x,
        "edge_index": edges,
        "y": place % CLASSES,
        "train_mask": place < 9,
        "val_mask": (place >= 9) & (place < 15),
        "test_mask": (place >= 15) & (place < 28),
        "teacher_logits": rng.normal(size=(NODES, CLASSES)).astype(np.float32),
    }


def without_masks(**changes) -> dict[str, np.ndarray]:
    return {name: value for name, value in arrays().items() if name not in MASKS} | changes


def tensors(parts: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in parts.items()}


def save_data(path: Path, parts: dict[str, np.ndarray]) -> Path:
    torch.save(Data(**tensors(parts)), path / "graph.pt")
    return path / "graph.pt"


def save_dict(path: Path, parts: dict[str, np.ndarray]) -> Path:
    torch.save(tensors(parts), path / "graph.pth")
    return path / "graph.pth"


def save_npz(path: Path, parts: dict[str, np.ndarray]) -> Path:
    np.savez(path / "graph.npz", **parts)
    return path / "graph.npz"


def save_csr_npz(path: Path, parts: dict[str, np.ndarray]) -> Path:
    parts = dict(parts)
    x = sp.csr_matrix(parts.pop("x"))
    np.savez(path / "graph.npz", data=x.data, indices=x.indices, indptr=x.indptr, shape=x.shape, **parts)
    return path / "graph.npz"


def save_npy(path: Path, parts: dict[str, np.ndarray]) -> Path:
    for name, value in parts.items():
        np.save(path / f"{name}.npy", value)
    return path


def save_npy_and_sparse(path: Path, parts: dict[str, np.ndarray]) -> Path:
    sp.save_npz(path / "x.npz", sp.csr_matrix(parts["x"]))
    np.savez_compressed(path / "y.npz", parts["y"])
    return save_npy(path, {name: value for name, value in parts.items() if name not in ("x", "y")})


def as_table(name: str, value: np.ndarray) -> np.ndarray:
    value = value.T if name in ("edge_index", "edges") else value
    return value[:, None] if value.ndim == 1 else value


def save_csv(path: Path, parts: dict[str, np.ndarray]) -> Path:
    for name, value in parts.items():
        table = as_table(name, value)
        header = ",".join(f"column {i}" for i in range(table.shape[1])) if name in ("x", "edge_index") else ""
        np.savetxt(path / f"{name}.csv", table, "%.9g", ",", header=header, comments="")
    return path


def save_parquet(path: Path, parts: dict[str, np.ndarray]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, value in parts.items():
        columns = {f"column {i}": column for i, column in enumerate(as_table(name, value).T)}
        if name == "teacher_logits":
            columns = {name: list(value)}  # a list in each row
        parquet.write_table(pyarrow.table(columns), path / f"{name}.parquet")
    return path


FORMS = {
    "pt of a Data": save_data,
    "pth of a dictionary": save_dict,
    "npz": save_npz,
    "npz with CSR features": save_csr_npz,
    "npy": save_npy,
    "npy and npz": save_npy_and_sparse,
    "csv": save_csv,
    "parquet": save_parquet,
}


def assert_equal_graphs(found: Data, expected: dict[str, np.ndarray]) -> None:
    for name, value in expected.items():
        assert np.array_equal(found[name].numpy(), value), name
    dtypes = {"x": torch.float32, "edge_index": torch.int64, "y": torch.int64, "teacher_logits": torch.float32}
    assert {name: found[name].dtype for name in expected} == {name: dtypes.get(name, torch.bool) for name in expected}
    assert found.num_classes == CLASSES
    assert type(found.num_classes) is int
    validate_data(found)


# One graph in all forms


@pytest.mark.parametrize("form", FORMS)
def test_every_form_holds_the_same_graph(tmp_path, form):
    path = FORMS[form](tmp_path, arrays())
    assert_equal_graphs(load_graph(path), arrays())
    assert_equal_graphs(load_graph(str(path)), arrays())


def test_under_another_default_device(tmp_path):
    """As in a notebook that computes on a GPU."""
    path = save_npz(tmp_path, without_masks())
    with torch.device("meta"):
        graphs = load_graph(path), load_dataset("digits")
    for found, expected in zip(graphs, (load_graph(path), load_dataset("digits")), strict=True):
        for name in ("x", "edge_index", "y", *MASKS):
            assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_edges_are_told_to_be_left_out(tmp_path, form, caplog):
    weights = {"edge_weight": np.ones(arrays()["edge_index"].shape[1], dtype=np.float32)}
    path = FORMS[form](tmp_path, arrays() | weights)
    assert_equal_graphs(load_graph(path), arrays())
    assert caplog.text.count(f"dataset: {path}: edge_weight is not used") == 1


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("npz with CSR features", "npy and npz")])
def test_other_names(tmp_path, form):
    parts = {ALTERNATIVES[name]: value for name, value in arrays().items()}
    assert_equal_graphs(load_graph(FORMS[form](tmp_path, parts)), arrays())


@pytest.mark.parametrize("form", FORMS)
def test_without_masks_the_seed_draws_them(tmp_path, form):
    path = FORMS[form](tmp_path, without_masks())
    for arguments in ({}, {"seed": 4}, {"split_rng": "mt19937"}):
        found = load_graph(path, **arguments)
        expected = per_class_masks(found.y, small_classes="share", **arguments)
        assert all(torch.equal(found[name], mask) for name, mask in zip(MASKS, expected, strict=True))
        assert_equal_graphs(found, without_masks())
    assert not torch.equal(load_graph(path).train_mask, load_graph(path, seed=4).train_mask)
    with pytest.raises(ValueError, match=r"class 0 has 10 nodes, expected more than 50.*small_classes='share'"):
        load_graph(path, small_classes="error")


def test_a_drawn_split_leaves_unlabelled_nodes_out(tmp_path):
    y = arrays()["y"]
    y[[0, 7]] = -1
    data = load_graph(save_npz(tmp_path, without_masks(y=y)))
    assert (~(data.train_mask | data.val_mask | data.test_mask)).nonzero().flatten().tolist() == [0, 7]
    validate_data(data)


@pytest.mark.parametrize("form", [save_data, save_npz, save_npy, save_csv, save_parquet])
def test_masks_as_ids(tmp_path, form):
    ids = {name: np.flatnonzero(value)[::-1].copy() for name, value in arrays().items() if name in MASKS}
    assert_equal_graphs(load_graph(form(tmp_path, arrays() | ids)), arrays())


@pytest.mark.parametrize("form", [save_data, save_npz, save_npy, save_csv, save_parquet])
@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
def test_masks_as_numbers(tmp_path, form, dtype):
    numbers = {name: value.astype(dtype) for name, value in arrays().items() if name in MASKS}
    assert_equal_graphs(load_graph(form(tmp_path, arrays() | numbers)), arrays())


def test_zeros_and_ones_are_ids_in_a_graph_of_two_nodes():
    assert _mask("mask", torch.tensor([0, 1]), 2).tolist() == [True, True]
    assert _mask("mask", torch.tensor([0, 1, 1]), 3).tolist() == [False, True, True]


@pytest.mark.parametrize("form", [save_data, save_npz, save_npy, save_csv, save_parquet])
@pytest.mark.parametrize("turned", [False, True])
def test_masks_in_one_array(tmp_path, form, turned):
    masks = np.stack([arrays()[name] for name in MASKS], axis=0 if turned else 1)
    assert_equal_graphs(load_graph(form(tmp_path, without_masks(masks=masks))), arrays())


def test_masks_of_three_nodes_have_a_row_per_node(tmp_path):
    masks = np.eye(3)[[1, 2, 0]]  # node 0 validates, node 1 tests, node 2 trains
    np.savez(tmp_path / "g.npz", x=np.ones((3, 1)), edges=np.zeros((2, 0)), y=np.arange(3) % 2, masks=masks)
    data = load_graph(tmp_path / "g.npz")
    assert [data[name].nonzero().flatten().tolist() for name in MASKS] == [[2], [0], [1]]


@pytest.mark.parametrize("form", [save_data, save_npz, save_npy])
def test_edges_and_labels_as_columns(tmp_path, form):
    changes = {"edge_index": np.ascontiguousarray(arrays()["edge_index"].T), "y": arrays()["y"][:, None]}
    assert_equal_graphs(load_graph(form(tmp_path, arrays() | changes)), arrays())


def test_a_folder_of_a_known_name_is_not_called_as_the_known_graph(tmp_path, monkeypatch):
    """A run on it would not keep its graph, and what reads the run would load the known one."""
    (tmp_path / "digits").mkdir()
    save_npy(tmp_path / "digits", arrays())
    monkeypatch.chdir(tmp_path)
    for data in (load_graph("digits"), load_dataset("./digits"), load_dataset(Path("digits"))):
        assert data.num_nodes == NODES
        assert data.name == "./digits"


@pytest.mark.parametrize("form", FORMS)
def test_two_edges(tmp_path, form):
    edges = np.array([[0, 1], [2, 3]])
    assert load_graph(FORMS[form](tmp_path, arrays() | {"edge_index": edges})).edge_index.tolist() == edges.tolist()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_no_edges(tmp_path, form, dtype):
    data = load_graph(FORMS[form](tmp_path, arrays() | {"edge_index": np.empty((2, 0), dtype)}))
    assert (data.edge_index.shape, data.edge_index.dtype) == ((2, 0), torch.int64)
    validate_data(data)


@pytest.mark.parametrize("dtype", [">i4", "<u8", "uint16", "int16", "float64", "float32"])
def test_whole_numbers_of_any_dtype(tmp_path, dtype):
    changes = {name: arrays()[name].astype(dtype) for name in ("edge_index", "y")}
    for form in (save_npz, save_npy) if dtype.startswith(">") else (save_npz, save_npy, save_dict):
        assert_equal_graphs(load_graph(form(tmp_path, arrays() | changes)), arrays())


@pytest.mark.parametrize("dtype", ["float64", ">f4", "float16", "int8", "bool"])
def test_features_of_any_dtype(tmp_path, dtype):
    x = arrays()["x"].astype(dtype)
    assert_equal_graphs(load_graph(save_npz(tmp_path, arrays() | {"x": x})), arrays() | {"x": x.astype(np.float32)})


@pytest.mark.parametrize("form", FORMS)
def test_sparse_features_on_request(tmp_path, form):
    path = FORMS[form](tmp_path, arrays())
    sparse = load_graph(path, sparse_features="always")
    assert sparse.x.layout == torch.sparse_csr
    assert np.array_equal(sparse.x.to_dense().numpy(), arrays()["x"])
    validate_data(sparse)


def test_more_classes_than_labels(tmp_path):
    torch.save(Data(**tensors(without_masks()), num_classes=3), tmp_path / "graph.pt")
    assert load_graph(tmp_path / "graph.pt").num_classes == 3
    logits = np.zeros((NODES, 5), np.float32)
    assert load_graph(save_npy(tmp_path, arrays() | {"teacher_logits": logits})).num_classes == 5
    parts = {name: value for name, value in arrays().items() if name != "teacher_logits"}
    assert load_graph(save_npz(tmp_path, parts | {"num_classes": np.array(4)})).num_classes == 4


def test_loading_leaves_files_and_arrays_alone(tmp_path):
    save_npy(tmp_path, arrays())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    data = load_graph(tmp_path)
    data.x += 1
    data.train_mask[:] = True
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# By path instead of name


def test_load_dataset_takes_a_path(tmp_path):
    path = save_csv(tmp_path, without_masks())
    assert_equal_graphs(load_dataset(path), without_masks())
    assert torch.equal(load_dataset(str(path), seed=3).train_mask, load_graph(path, seed=3).train_mask)
    legacy = load_dataset(path, protocol="cpf")
    assert torch.equal(legacy.train_mask, load_graph(path, split_rng="mt19937").train_mask)
    assert load_dataset(path, sparse_features="always").x.layout == torch.sparse_csr


@pytest.mark.parametrize("sparse_features", ["never", "always"])
def test_load_dataset_normalizes_a_path_when_asked(tmp_path, sparse_features):
    x = np.abs(arrays()["x"])
    path = save_npz(tmp_path, arrays() | {"x": x})
    assert np.array_equal(load_dataset(path, sparse_features=sparse_features).x.to_dense(), x)
    normalized = load_dataset(path, normalize_features=True, sparse_features=sparse_features).x
    np.testing.assert_allclose(normalized.to_dense(), x / np.maximum(x.sum(axis=1, keepdims=True), 1), rtol=1e-6)


@pytest.mark.parametrize("option", ["binarize", "keep_duplicates"])
def test_options_of_other_graphs_are_refused(tmp_path, option):
    with pytest.raises(ValueError, match=f"{option}: got True, expected False for .*graph.npz"):
        load_dataset(save_npz(tmp_path, arrays()), **{option: True})


def test_a_fifth_of_the_test_nodes_of_a_path_is_unseen():
    assert [unseen_fraction("a.npz", protocol) for protocol in ("rbm", "cpf")] == [0.2, 0.2]
    assert [unseen_fraction("cora", protocol) for protocol in ("rbm", "cpf")] == [1.0, 0.2]
    with pytest.raises(ValueError, match="protocol: got 'glnn', expected one of rbm, cpf"):
        unseen_fraction("a.npz", "glnn")


def test_stored_logits_teach(tmp_path):
    data = load_graph(save_npz(tmp_path, arrays()))
    quick = {"max_epochs": 2, "hidden_channels": 4}
    config = rbm.Config().updated(
        {"rbm": {**quick, "num_experts": 2, "top_k": 1, "pretrain_epochs": 1}, "encoding": {"deepwalk": False}}
    )
    result = rbm.distill(data, "logits", config=config, methods=["rbm"], measure_latency=False)
    assert torch.equal(result.teacher_logits, data.teacher_logits)
    assert result.teacher is None


@pytest.mark.parametrize(("nodes", "told"), [(90, True), (300, False)])
def test_a_drawn_split_with_hardly_any_test_nodes_is_told(tmp_path, caplog, nodes, told):
    y = np.arange(nodes) % 3
    np.savez(tmp_path / "g.npz", x=np.ones((nodes, 2)), edges=np.zeros((2, 0), int), y=y)
    load_graph(tmp_path / "g.npz")
    assert ("leaves 3 of 90 labelled nodes for testing" in caplog.text) == told
    masks = np.eye(3, dtype=bool)[np.arange(nodes) % 3]
    caplog.clear()
    np.savez(tmp_path / "g.npz", x=np.ones((nodes, 2)), edges=np.zeros((2, 0), int), y=y, masks=masks)
    load_graph(tmp_path / "g.npz")
    assert "for testing" not in caplog.text, "a split of the file is its own"


def test_parameters_and_the_edges_of_pyg_become_plain_tensors(tmp_path):
    """Learned features, and logits that were computed without no_grad, are saved as tensors that require a gradient."""
    parts = tensors(arrays())
    parts["x"] = torch.nn.Parameter(parts["x"])
    parts["teacher_logits"] = parts["teacher_logits"].requires_grad_() * 1
    parts["edge_index"] = EdgeIndex(parts["edge_index"])
    torch.save(Data(**parts), tmp_path / "graph.pt")
    data = load_graph(tmp_path / "graph.pt")
    assert not data.x.requires_grad
    assert not data.teacher_logits.requires_grad
    assert type(data.edge_index) is torch.Tensor
    assert_equal_graphs(data, arrays())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool])
def test_csr_tensors_are_sorted_and_repeated_entries_summed(tmp_path, dtype):
    start = torch.tensor([0, 3] + [3] * (NODES - 1))
    x = torch.sparse_csr_tensor(start, torch.tensor([2, 1, 2]), torch.ones(3).to(dtype), (NODES, 4))
    file = tmp_path / "graph.pt"
    torch.save(tensors(arrays()) | {"x": x}, file)
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14):  # torch.load checks sparse tensors
        with pytest.raises(ValueError, match=r"graph\.pt holds a sparse tensor that PyTorch .* unsorted or repeated"):
            load_graph(file)
        stored = torch.load(file, weights_only=False)["x"]
        torch.save(tensors(arrays()) | {"x": stored.float().to_dense().to_sparse_csr()}, file)
    found = load_graph(file, sparse_features="always").x
    assert (found.col_indices().tolist(), found.values().tolist()) == ([1, 2], [1.0, 2.0])
    assert found.dtype == torch.float32


def test_self_loops_are_no_reverse_edges(tmp_path, caplog):
    loops, place = np.arange(NODES), np.arange(NODES - 1)
    edges = np.concatenate([[place, place + 1], [loops, loops]], axis=1)
    load_graph(save_npz(tmp_path, arrays() | {"edge_index": edges}))
    assert f"has {NODES - 1} distinct edges; the reverse edge is present for none of them" in caplog.text


def test_the_checksum_of_a_folder_tells_whether_a_part_of_the_graph_has_changed(tmp_path):
    for name, value in without_masks().items():
        np.save(tmp_path / f"{name}.npy", value)
    first = graph_checksum(tmp_path)
    assert len(first) == 16
    (tmp_path / "predictions.csv").write_text("row,class\n")  # which is no part
    assert graph_checksum(str(tmp_path)) == first
    np.save(tmp_path / "y.npy", without_masks()["y"][::-1])
    assert graph_checksum(tmp_path) != first
    assert graph_checksum("digits") == graph_checksum(tmp_path / "missing.npz") == ""
