"""Loading graphs by name, and checking users' own graphs."""

import pickle
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch
import torch_geometric.datasets
from intruder import Intruder
from torch_geometric.data import Data
from torch_geometric.io import read_npz
from torch_geometric.transforms import LargestConnectedComponents, NormalizeFeatures

import rbm.datasets
from rbm.datasets import load_dataset, num_classes, validate_data
from rbm.datasets.readers import features


def assert_clean_graph(data: Data) -> None:
    edges = set(map(tuple, data.edge_index.t().tolist()))
    assert data.edge_index.dtype == torch.int64
    assert len(edges) == data.num_edges, "duplicate edges"
    assert all((target, source) in edges for source, target in edges), "not symmetric"
    assert all(source != target for source, target in edges), "self-loops"
    assert data.x.dtype == torch.float32
    assert data.y.dtype == torch.int64
    assert int(data.train_mask.sum() + data.val_mask.sum() + data.test_mask.sum()) == int(
        (data.train_mask | data.val_mask | data.test_mask).sum()
    )
    validate_data(data)


def files_below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def write_npz(path: Path, seed: int = 0) -> None:
    """120 nodes of two classes in a ring with chords, and 10 others; a self-loop, one-way edges, counts as features."""
    rng = np.random.default_rng(seed)
    ring = np.arange(120)
    source = np.concatenate([ring, rng.integers(0, 120, 60), np.arange(120, 129), [3]])
    target = np.concatenate([(ring + 1) % 120, rng.integers(0, 120, 60), np.arange(121, 130), [3]])
    order = rng.permutation(130)  # so that the ids of the large component are not the first ones
    adjacency = sp.csr_matrix((np.ones(source.size, np.float32), (order[source], order[target])), (130, 130))
    features = sp.random(130, 7, 0.5, "csr", np.float32, rng, data_rvs=lambda size: rng.integers(1, 9, size))
    path.parent.mkdir(parents=True)
    arrays = {"labels": np.arange(130) % 2}
    for part, matrix in (("adj", adjacency), ("attr", features)):
        fields = {"data": matrix.data, "indices": matrix.indices, "indptr": matrix.indptr, "shape": matrix.shape}
        arrays |= {f"{part}_{key}": value for key, value in fields.items()}
    np.savez(path, **arrays)


def write_planetoid(folder: Path, name: str, *, gap: bool = False) -> None:
    """6 training, 500 validation, 14 other and 20 test nodes (21 ids with ``gap``: CiteSeer's test ids have gaps)."""
    rng = np.random.default_rng(1)
    test_ids = 520 + rng.permutation(20)
    if gap:
        test_ids = np.where(test_ids >= 530, test_ids + 1, test_ids)
    labels = np.eye(3, dtype=np.int32)[np.arange(540) % 3]
    features = sp.random(540, 5, 0.5, "csr", np.float32, rng, data_rvs=lambda size: np.ones(size))
    graph = defaultdict(list, {node: [] for node in range(540 + gap)})
    for node in range(520):
        neighbor = (7 * node + 3) % 520
        graph[node].append(neighbor)
        graph[neighbor].append(node)
    for node in test_ids.tolist():
        graph[node] += [node - 520, node]  # Cora has a few self-loops and duplicates as well
        graph[node - 520] += [node, node]
    parts = {"x": features[:6], "allx": features[:520], "tx": features[520:], "graph": graph}
    parts |= {"y": labels[:6], "ally": labels[:520], "ty": labels[520:]}
    folder.mkdir(parents=True)
    for part, value in parts.items():
        (folder / f"ind.{name}.{part}").write_bytes(pickle.dumps(value, protocol=2))
    (folder / f"ind.{name}.test.index").write_text("".join(f"{node}\n" for node in test_ids))


# Digits


def test_digits_form_and_split():
    data = load_dataset("digits", seed=3)
    assert_clean_graph(data)
    assert data.x.shape == (1797, 64)
    assert (float(data.x.min()), float(data.x.max())) == (0.0, 1.0)
    assert num_classes(data) == data.num_classes == 10
    assert torch.equal(data.y[data.train_mask].bincount(), torch.full((10,), 20))
    assert torch.equal(data.y[data.val_mask].bincount(), torch.full((10,), 30))
    assert int(data.test_mask.sum()) == 1797 - 500


