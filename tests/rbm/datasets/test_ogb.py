"""The Open Graph Benchmark's layout on disk: small graphs, and damaged files."""

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch_geometric.data

from rbm.datasets import DATASETS, load_dataset, unseen_fraction, validate_data
from rbm.datasets.readers import text

SPLITS = {"ogbn-arxiv": "time", "ogbn-products": "sales_ranking"}
FOLDERS = {name: name.replace("-", "_") for name in SPLITS}
NODES = 12
# A duplicate, an edge in both directions, a self-loop; node 11 is isolated.
EDGES = [[0, 1], [0, 1], [1, 2], [2, 1], [5, 5], [9, 3], [10, 4], [4, 0], [8, 7], [7, 6]]
UNDIRECTED = sorted({(a, b) for edge in EDGES for a, b in (edge, edge[::-1]) if a != b})
SPLIT = {"train": [3, 0, 7, 1], "valid": [2, 11], "test": [4, 5, 6, 8, 9]}
FEATURES = np.random.default_rng(0).normal(size=(NODES, 3)).astype(np.float32)
LABELS = [0, 3, 1, 2, 0, 3, 1, 2, 0, 3, 1, 2]


def write(path: Path, rows: list) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (",".join(map(str, np.atleast_1d(row).tolist())) for row in rows)
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode()))


def write_ogb(root: Path, name: str, *, folder: str = "") -> Path:
    """Write OGB's files for the graph above, and return its folder."""
    folder = root / (folder or FOLDERS[name])
    write(folder / "raw/edge.csv.gz", EDGES)
    write(folder / "raw/node-feat.csv.gz", list(FEATURES))
    write(folder / "raw/node-label.csv.gz", LABELS)
    write(folder / "raw/num-node-list.csv.gz", [NODES])
    write(folder / "raw/num-edge-list.csv.gz", [len(EDGES)])
    for part, ids in SPLIT.items():
        write(folder / f"split/{SPLITS[name]}/{part}.csv.gz", ids)
    return folder


def edges_of(data) -> list[tuple[int, int]]:
    return [tuple(edge) for edge in data.edge_index.t().tolist()]


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("protocol", ["rbm", "cpf"])
def test_graph(tmp_path, name, protocol):
    write_ogb(tmp_path, name)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    data = load_dataset(name, tmp_path, protocol=protocol, seed=3)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before, "the root was written to"
    assert edges_of(data) == UNDIRECTED
    assert np.array_equal(data.x.numpy(), FEATURES)
    assert data.y.tolist() == LABELS
    assert data.num_classes == 4
    assert data.num_nodes == NODES, "with the node that no edge touches"
    for mask, part in zip(("train_mask", "val_mask", "test_mask"), SPLIT, strict=True):
        assert data[mask].nonzero().flatten().tolist() == sorted(SPLIT[part])
    assert (data.x.dtype, data.y.dtype, data.edge_index.dtype) == (torch.float32, torch.int64, torch.int64)
    validate_data(data)
    assert unseen_fraction(name, protocol) == 0.2


@pytest.mark.parametrize("name", SPLITS)
def test_duplicates_on_request(tmp_path, name):
    write_ogb(tmp_path, name)
    data = load_dataset(name, tmp_path, keep_duplicates=True)
    assert edges_of(data) == [tuple(edge) for edge in EDGES] + [tuple(edge[::-1]) for edge in EDGES]
    validate_data(data)
    with pytest.raises(ValueError, match="keep_duplicates: got True, expected False for digits; only ogbn graphs"):
        load_dataset("digits", keep_duplicates=True)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_files_longer_than_a_chunk(tmp_path, monkeypatch, chunk):
    write_ogb(tmp_path, "ogbn-arxiv")
    whole = load_dataset("arxiv", tmp_path)
    monkeypatch.setattr(text, "CHUNK_BYTES", chunk)
    data = load_dataset("arxiv", tmp_path)
    assert all(torch.equal(data[key], whole[key]) for key in ("x", "edge_index", "y", "train_mask", "test_mask"))


@pytest.mark.parametrize("name", SPLITS)
def test_a_folder_that_ogbs_pyg_class_made(tmp_path, name):
    write_ogb(tmp_path, name, folder=f"{FOLDERS[name]}_pyg")
    assert load_dataset(name, tmp_path).num_nodes == NODES


