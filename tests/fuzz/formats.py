"""Every file format that the package reads: a small valid file, and its reader.

A format's ``make`` fills an empty folder; ``target`` is the file in it that is mutated; ``read`` returns the content as
an object whose ``repr`` distinguishes contents. ``sealed`` formats have checksums: a file that can be read must have
its original content.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import public_graphs
import scipy.sparse as sp
import torch
from small_graph import CLASSES, F, N, arrays, dense, edges, sparse, tensors

ROOT = Path(__file__).parent.parent.parent
RUNS = ROOT / "tests" / "rbm" / "runs_of_0_1_0"
EXPERIMENT = ROOT / "experiments" / "searches" / "batches.yaml"


@dataclass(frozen=True)
class Format:
    """A file format, see the module's docstring."""

    target: str
    make: Callable[[Path], None]
    read: Callable[[Path], Any]
    sealed: bool = False


# Graphs


def _graph(path: Path) -> Any:
    from rbm.datasets import load_graph, validate_data

    data = load_graph(path)
    validate_data(data)
    return data.x.sum(), data.edge_index.sum(), data.y.sum(), data.num_classes


def _graph_folder(save: Callable[[Path, np.ndarray], None], ending: str, part: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for name, array in arrays().items():
            np.save(folder / f"{name}.npy", array)
        (folder / f"{part}.npy").unlink()
        save(folder / f"{part}{ending}", arrays()[part])

    return make


def _save_parquet(path: Path, array: np.ndarray) -> None:
    import pyarrow
    from pyarrow import parquet

    columns = {f"c{i}": column for i, column in enumerate(np.atleast_2d(array.T))}
    parquet.write_table(pyarrow.table(columns), path)


def _save_lists(path: Path, array: np.ndarray) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"x": list(array)}), path)


def _save_csv(path: Path, array: np.ndarray) -> None:
    np.savetxt(path, array.T if array.shape[0] == 2 else array, delimiter=",", fmt="%g", header="a,b", comments="")


def _save_pt(folder: Path) -> None:
    torch.save(tensors(), folder / "graph.pt")


def _save_data(folder: Path) -> None:
    from torch_geometric.data import Data

    torch.save(Data(**tensors()), folder / "graph.pt")


def _save_csr_pt(folder: Path) -> None:
    torch.save(tensors() | {"x": torch.from_numpy(dense()).to_sparse_csr()}, folder / "graph.pt")


def _save_old_pt(folder: Path) -> None:
    torch.save(tensors(), folder / "graph.pt", _use_new_zipfile_serialization=False)


def _save_graph_npz(folder: Path) -> None:
    np.savez_compressed(folder / "graph.npz", **arrays())


def _save_graph_sparse(folder: Path) -> None:
    matrix, rest = sparse(), arrays()
    del rest["x"]
    fields = {"data": matrix.data, "indices": matrix.indices, "indptr": matrix.indptr, "shape": matrix.shape}
    np.savez(folder / "graph.npz", **fields, **rest)


# Features and neighbours


def _features(path: Path) -> Any:
    from rbm.nn.sparse_rows import to_dense
    from rbm.serving.feature_files import open_features

    return [to_dense(part).sum() for part in open_features(path, F).pieces()]


