"""The protocol `cpf` of GLNN and NOSMOG: largest components, features as stored, splits by NumPy's old generator."""

import pickle
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch_geometric.data import Data

from rbm.datasets import DATASETS, load, load_dataset, unseen_fraction, validate_data
from rbm.datasets.readers.planetoid import largest_component
from rbm.datasets.registry import CPF_CITESEER
from rbm.datasets.splits import per_class_masks

NODES, RING = 560, 550


def ring() -> list[tuple[int, int]]:
    """A ring of 550 nodes with a self-loop and a duplicate, and a path through the 10 others."""
    return (
        [(node, (node + 1) % RING) for node in range(RING)]
        + [(4, 4), (7, 8)]
        + [(n, n + 1) for n in range(RING, NODES - 1)]
    )


def counts() -> sp.csr_matrix:
    rng = np.random.default_rng(0)
    return sp.random(NODES, 5, 0.5, "csr", np.float32, rng, data_rvs=lambda size: rng.integers(1, 9, size))


def write_planetoid(root: Path, name: str = "Cora") -> None:
    """The graph in Planetoid's files: 6 training nodes, the last 20 for testing."""
    folder = root / "Planetoid" / name / "raw"
    folder.mkdir(parents=True)
    graph, labels, features = defaultdict(list), np.eye(3, dtype=np.int32)[np.arange(NODES) % 3], counts()
    for source, target in ring():
        graph[source].append(target)
        graph[target].append(source)
    parts = {"x": features[:6], "allx": features[:-20], "tx": features[-20:], "graph": graph}
    parts |= {"y": labels[:6], "ally": labels[:-20], "ty": labels[-20:]}
    for part, value in parts.items():
        (folder / f"ind.{name.lower()}.{part}").write_bytes(pickle.dumps(value, protocol=2))
    (folder / f"ind.{name.lower()}.test.index").write_text("".join(f"{node}\n" for node in range(NODES - 20, NODES)))


def write_attributed(root: Path) -> Path:
    """The graph in AttributedGraphDataset's files: classes 10, 20 and 30, labels in another order."""
    folder = root / "AttributedGraphDataset/citeseer/raw"
    folder.mkdir(parents=True)
    sp.save_npz(folder / "attrs.npz", counts())
    (folder / "edgelist.txt").write_text("".join(f"{source} {target}\n" for source, target in ring()))
    order = np.random.default_rng(1).permutation(NODES)
    (folder / "labels.txt").write_text("".join(f"{node}\t{10 * (node % 3 + 1)}\n" for node in order))
    return folder


@pytest.fixture
def _small(monkeypatch):
    """Make the component of the small graph the one that the protocol expects."""
    monkeypatch.setitem(DATASETS, "cora", replace(DATASETS["cora"], component=(RING, RING)))
    monkeypatch.setattr(load, "CPF_CITESEER", replace(CPF_CITESEER, component=(RING, RING)))


def assert_the_ring(data: Data) -> None:
    expected = {pair for node in range(RING) for pair in ((node, (node + 1) % RING), ((node + 1) % RING, node))}
    assert sorted(map(tuple, data.edge_index.t().tolist())) == sorted(expected)
    assert np.array_equal(data.x.numpy(), counts().toarray()[:RING]), "features as stored"
    assert data.y.tolist() == [node % 3 for node in range(RING)]
    assert data.num_classes == 3
    validate_data(data)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(("name", "write"), [("cora", write_planetoid), ("citeseer", write_attributed)])
def test_largest_component_with_a_drawn_split(tmp_path, name, write):
    write(tmp_path)
    data = load_dataset(name, tmp_path, protocol="cpf", seed=2)
    assert_the_ring(data)
    expected = per_class_masks(data.y, seed=2, split_rng="mt19937")
    assert all(map(torch.equal, (data.train_mask, data.val_mask, data.test_mask), expected))
    assert [int(mask.sum()) for mask in expected] == [60, 90, 400]
    modern = load_dataset(name, tmp_path, protocol="cpf", seed=2, split_rng="pcg64")
    assert torch.equal(modern.train_mask, per_class_masks(data.y, seed=2)[0])
    normalized = load_dataset(name, tmp_path, protocol="cpf", normalize_features=True).x.sum(dim=1)
    assert float(normalized.max()) == pytest.approx(1.0)


@pytest.mark.usefixtures("_small")
def test_protocol_rbm_keeps_the_whole_graph(tmp_path):
    write_planetoid(tmp_path)
    data = load_dataset("cora", tmp_path)
    assert data.num_nodes == NODES
    assert data.train_mask.nonzero().flatten().tolist() == list(range(6))
    assert float(data.x.sum(dim=1).max()) == pytest.approx(1.0)
    assert [unseen_fraction("cora", protocol) for protocol in ("rbm", "cpf")] == [1.0, 0.2]


