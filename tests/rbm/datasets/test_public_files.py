"""Graphs in the formats of public collections."""

import subprocess
import sys
from collections import defaultdict

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch_geometric.data import Data
from torch_geometric.transforms import ToUndirected

from rbm.datasets import load_graph

NODES, SPLITS = 24, 10
CSR = ("data", "indices", "indptr", "shape")
MASKS = ("train_mask", "val_mask", "test_mask")


def graph(**changes) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(0)
    edges = torch.from_numpy(rng.integers(NODES, size=(2, 60)))
    return {
        "x": torch.randn(NODES, 3),
        "edge_index": torch.cat([edges, edges.flip(0)], dim=1),
        "y": torch.arange(NODES) % 2,
    } | changes


def several_splits() -> dict[str, torch.Tensor]:
    """Masks ``[N, 10]`` as in WebKB, Actor and the Wikipedia networks."""
    parts = torch.stack([torch.randperm(NODES) % 3 for _ in range(SPLITS)], dim=1)
    return {name: parts == number for number, name in enumerate(MASKS)}


def save(path, saved):
    torch.save(saved, path / "data.pt")
    return path / "data.pt"


@pytest.mark.parametrize("seed", [0, 3, 12])
def test_a_seed_chooses_one_of_several_splits(tmp_path, caplog, seed):
    masks = several_splits()
    data = load_graph(save(tmp_path, Data(**graph(), **masks)), seed=seed)
    for name in MASKS:
        assert torch.equal(data[name], masks[name][:, seed % SPLITS])
    assert f"has masks for 10 splits; seed {seed} uses split {seed % SPLITS}, counted from 0" in caplog.text


@pytest.mark.parametrize("seed", [0, 13])
def test_the_npz_of_the_heterophilous_graphs(tmp_path, seed):
    """Platonov et al. (2023): one row per split, names in the plural, one edge per row."""
    parts, masks = graph(), several_splits()
    rows = {f"{name}s": mask.T.numpy() for name, mask in masks.items()}
    named = {"node_features": parts["x"], "node_labels": parts["y"], "edges": parts["edge_index"].T}
    np.savez(tmp_path / "actor.npz", **{name: value.numpy() for name, value in named.items()}, **rows)
    data = load_graph(tmp_path / "actor.npz", seed=seed)
    for name in ("x", "y", "edge_index"):
        assert torch.equal(data[name], parts[name])
    for name in MASKS:
        assert torch.equal(data[name], masks[name][:, seed % SPLITS])


def test_one_test_set_beside_several_splits(tmp_path):
    masks = several_splits()
    masks["train_mask"], masks["test_mask"] = masks["train_mask"] | masks["test_mask"], torch.arange(NODES) % 6 == 0
    data = load_graph(save(tmp_path, Data(**graph(), **masks)), seed=4)  # as in WikiCS
    assert torch.equal(data.test_mask, masks["test_mask"])
    assert torch.equal(data.val_mask, masks["val_mask"][:, 4])


def test_splits_that_differ_in_number(tmp_path):
    masks = several_splits()
    masks["val_mask"] = masks["val_mask"][:, :7]
    with pytest.raises(ValueError, match=r"train_mask \[24, 10\], val_mask \[24, 7\], .*one column per split"):
        load_graph(save(tmp_path, Data(**graph(), **masks)))


def test_the_processed_file_of_a_dataset_of_one_graph(tmp_path):
    parts = graph()
    path = save(tmp_path, (Data(**parts).to_dict(), None, Data))  # as InMemoryDataset.save writes it
    assert torch.equal(load_graph(path, small_classes="share").x, parts["x"])
    path = save(tmp_path, (Data(**parts).to_dict(), {"x": torch.tensor([0, 9, NODES])}, Data))
    with pytest.raises(ValueError, match=r"holds several graphs, expected one"):
        load_graph(path)