def _matrix(kind: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        options = {"blocksize": (2, 2)} if kind == "bsr" else {}
        sp.save_npz(folder / "x.npz", getattr(sp, f"{kind}_matrix")(sparse().toarray(), **options))

    return make


def _neighbors(path: Path) -> Any:
    from rbm.serving.neighbors import Neighbors

    found = Neighbors(path, torch.ones(N, 4), N)
    answer = found.encodings(0, N).sum()
    found.check_rows(N)
    return answer


# Saved students, and other files of a run


def _student() -> torch.nn.Module:
    from rbm import RbMStudent

    torch.manual_seed(0)
    return RbMStudent(F, 8, CLASSES, num_experts=4, top_k=2).eval()


def _make_run(folder: Path) -> None:
    from rbm.config import Config
    from rbm.training.run_folder import RunFolder, SavedStudent, save_students

    run = RunFolder(folder, Config())
    run.save_phase("rbm", _student(), {"epochs": 3, "val_accuracy": 0.5})
    run.save_tensors("encodings", {"encodings": torch.from_numpy(dense())})
    save_students(folder, "rbm", {"rbm": SavedStudent(_student(), "encodings")})
    for epoch in range(4):
        run.append_metrics({"phase": "rbm", "epoch": epoch, "loss": 0.5})
    run.save_checkpoint({"phase": "mlp", "epoch": 3, "model": _student().state_dict(), "rng": torch.get_rng_state()})


def _make_hub(folder: Path) -> None:
    from rbm.nn.saved_student import describe
    from rbm.utils.files import write_json
    from rbm.utils.tensor_files import sealed

    write_json(folder / "config.json", describe(_student()))
    (folder / "model.safetensors").write_bytes(sealed(_student().state_dict()))


def _make_old_run(folder: Path) -> None:
    shutil.copytree(RUNS / "finished", folder, dirs_exist_ok=True)


def _load(path: Path) -> Any:
    import rbm

    student = rbm.load(path.parent)
    with torch.inference_mode():
        return student(torch.linspace(-1, 1, 4 * student.in_channels).reshape(4, -1)).tolist()


def _result(path: Path) -> Any:
    from rbm.training.run_folder import RunFolder, load_weights

    run = object.__new__(RunFolder)
    run.path = path.parent
    student = _student()
    load_weights(student, path)
    return run.finished("rbm"), [tensor.sum() for tensor in student.state_dict().values()]


def _checkpoint(path: Path) -> Any:
    from rbm.training.run_folder import RunFolder

    run = object.__new__(RunFolder)
    run.path = path.parent
    state = run.load_checkpoint()
    return state["phase"], state["epoch"], [tensor.double().sum() for tensor in state["model"].values()]


def _encodings(path: Path) -> Any:
    from rbm.training.run_folder import load_encodings

    return load_encodings(path.parent).tolist()


def _metrics(path: Path) -> Any:
    from rbm.training.run_folder import read_metrics

    return [(record["phase"], record["epoch"] < 3) for record in read_metrics(path.parent)]


def _listed(path: Path) -> Any:
    from rbm.training.run_files import listed_files

    return listed_files(path.parent)


def _make_cache(folder: Path) -> None:
    from rbm.utils.cache import Cache

    Cache(folder).tensors_with_values("deepwalk", {}, [], lambda: ({"x": torch.from_numpy(dense())}, {"a": 1}))
    next(folder.glob("deepwalk-*")).rename(folder / "cached.safetensors")


def _cache(path: Path) -> Any:
    """A damaged file counts as missing, so the result is always returned."""
    from rbm.utils.cache import Cache
    from rbm.utils.tensor_files import fingerprint

    path.rename(path.parent / f"deepwalk-{fingerprint('deepwalk', {}, [])}.safetensors")
    tensors, values = Cache(path.parent).tensors_with_values(
        "deepwalk", {}, [], lambda: ({"x": torch.from_numpy(dense())}, {"a": 1})
    )
    return tensors["x"].tolist(), values


def _make_released(folder: Path) -> None:
    state = {}
    for i, (fan_in, fan_out) in enumerate(((F, 8), (8, CLASSES))):
        state |= {
            f"layers.{i}.routing_memory": torch.rand(4, fan_in),
            f"layers.{i}.temperature": torch.rand(1),
            f"layers.{i}.const_attention": torch.rand(4, fan_in),
        }
        for e in range(4):
            state[f"layers.{i}.experts.{e}.1.weight"] = torch.rand(fan_out, fan_in)
            state[f"layers.{i}.experts.{e}.1.bias"] = torch.rand(fan_out)
    torch.save(state, folder / "released.pt")


def _released(path: Path) -> Any:
    import rbm

    return rbm.load_released(path, top_k=2)(torch.ones(2, F)).sum()


# Text


def _config(path: Path) -> Any:
    from rbm.config import Config

    return Config.from_yaml(path)


def _make_config(folder: Path) -> None:
    from rbm.config import Config

    (folder / "own.yaml").write_text(Config().to_yaml())


def _experiment(path: Path) -> Any:
    from rbm.experiments.experiment import Experiment

    return Experiment.from_yaml(path)


def _search_rows(path: Path) -> Any:
    from rbm.experiments.results import read_rows

    return read_rows(path)


def _make_rows(folder: Path) -> None:
    from rbm.experiments.results import ACCURACIES, COLUMNS

    numbers = {"seed": "{}", **dict.fromkeys(ACCURACIES, "0.9{}")}
    rows = [",".join(numbers.get(name, name + "{}").format(i) for name in COLUMNS) for i in range(3)]
    (folder / "rows.csv").write_text("\n".join([",".join(COLUMNS), *rows]) + "\n")


def _planetoid(part: str) -> Format:
    return Format(f"Planetoid/Cora/raw/ind.cora.{part}", public_graphs.make_planetoid, public_graphs.read("cora"))


FORMATS: dict[str, Format] = {
    "graph.npz": Format("graph.npz", _save_graph_npz, _graph),
    "graph-sparse.npz": Format("graph.npz", _save_graph_sparse, _graph),
    "graph.pt": Format("graph.pt", _save_pt, _graph),
    "graph-data.pt": Format("graph.pt", _save_data, _graph),
    "graph-csr.pt": Format("graph.pt", _save_csr_pt, _graph),
    "graph-old.pt": Format("graph.pt", _save_old_pt, _graph),
    "graph-x.npy": Format("x.npy", _graph_folder(np.save, ".npy", "x"), lambda path: _graph(path.parent)),
    "graph-edges.npy": Format(
        "edge_index.npy", _graph_folder(np.save, ".npy", "edge_index"), lambda path: _graph(path.parent)
    ),
    "graph-edges.csv": Format(
        "edge_index.csv", _graph_folder(_save_csv, ".csv", "edge_index"), lambda path: _graph(path.parent)
    ),
    "graph-x.parquet": Format(
        "x.parquet", _graph_folder(_save_parquet, ".parquet", "x"), lambda path: _graph(path.parent)
    ),
    "features.npy": Format("x.npy", lambda folder: np.save(folder / "x.npy", dense()), _features),
    "features.npz": Format("x.npz", lambda folder: np.savez(folder / "x.npz", x=dense()), _features),
    "features.csv": Format("x.csv", lambda folder: _save_csv(folder / "x.csv", dense()), _features),
    "features.parquet": Format("x.parquet", lambda folder: _save_parquet(folder / "x.parquet", dense()), _features),
    "features-lists.parquet": Format("x.parquet", lambda folder: _save_lists(folder / "x.parquet", dense()), _features),
    **{
        f"features-{kind}.npz": Format("x.npz", _matrix(kind), _features)
        for kind in ("csr", "csc", "bsr", "coo", "dia")
    },
    "neighbors.npy": Format("n.npy", lambda folder: np.save(folder / "n.npy", edges().T), _neighbors),
    "neighbors.csv": Format(
        "n.csv", lambda folder: np.savetxt(folder / "n.csv", edges().T, fmt="%d", delimiter=","), _neighbors
    ),
    "student-weights": Format("rbm.safetensors", _make_run, _load, sealed=True),
    "student.json": Format("student.json", _make_run, _load, sealed=True),
    "hub-weights": Format("model.safetensors", _make_hub, _load, sealed=True),
    "hub-config.json": Format("config.json", _make_hub, _load, sealed=True),
    "old-weights": Format("rbm.safetensors", _make_old_run, _load),
    "old-student.json": Format("student.json", _make_old_run, _load),
    "phase": Format("rbm.safetensors", _make_run, _result, sealed=True),
    "encodings": Format("encodings.safetensors", _make_run, _encodings),
    "run.json": Format("run.json", _make_run, _listed),
    "metrics.jsonl": Format("metrics.jsonl", _make_run, _metrics),
    "config.yaml": Format("own.yaml", _make_config, _config),
    "checkpoint": Format("checkpoint.pt", _make_run, _checkpoint, sealed=True),
    "checkpoint-forged": Format("checkpoint.pt", _make_run, _checkpoint),
    "cache": Format("cached.safetensors", _make_cache, _cache, sealed=True),
    "released.pt": Format("released.pt", _make_released, _released),
    "experiment.yaml": Format("paper.yaml", lambda folder: shutil.copy(EXPERIMENT, folder / "paper.yaml"), _experiment),
    "rows.csv": Format("rows.csv", _make_rows, _search_rows),
    **{f"planetoid-{part}": _planetoid(part) for part in ("x", "allx", "ty", "graph", "test.index")},
    "amazon.npz": Format(
        "Amazon/Photo/raw/amazon_electronics_photo.npz", public_graphs.make_amazon, public_graphs.read("photo")
    ),
    **{
        f"citeseer-{file}": Format(
            f"AttributedGraphDataset/citeseer/raw/{file}",
            public_graphs.make_citeseer,
            public_graphs.read("citeseer", protocol="cpf"),
        )
        for file in ("attrs.npz", "edgelist.txt", "labels.txt")
    },
    **{
        f"ogb-{file}": Format(f"ogbn_arxiv/{file}.csv.gz", public_graphs.make_ogb, public_graphs.read("ogbn-arxiv"))
        for file in ("raw/edge", "raw/num-node-list", "split/time/train")
    },
}