def test_digits_neighbors_are_the_nearest_images():
    data = load_dataset("digits")
    distances = torch.cdist(data.x.double(), data.x.double())
    distances.fill_diagonal_(torch.inf)
    eighth = distances.kthvalue(8, dim=1).values
    source, target = data.edge_index
    # There is an edge only if one end is among the eight nearest of the other ...
    assert bool((distances[source, target] <= torch.maximum(eighth[source], eighth[target]) + 1e-9).all())
    # ... and all images strictly nearer than the eighth are joined.
    joined = torch.zeros_like(distances, dtype=torch.bool)
    joined[source, target] = True
    assert bool(joined[distances < eighth[:, None] - 1e-9].all())


def test_digits_seed_moves_the_split_alone():
    first, again, other = load_dataset("digits", seed=0), load_dataset("digits", seed=0), load_dataset("digits", seed=1)
    legacy = load_dataset("digits", seed=0, split_rng="mt19937")
    assert torch.equal(first.edge_index, other.edge_index)
    assert torch.equal(first.train_mask, again.train_mask)
    assert not torch.equal(first.train_mask, other.train_mask)
    assert not torch.equal(first.train_mask, legacy.train_mask)


# Amazon and Coauthor


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("amazon-photo", "Amazon/Photo/raw/amazon_electronics_photo.npz"),
        ("academic-physics", "Coauthor/Physics/raw/ms_academic_phy.npz"),
        ("academic-cs", "CS/raw/ms_academic_cs.npz"),
    ],
)
def test_npz_graph_equals_pyg_but_for_raw_features(tmp_path, name, file):
    write_npz(tmp_path / file)
    before = files_below(tmp_path)
    data = load_dataset(name, tmp_path)
    binary = load_dataset(name, str(tmp_path), binarize=True)
    assert files_below(tmp_path) == before, "the root was written to"
    expected = LargestConnectedComponents()(read_npz(str(tmp_path / file)))
    assert_clean_graph(data)
    assert data.num_nodes == 120
    assert torch.equal(data.edge_index, expected.edge_index)
    assert torch.equal(data.y, expected.y)
    assert torch.equal(binary.x, expected.x)
    assert torch.equal((data.x > 0).float(), expected.x)
    assert float(data.x.max()) > 1.0
    assert [int(mask.sum()) for mask in (data.train_mask, data.val_mask, data.test_mask)] == [40, 60, 20]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 broken", b"no archive at all"])
def test_corrupt_npz(tmp_path, content):
    path = tmp_path / "Amazon/Photo/raw/amazon_electronics_photo.npz"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"amazon_electronics_photo.npz is not a graph in npz form"):
        load_dataset("photo", tmp_path)


def test_npz_without_labels(tmp_path):
    path = tmp_path / "Amazon/Photo/raw/amazon_electronics_photo.npz"
    write_npz(path)
    with np.load(path) as file:
        arrays = {key: file[key] for key in file.files if key != "labels"}
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match="labels"):
        load_dataset("photo", tmp_path)


def test_undirected_is_refused_for_named_graphs():
    with pytest.raises(ValueError, match="undirected: got True, expected False for digits; only your own graphs"):
        load_dataset("digits", undirected=True)


def test_binarize_is_refused_elsewhere():
    with pytest.raises(ValueError, match="binarize: got True, expected False for digits"):
        load_dataset("digits", binarize=True)


# Planetoid