def test_a_graph_whose_columns_pyg_has_told_apart(tmp_path):
    """PyG keeps in the graph which of its tensors belong to nodes; distill() takes subgraphs of a graph, too."""
    asked, parts = Data(**graph()), graph()
    asked.subgraph(torch.arange(NODES // 2))
    for data in (asked, ToUndirected()(Data(**parts))):
        assert "_cached_attr" in data._store.__dict__
        again = load_graph(save(tmp_path, data), small_classes="share")
        for name in parts:
            assert torch.equal(again[name], data[name])


def test_reading_leaves_the_classes_that_torch_load_accepts_alone(tmp_path):
    """PyG and callers list classes for their own calls of torch.load, such as those of a graph."""
    with torch.serialization.safe_globals([Data, defaultdict]):
        before = {*torch.serialization.get_safe_globals()}
        load_graph(save(tmp_path, Data(**graph())), small_classes="share")
        assert {*torch.serialization.get_safe_globals()} == before


def test_edges_in_one_direction_are_reported(tmp_path, caplog):
    ring = torch.stack([torch.arange(NODES), (torch.arange(NODES) + 1) % NODES])
    once = load_graph(save(tmp_path, Data(**graph(edge_index=ring))), small_classes="share")
    assert torch.equal(once.edge_index, ring), "directed graphs are not changed"
    assert "has 24 distinct edges; the reverse edge is present for none of them" in caplog.text
    caplog.clear()
    both = load_graph(tmp_path / "data.pt", small_classes="share", undirected=True)
    pairs = set(map(tuple, ring.T.tolist()))
    assert set(map(tuple, both.edge_index.T.tolist())) == pairs | {(b, a) for a, b in pairs}
    assert both.num_edges == 48
    assert "the reverse edge" not in caplog.text
    for edges in (torch.cat([ring, ring.flip(0)], dim=1), torch.empty(2, 0, dtype=torch.int64)):
        load_graph(save(tmp_path, Data(**graph(edge_index=edges))), small_classes="share")
    assert "reverse" not in caplog.text


def test_sparse_features_are_read_without_a_notice_of_pytorch(tmp_path):
    path = save(tmp_path, Data(**graph(x=torch.eye(NODES).to_sparse_csr())))
    code = f"import rbm; rbm.load_graph({str(path)!r}, small_classes='share')"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert "Sparse CSR tensor support" not in told


def test_a_file_of_the_gnn_benchmark(tmp_path, caplog):
    parts = graph()
    edges = np.unique(parts["edge_index"].numpy(), axis=1)
    matrices = {
        "adj": sp.csr_matrix((np.ones(edges.shape[1]), edges), shape=(NODES, NODES)),
        "attr": sp.csr_matrix(parts["x"].numpy()),
    }
    arrays = {f"{name}_{part}": getattr(each, part) for name, each in matrices.items() for part in CSR}
    pickled = np.array([{"a": 1}])
    np.savez(tmp_path / "mine.npz", labels=parts["y"].numpy(), names=pickled, **arrays)
    data = load_graph(tmp_path / "mine.npz", small_classes="share")
    assert torch.equal(data.x, parts["x"])
    assert data.edge_index.tolist() == edges.tolist()
    assert torch.equal(data.y, parts["y"])
    assert "not used" not in caplog.text
    weights = arrays | {"adj_data": np.arange(edges.shape[1]) + 1.0}
    np.savez(tmp_path / "weighted.npz", labels=parts["y"].numpy(), **weights)
    assert load_graph(tmp_path / "weighted.npz", small_classes="share").edge_index.tolist() == edges.tolist()
    assert "weighted.npz: adj_data is not used, since teachers and encodings treat all edges alike" in caplog.text
    place = np.arange(NODES)
    added = {"train_mask": place < 2, "val_mask": place == 2, "test_mask": place > 2, "num_classes": np.array(9)}
    np.savez(tmp_path / "split.npz", labels=parts["y"].numpy(), **arrays, **added)
    data = load_graph(tmp_path / "split.npz")
    assert data.train_mask.tolist() == added["train_mask"].tolist(), "a split in the file is not drawn anew"
    assert data.num_classes == 9
    np.savez(tmp_path / "twice.npz", labels=parts["y"].numpy(), x=parts["x"].numpy(), **arrays)
    with pytest.raises(ValueError, match=r"twice.npz holds features twice, as x and as attr_data"):
        load_graph(tmp_path / "twice.npz")
    np.savez(tmp_path / "objects.npz", labels=parts["y"].numpy(), **(arrays | {"attr_data": pickled}))
    with pytest.raises(ValueError, match=r"^dataset: .*objects.npz is no .npz of plain arrays: it holds"):
        load_graph(tmp_path / "objects.npz")
    arrays["adj_indices"] = arrays["adj_indices"] + NODES
    np.savez(tmp_path / "bad.npz", labels=parts["y"].numpy(), **arrays)
    with pytest.raises(ValueError, match=r"bad.npz holds no sound sparse matrix: indices range from"):
        load_graph(tmp_path / "bad.npz")


TABLES = {
    "names of nodes": (
        "edges.csv",
        "from,to\na,b\n",
        r"line 2 is 'a,b', .*; to use names, .* a column 'id' of x",
    ),
    "names of classes": ("y.csv", "label\ncat\n", r"line 2 is 'cat', .*numpy\.unique\(NAMES"),
    "weights": ("edges.csv", "0,1,0.5\n", r"has 3 columns, expected two, .*edge weights are not used"),
    "a gap": ("x.csv", "a,b\n1,2\n3,\n", r"line 3 holds 1 numbers, expected 2; a field is empty: fill in"),
    "semicolons": ("x.csv", "a;b\n1;2\n", r"line 2 is '1;2', .*; replace the semicolons between columns by commas"),
    "comments of SNAP": ("edges.csv", "# web\n# Nodes: 2\n0\t1\n", r"line 2 is '# Nodes: 2', .*; remove the lines of"),
    "comments of KONECT": ("edges.csv", "% sym\n% 2 2\n0 1\n", r"line 2 is '% 2 2', .*; remove the lines of comments"),
    "a gap in the first row": (
        "x.csv",
        "1,NA\n3,4\n",
        r"line 1 is '1,NA', expected numbers .*; fill in the missing number",
    ),
    "a fraction in the first row": ("x.csv", "0.5,one\n3,4\n", r"line 1 is '0\.5,one', .*; in a header, no name is"),
    "quotes": ("edges.csv", '"a","b"\n"0","1"\n', r"line 2 is '\"0\",\"1\"', .*; write numbers without quotes"),
    "UTF-16": ("x.csv", "a\0\n\01\0\n", r"line 2 is .*; save the file as UTF-8"),
    "flags": ("test.csv", "m\nTrue\nFalse\n", r"line 2 is 'True', .*; write true and false as 1 and 0"),
}


@pytest.mark.parametrize(("name", "text", "message"), TABLES.values(), ids=TABLES)
def test_a_message_about_a_table_says_how_to_fix_it(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        load_graph(tmp_path)


REMEDIES = {
    "one-hot": ({"y": torch.eye(2, dtype=torch.int64)[torch.arange(NODES) % 2]}, r"one-hot rows, use y\.argmax\(1\)"),
    "flags": ({"y": torch.arange(NODES) % 2 == 1}, r"use astype\(int\) for 0 and 1"),
    "several labels": ({"y": torch.ones(NODES, 2, dtype=torch.int64)}, r"y has shape .*; keep one of its columns"),
    "coordinates": ({"x": torch.eye(NODES).to_sparse()}, r"layout torch\.sparse_coo, .*use x\.to_sparse_csr\(\)"),
    "no validation": (
        {name: torch.arange(NODES) % 2 == 0 for name in ("train_mask", "test_mask")},
        r"lacks val_mask; expected all or none: use some nodes of another mask, or remove all masks",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REMEDIES.values(), ids=REMEDIES)
def test_the_message_says_how_to_fix_it(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_graph(save(tmp_path, Data(**graph(**changes))))


def test_a_label_that_is_no_number_is_unknown(tmp_path):
    labels = torch.tensor([0.0, 1.0] * (NODES // 2))
    labels[3] = float("nan")
    assert load_graph(save(tmp_path, Data(**graph(y=labels)))).y.tolist()[:5] == [0, 1, 0, -1, 0]


def test_a_relative_path_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"mine.pt does not exist; .*relative to the current.*, {tmp_path}"):
        load_graph("mine.pt")
