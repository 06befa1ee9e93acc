"""Small files in the form of the public graphs' raw files."""

import gzip
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from small_graph import CLASSES, N, dense, edges, sparse


def make_planetoid(folder: Path) -> None:
    raw = folder / "Planetoid/Cora/raw"
    raw.mkdir(parents=True)
    nodes = 560  # PyG uses the 500 nodes after the training nodes for validation
    one_hot = np.eye(CLASSES, dtype=np.int32)[np.arange(nodes) % CLASSES]
    x = sp.csr_matrix(np.tile(sparse().toarray(), (14, 1)))
    content = {"x": x[:6], "tx": x[550:], "allx": x[:550], "y": one_hot[:6], "ty": one_hot[550:], "ally": one_hot[:550]}
    content["graph"] = {i: [(i + 1) % nodes, (i + 2) % nodes] for i in range(nodes)}
    for name, value in content.items():
        (raw / f"ind.cora.{name}").write_bytes(pickle.dumps(value, protocol=2))
    (raw / "ind.cora.test.index").write_text("".join(f"{i}\n" for i in range(550, nodes)))


def make_amazon(folder: Path) -> None:
    raw = folder / "Amazon/Photo/raw"
    raw.mkdir(parents=True)
    arrays = {"labels": np.repeat(np.arange(2), 60)}
    adjacency = sp.csr_matrix((np.ones(120), (np.arange(120), (np.arange(120) + 1) % 120)), (120, 120))
    features = sp.csr_matrix(np.tile(sparse().toarray(), (3, 1)))
    for part, matrix in (("adj", adjacency), ("attr", features)):
        fields = {"data": matrix.data, "indices": matrix.indices, "indptr": matrix.indptr, "shape": matrix.shape}
        arrays |= {f"{part}_{key}": value for key, value in fields.items()}
    np.savez(raw / "amazon_electronics_photo.npz", **arrays)


def make_citeseer(folder: Path) -> None:
    raw = folder / "AttributedGraphDataset/citeseer/raw"
    raw.mkdir(parents=True)
    sp.save_npz(raw / "attrs.npz", sparse())
    (raw / "edgelist.txt").write_text("".join(f"{a} {b}\n" for a, b in edges().T))
    (raw / "labels.txt").write_text("".join(f"{i}\t{i % CLASSES}\n" for i in range(N)))


def make_ogb(folder: Path) -> None:
    files = {
        "raw/edge": "".join(f"{a},{b}\n" for a, b in edges().T),
        "raw/node-feat": "".join(",".join(map(str, row)) + "\n" for row in dense().round(3)),
        "raw/node-label": "".join(f"{i % CLASSES}\n" for i in range(N)),
        "raw/num-node-list": f"{N}\n",
        "raw/num-edge-list": f"{N}\n",
    }
    splits = {"train": range(10), "valid": range(10, 20), "test": range(20, 40)}
    files |= {f"split/time/{name}": "".join(f"{i}\n" for i in ids) for name, ids in splits.items()}
    for name, text in files.items():
        path = folder / "ogbn_arxiv" / f"{name}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()))


def read(name: str, **options) -> Callable[[Path], Any]:
    def load(path: Path) -> Any:
        from rbm.datasets.load import _info, _read
        from rbm.datasets.validation import check_class_numbers

        root = next(parent for parent in path.parents if parent.name == "case")
        info = _info(name, options.get("protocol", "rbm"))
        data = _read(info, root, binarize=False, keep_duplicates=False, download=False)
        check_class_numbers("y", data.y)
        return data.x.shape, data.edge_index.sum(), data.y.sum()

    return load