def test_another_component_is_refused(tmp_path):
    write_planetoid(tmp_path)
    write_attributed(tmp_path)
    for name, expected in (("cora", "2485 and 5069"), ("citeseer", "2110 and 3668")):
        message = f"of {name} has 550 nodes and 550 undirected edges, expected {expected}; these are not the files"
        with pytest.raises(ValueError, match=f"root: the largest component {message}"):
            load_dataset(name, tmp_path, protocol="cpf")


def test_component_of_a_graph_with_isolated_nodes():
    data = Data(x=torch.arange(5.0)[:, None], edge_index=torch.tensor([[3, 1], [1, 3]]), y=torch.arange(5))
    found = largest_component(data, replace(DATASETS["cora"], component=(2, 1)))
    assert found.y.tolist() == [1, 3]


def test_citeseer_says_which_files_it_wants(tmp_path):
    write_planetoid(tmp_path, "CiteSeer")
    with pytest.raises(FileNotFoundError, match=r"raw lacks attrs\.npz, .*AttributedGraphDataset\(root, 'CiteSeer'\)"):
        load_dataset("citeseer", tmp_path, protocol="cpf")
    assert load_dataset("citeseer", tmp_path).num_nodes == NODES


def test_graphs_that_both_protocols_share():
    paper, cpf = (load_dataset("digits", protocol=protocol, seed=1) for protocol in ("rbm", "cpf"))
    assert torch.equal(paper.x, cpf.x)
    assert torch.equal(paper.edge_index, cpf.edge_index)
    assert torch.equal(cpf.train_mask, load_dataset("digits", seed=1, split_rng="mt19937").train_mask)
    with pytest.raises(ValueError, match="protocol: got 'glnn', expected one of rbm, cpf"):
        load_dataset("digits", protocol="glnn")


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("attrs.npz", b"", r"root: .*attrs\.npz is not a sparse matrix: .*Fetch the original file again"),
        ("attrs.npz", b"PK\x03\x04 broken", r"attrs\.npz is not a sparse matrix"),
        ("edgelist.txt", b"0 1\n2\n3 4 5\n", r"edgelist\.txt is no table of numbers: lines 1 to 3 do not all hold 2"),
        ("edgelist.txt", b"0 1 1\n", r"edgelist\.txt is no table of numbers: line 1 has 3 columns, expected 2"),
        ("edgelist.txt", b"0 560\n", r"edgelist\.txt holds node ids from 0 to 560, expected 0 to 559"),
        ("labels.txt", b"0 1\n1 2\n", r"labels\.txt does not name each of the 560 nodes of attrs\.npz once"),
        ("labels.txt", b"0 1\n" * NODES, r"labels\.txt does not name each of the 560 nodes"),
        ("labels.txt", b"", r"labels\.txt does not name each of the 560 nodes"),
        ("labels.txt", b"0 Agents\n", r"labels\.txt is no table of numbers"),
    ],
)
def test_broken_files_of_citeseer(tmp_path, file, content, message):
    (write_attributed(tmp_path) / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_dataset("citeseer", tmp_path, protocol="cpf")


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("change", ["overwritten", "columns outside", "pickled"])
def test_features_of_citeseer_that_are_no_sound_matrix(tmp_path, change):
    path = write_attributed(tmp_path) / "attrs.npz"
    if change == "overwritten":
        content = path.read_bytes()
        path.write_bytes(content[:60] + bytes(byte ^ 0x5A for byte in content[60:90]) + content[90:])
    else:
        with np.load(path) as file:
            arrays = dict(file)
        arrays["indices"] = arrays["indices"] + 3 if change == "columns outside" else arrays["indices"].astype(object)
        np.savez(path, **arrays)
    with pytest.raises(ValueError, match=rf"root: {re.escape(str(path))} is not a sparse matrix"):
        load_dataset("citeseer", tmp_path, protocol="cpf")


@pytest.mark.datasets
def test_real_cora(data_root):
    data = load_dataset("cora", data_root, protocol="cpf")
    assert (data.num_nodes, data.num_edges, data.num_classes) == (2485, 2 * 5069, 7)
    assert set(data.x.unique().tolist()) == {0.0, 1.0}, "features as stored"
    assert [int(mask.sum()) for mask in (data.train_mask, data.val_mask, data.test_mask)] == [140, 210, 2135]
    assert data.y[data.train_mask].bincount().tolist() == [20] * 7
    validate_data(data)


@pytest.mark.datasets
def test_real_planetoid_citeseer_is_not_the_one_of_the_protocol(data_root):
    info = replace(CPF_CITESEER, name="citeseer")
    with pytest.raises(ValueError, match=r"has 2120 nodes and .* expected 2110 and 3668"):
        largest_component(load_dataset("citeseer", data_root), info)