@pytest.mark.parametrize(("name", "gap"), [("Cora", False), ("CiteSeer", True), ("PubMed", False)])
@pytest.mark.parametrize("layout", ["Planetoid", "."])
def test_planetoid_equals_pyg(tmp_path, name, gap, layout):
    root = tmp_path / "root"
    write_planetoid(root / layout / name / "raw", name.lower(), gap=gap)
    before = files_below(root)
    data = load_dataset(name, root, seed=5)
    assert files_below(root) == before, "the root was written to"

    write_planetoid(tmp_path / "pyg" / name / "raw", name.lower(), gap=gap)
    expected = torch_geometric.datasets.Planetoid(str(tmp_path / "pyg"), name, transform=NormalizeFeatures())[0]
    assert_clean_graph(data)
    for key in ("x", "edge_index", "y", "train_mask", "val_mask", "test_mask"):
        assert torch.equal(data[key], expected[key]), key
    assert [int(mask.sum()) for mask in (data.train_mask, data.val_mask, data.test_mask)] == [6, 500, 20]
    rows = data.x.sum(dim=1)
    assert torch.allclose(rows[rows > 0], torch.ones(())), "features are not row-normalised"


def test_a_processed_file_of_unknown_origin_is_not_opened(tmp_path):
    write_planetoid(tmp_path / "Planetoid/Cora/raw", "cora")
    processed = tmp_path / "Planetoid/Cora/processed"
    processed.mkdir()
    (processed / "data.pt").write_bytes(b"not a tensor")
    assert load_dataset("cora", tmp_path).num_nodes == 540


def test_a_planetoid_pickle_cannot_run_code(tmp_path):
    write_planetoid(tmp_path / "Planetoid/Cora/raw", "cora")
    (tmp_path / "Planetoid/Cora/raw/ind.cora.graph").write_bytes(pickle.dumps(Intruder(tmp_path / "intruded")))
    with pytest.raises(ValueError, match=r"ind\.cora\.graph is not a Planetoid file: it asks for pathlib"):
        load_dataset("cora", tmp_path)
    assert not (tmp_path / "intruded").exists()


def test_truncated_planetoid_file(tmp_path):
    write_planetoid(tmp_path / "Planetoid/Cora/raw", "cora")
    path = tmp_path / "Planetoid/Cora/raw/ind.cora.allx"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"ind\.cora\.allx is not a Planetoid file"):
        load_dataset("cora", tmp_path)


def test_planetoid_files_that_do_not_fit_together(tmp_path):
    write_planetoid(tmp_path / "Planetoid/Cora/raw", "cora")
    (tmp_path / "Planetoid/Cora/raw/ind.cora.test.index").write_text("9999\n")
    with pytest.raises(ValueError, match="do not fit together"):
        load_dataset("cora", tmp_path)


# Roots and downloads


def test_no_root():
    with pytest.raises(ValueError, match=r"root: got None, .*Planetoid/Cora/raw \(--root FOLDER\).*'digits'"):
        load_dataset("cora")


def test_missing_root(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"root: the folder .*nowhere does not exist.*Amazon/Photo/raw.*download"
    ):
        load_dataset("photo", tmp_path / "nowhere")


def test_missing_raw_files_are_named(tmp_path):
    write_planetoid(tmp_path / "Planetoid/Cora/raw", "cora")
    (tmp_path / "Planetoid/Cora/raw/ind.cora.tx").unlink()
    with pytest.raises(FileNotFoundError, match=re.escape("Planetoid/Cora/raw lacks ind.cora.tx; cora expects")):
        load_dataset("cora", tmp_path)


def test_download_only_when_asked(tmp_path, monkeypatch):
    calls = []

    def download(dataset):
        calls.append(dataset.raw_dir)
        Path(dataset.raw_dir).rmdir()  # created by PyG
        write_npz(Path(dataset.raw_paths[0]))

    monkeypatch.setattr(torch_geometric.datasets.Amazon, "download", download)
    with pytest.raises(FileNotFoundError):
        load_dataset("photo", tmp_path)
    assert calls == []
    assert load_dataset("photo", tmp_path, download=True).num_nodes == 120
    assert load_dataset("photo", tmp_path, download=True).num_nodes == 120
    assert calls == [str(tmp_path / "Amazon/Photo/raw")]


def test_a_download_that_pyg_cannot_process(tmp_path, monkeypatch):
    """The reader of the raw files says which of them is wrong."""

    def download(dataset):
        Path(dataset.raw_paths[0]).write_bytes(b"<html>busy</html>")

    monkeypatch.setattr(torch_geometric.datasets.Amazon, "download", download)
    with pytest.raises(ValueError, match=r"photo.npz is not a graph .*Fetch the original file again"):
        load_dataset("photo", tmp_path, download=True)