def test_options(tmp_path):
    write_ogb(tmp_path, "ogbn-arxiv")
    data = load_dataset("ogbn_arxiv", tmp_path, sparse_features="always")
    assert data.x.layout == torch.sparse_csr
    rows = load_dataset("arxiv", tmp_path, normalize_features=True).x.sum(dim=1)
    assert not torch.allclose(rows, torch.from_numpy(FEATURES).sum(dim=1))
    with pytest.raises(ValueError, match="binarize: got True, expected False for ogbn-arxiv"):
        load_dataset("arxiv", tmp_path, binarize=True)


def test_missing_files_are_named(tmp_path):
    folder = write_ogb(tmp_path, "ogbn-products")
    (folder / "raw/edge.csv.gz").unlink()
    (folder / "split/sales_ranking/valid.csv.gz").unlink()
    message = "ogbn_products lacks raw/edge.csv.gz, split/sales_ranking/valid.csv.gz; ogbn-products expects"
    with pytest.raises(FileNotFoundError, match=f"{re.escape(message)} the raw files of OGB's layout"):
        load_dataset("products", tmp_path)


EDGE, FEATURE, LABEL = "raw/edge.csv.gz", "raw/node-feat.csv.gz", "raw/node-label.csv.gz"
TRAIN, VALID = "split/time/train.csv.gz", "split/time/valid.csv.gz"
ROWS = {
    "edge outside": (EDGE, [*EDGES[:-1], [0, NODES]], "holds node ids from 0 to 12, expected 0 to 11; it is corrupt"),
    "edge negative": (EDGE, [*EDGES[:-1], [0, -1]], "holds node ids from -1 to 10, expected 0 to 11"),
    "edges too few": (EDGE, EDGES[:-1], "has 9 lines, expected 10; is it cut short"),
    "edges too many": (EDGE, [*EDGES, [0, 1]], "has more than the 10 lines expected"),
    "edges in threes": (EDGE, [[*edge, 1] for edge in EDGES], "line 1 has 3 columns, expected 2"),
    "edges ragged": (EDGE, [[0, 1], [2], [3, 4, 5], *EDGES[3:]], "lines 1 to 10 do not all hold 2 numbers"),
    "edges not whole": (EDGE, [[0, 0.5], *EDGES[1:]], "lines 1 to 10 hold something else than int64 numbers"),
    "edges none": (EDGE, [], "has 0 lines, expected 10"),
    "features too few": (FEATURE, list(FEATURES[:-1]), "has 11 lines, expected 12"),
    "features ragged": (FEATURE, [*FEATURES[:-1], [1.0, 2.0]], "lines 1 to 12 do not all hold 3 numbers"),
    "features text": (FEATURE, [["a", "b", "c"]] * NODES, "line 1 is 'a,b,c', expected numbers"),
    "labels too few": (LABEL, LABELS[:-1], "has 11 lines, expected 12"),
    "labels in pairs": (LABEL, [[0, 1]] * NODES, "line 1 has 2 columns, expected 1"),
    "labels negative": (LABEL, [-1, *LABELS[1:]], "holds the class -1, expected numbers from 0"),
    "labels unknown": (LABEL, ["nan", *LABELS[1:]], "hold something else than int64 numbers"),
    "two counts": ("raw/num-node-list.csv.gz", [NODES, NODES], "has more than the 1 lines expected"),
    "no count": ("raw/num-edge-list.csv.gz", [], "has 0 lines, expected 1"),
    "split outside": (TRAIN, [0, NODES], "holds node ids from 0 to 12, expected 0 to 11"),
    "split repeats": (TRAIN, [0, 1, 0], "names a node twice, or one that another part of the split has"),
    "split overlaps": (VALID, [2, 3], "names a node twice, or one that another part of the split has"),
}


@pytest.mark.parametrize("keep_duplicates", [False, True])
@pytest.mark.parametrize("fault", ROWS)
def test_wrong_rows(tmp_path, fault, keep_duplicates):
    file, rows, message = ROWS[fault]
    write(write_ogb(tmp_path, "ogbn-arxiv") / file, rows)
    with pytest.raises(ValueError, match=f"{re.escape(file)} .*{message}"):
        load_dataset("arxiv", tmp_path, keep_duplicates=keep_duplicates)


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def overwritten(content: bytes) -> bytes:
    return content[:12] + bytes(byte ^ 0x5A for byte in content[12:30]) + content[30:]