def test_failed_download(tmp_path, monkeypatch):
    def download(dataset):
        raise OSError("no route to host")

    monkeypatch.setattr(torch_geometric.datasets.Amazon, "download", download)
    with pytest.raises(RuntimeError, match=r"could not fetch amazon-photo .*no route to host.*by hand"):
        load_dataset("photo", tmp_path, download=True)


# The real graphs


@pytest.mark.datasets
@pytest.mark.parametrize(
    ("name", "nodes", "edges", "features", "classes", "sizes"),
    [
        ("cora", 2708, 10556, 1433, 7, (140, 500, 1000)),
        ("citeseer", 3327, 9104, 3703, 6, (120, 500, 1000)),
        ("amazon-photo", 7487, 238086, 745, 8, (160, 240, 7087)),
        ("amazon-computers", 13381, 491556, 767, 10, (200, 300, 12881)),
        ("academic-cs", 18333, 163788, 6805, 15, (300, 450, 17583)),
        ("academic-physics", 34493, 495924, 8415, 5, (100, 150, 34243)),
    ],
)
def test_real_graph(data_root, name, nodes, edges, features, classes, sizes):
    data = load_dataset(name, data_root)
    assert_clean_graph(data)
    assert (data.num_nodes, data.num_edges, data.num_features, data.num_classes) == (nodes, edges, features, classes)
    assert tuple(int(mask.sum()) for mask in (data.train_mask, data.val_mask, data.test_mask)) == sizes


@pytest.mark.datasets
def test_real_coauthor_features_are_counts(data_root):
    assert float(load_dataset("cs", data_root).x.values().max()) == 105.0
    assert float(load_dataset("cs", data_root, binarize=True).x.values().max()) == 1.0


@pytest.mark.datasets
def test_real_coauthor_features_stay_sparse(data_root):
    physics = load_dataset("physics", data_root)
    assert physics.x.layout == torch.sparse_csr
    assert physics.x.values().numel() == 1_137_311


def test_sparse_features_are_the_dense_ones(tmp_path):
    write_npz(tmp_path / "Amazon" / "Photo" / "raw" / "amazon_electronics_photo.npz")
    write_planetoid(tmp_path / "Planetoid" / "Cora" / "raw", "cora")
    for name, binarize in (("photo", False), ("photo", True), ("cora", False), ("digits", False)):
        dense, sparse = (
            load_dataset(name, tmp_path, binarize=binarize, sparse_features=choice) for choice in ("never", "always")
        )
        assert dense.x.layout == torch.strided
        assert sparse.x.layout == torch.sparse_csr
        assert torch.equal(sparse.x.to_dense(), dense.x)
        assert sparse.num_features == dense.num_features
        validate_data(sparse)
        assert load_dataset(name, tmp_path).x.layout == torch.strided, "small"


def test_auto_takes_large_features_of_few_entries(monkeypatch):
    x = torch.zeros(100, 50)
    x[:, 3] = 1.0
    assert features.pack_features(x) is x
    monkeypatch.setattr(features, "MIN_SPARSE_NUMEL", 5000)
    assert features.pack_features(x).layout == torch.sparse_csr
    assert features.pack_features(features.as_csr(x)).layout == torch.sparse_csr
    x[0, 4] = 1.0
    assert features.pack_features(x) is x, "101 of 5,000 are more than one in fifty"
    assert torch.equal(features.pack_features(features.as_csr(x)), x)
    for load in (load_dataset, rbm.load_graph):
        with pytest.raises(ValueError, match="sparse_features: got 'yes', expected one of auto, always, never"):
            load("digits", sparse_features="yes")


def test_float16_features_of_few_entries_become_csr(monkeypatch):
    x = torch.zeros(100, 50, dtype=torch.float16)
    x[::7, 3] = 1.5
    monkeypatch.setattr(features, "_NUMBERS_AT_ONCE", 1000)
    packed = features.pack_features(x, "always")
    assert packed.layout == torch.sparse_csr
    assert packed.dtype == torch.float32
    assert torch.equal(packed.to_dense(), x.float())