@pytest.mark.parametrize("file", DATASETS["ogbn-arxiv"].raw_files)
@pytest.mark.parametrize("broken", [cut, overwritten, gzip.decompress], ids=["cut", "overwritten", "not compressed"])
def test_broken_files(tmp_path, file, broken):
    path = write_ogb(tmp_path, "ogbn-arxiv") / file
    path.write_bytes(broken(path.read_bytes()))
    with pytest.raises(ValueError, match=f"{re.escape(file)} is no table of numbers: "):
        load_dataset("arxiv", tmp_path)


def test_download_unpacks_the_archive(tmp_path, monkeypatch):
    urls = []

    def download(url, folder, log):
        urls.append(url)
        return str(Path(folder) / "arxiv.zip")

    def extract(archive, folder, log):
        write_ogb(Path(folder), "ogbn-arxiv", folder="arxiv")

    monkeypatch.setattr(torch_geometric.data, "download_url", download)
    monkeypatch.setattr(torch_geometric.data, "extract_zip", extract)
    with pytest.raises(FileNotFoundError):
        load_dataset("arxiv", tmp_path)
    for _ in range(2):
        assert load_dataset("arxiv", tmp_path, download=True).num_nodes == NODES
    assert urls == ["https://snap.stanford.edu/ogb/data/nodeproppred/arxiv.zip"]
    assert [path.name for path in tmp_path.iterdir()] == ["ogbn_arxiv"], "nothing else is left"


def test_download_leaves_a_folder_that_lacks_files(tmp_path, monkeypatch):
    folder = write_ogb(tmp_path, "ogbn-arxiv")
    (folder / EDGE).unlink()
    urls = []
    monkeypatch.setattr(torch_geometric.data, "download_url", lambda url, *args, **options: urls.append(url))
    with pytest.raises(RuntimeError, match=r"could not fetch ogbn-arxiv .*exists but lacks files; move it away first"):
        load_dataset("arxiv", tmp_path, download=True)
    assert not (folder / EDGE).exists()
    assert not urls, "gigabytes were fetched for nothing"


def test_a_download_that_is_cut_short(tmp_path, monkeypatch):
    def download(url, folder, log):
        path = Path(folder) / "arxiv.zip"
        path.write_bytes(b"PK\x03\x04")
        return str(path)

    monkeypatch.setattr(torch_geometric.data, "download_url", download)
    with pytest.raises(RuntimeError, match=r"could not fetch ogbn-arxiv .*File is not a zip file.*by hand"):
        load_dataset("arxiv", tmp_path, download=True)
    assert not list(tmp_path.iterdir())


def test_two_downloads_at_once(tmp_path, monkeypatch):
    def extract(archive, folder, log):
        write_ogb(Path(folder), "ogbn-arxiv", folder="arxiv")
        write_ogb(tmp_path, "ogbn-arxiv")  # by another process, which was faster

    monkeypatch.setattr(torch_geometric.data, "download_url", lambda url, folder, log: "arxiv.zip")
    monkeypatch.setattr(torch_geometric.data, "extract_zip", extract)
    assert load_dataset("arxiv", tmp_path, download=True).num_nodes == NODES
    assert sorted(path.name for path in (tmp_path / "ogbn_arxiv").iterdir()) == ["raw", "split"]


@pytest.mark.parametrize(
    ("file", "rows", "message"),
    [
        ("raw/num-node-list", [10**12], r"node-feat\.csv\.gz has too few bytes for the 1000000000000 lines expected"),
        ("raw/num-node-list", [-3], r"num-node-list\.csv\.gz says -3, expected at least 1"),
        ("raw/num-edge-list", [0], r"num-edge-list\.csv\.gz says 0, expected at least 1"),
        ("raw/node-label", [10**12, *LABELS[1:]], r"node-label\.csv\.gz holds the class number 1000000000000"),
    ],
)
def test_numbers_that_ask_for_all_memory(tmp_path, file, rows, message):
    write(write_ogb(tmp_path, "ogbn-arxiv") / f"{file}.csv.gz", rows)
    with pytest.raises(ValueError, match=message):
        load_dataset("ogbn-arxiv", tmp_path)


def test_a_line_without_an_end_is_not_read_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "CHUNK_BYTES", 64)
    monkeypatch.setattr(text, "_LONGEST_LINE", 1000)
    folder = write_ogb(tmp_path, "ogbn-arxiv")
    (folder / "raw/edge.csv.gz").write_bytes(gzip.compress(b" " * 10**6))
    with pytest.raises(ValueError, match="it holds a line of more than 1000 bytes"):
        load_dataset("ogbn-arxiv", tmp_path)
