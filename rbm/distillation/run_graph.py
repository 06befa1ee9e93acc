"""The graph of a run: its name, and how it is saved and loaded after the run."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from rbm.config import Config
from rbm.datasets import num_classes
from rbm.datasets.load import load_configured_dataset
from rbm.datasets.readers.node_ids import FILE, INPUTS, NodeIds
from rbm.datasets.registry import absolute_name, find_dataset, is_path
from rbm.datasets.splits import GraphSplit, split_for
from rbm.datasets.validation import MASKS
from rbm.distillation.result_files import read_results
from rbm.teachers.prepare import build_configured_teacher
from rbm.training.run_folder import RunFolder, load_weights
from rbm.utils.files import absolute, check_utf8, read_json
from rbm.utils.progress import Progress
from rbm.utils.tensor_files import fingerprint, read_sealed

OWN_GRAPH = "own graph"  # name of a graph without a name
GRAPH = "graph.safetensors"
MOST_BYTES = 2**28  # size of the largest graph that is saved in a run folder
_PARTS = ("edge_index", "y", *MASKS, "teacher_logits")
_NUMBERS = ("num_classes", "unseen_fraction")
_CSR = ("x_crow", "x_col", "x_values")


def named_after_graph(config: Config, data: Data, resumed: Path | str | None) -> Config:
    """The configuration with the name of the given graph if its ``dataset`` is the default. Paths of existing files
    become absolute, so that a run folder can be used from any working directory.

    Args:
        config: configuration of the run.
        data: the graph; ``data.name`` is its name, if present.
        resumed: folder of the run that is resumed. Earlier versions gave every graph the default name.

    Raises:
        ValueError: the name, which results show, is not UTF-8.
    """
    name, what = config.dataset, "dataset"
    if name == Config().dataset:
        given, what = data.get("name"), "data.name"
        name = given if isinstance(given, str) and given else OWN_GRAPH
        if name == OWN_GRAPH and resumed is not None and (stored := Path(resumed) / "config.yaml").is_file():
            name = Config.from_yaml(stored).dataset
    check_utf8(what, name)
    name = name if name == OWN_GRAPH else absolute_name(name)
    root = absolute("root", config.root) if config.root else ""
    return config.updated({"dataset": name, "root": root})


def graph_hashes(data: Data) -> dict[str, str]:
    """A hash of each part of a graph that training depends on, by its name."""
    parts = {name: data.get(name) for name in ("x", "edge_index", "y", *MASKS)}
    return {name: fingerprint("input", name, [part]) for name, part in parts.items() if isinstance(part, Tensor)}


def save_graph(run: RunFolder, config: Config, data: Data, progress: Progress) -> None:
    """Save a graph in its run folder unless its name loads it or it is too large. A file is not enough: it may grow
    later.

    The ids of its nodes are always saved.
    """
    if isinstance(ids := data.get("node_ids"), NodeIds):  # a Data may have an attribute of its own by this name
        run.write_text(FILE, ids.to_csv())
    tensors = {name: data[name] for name in _PARTS if isinstance(data.get(name), Tensor)}
    if data.x.layout == torch.sparse_csr:
        tensors |= dict(zip(_CSR, (data.x.crow_indices(), data.x.col_indices(), data.x.values()), strict=True))
    else:
        tensors["x"] = data.x
    size, named = sum(tensor.nbytes for tensor in tensors.values()), _is_named(config.dataset)
    if named and (size > MOST_BYTES or _loads(config, run.path, data)):
        return
    if size > MOST_BYTES:
        keep = f"; keep {config.dataset} as it is" if is_path(config.dataset) else ""
        progress.say(
            f"graph: {size / 2**20:,.0f} MiB, more than the {MOST_BYTES >> 20} MiB that a run folder keeps{keep}"
        )
        return
    values = {name: data.get(name) for name in _NUMBERS if data.get(name) is not None}
    values |= {"features": data.num_features, "num_classes": num_classes(data)}
    run.save_tensors(GRAPH.partition(".")[0], tensors, {name: _plain(value) for name, value in values.items()})


def graph_of_run(run: Path, config: Config, root: Path | str | None = None) -> Data:
    """The graph of a run, from the run folder or, if it is not saved there, from its dataset.

    Args:
        run: folder of a finished run.
        config: configuration of the run.
        root: folder of the dataset's raw files; by default that of the run.

    Raises:
        FileNotFoundError: the dataset, or the user's own graph, does not exist.
        ValueError: the saved graph or the dataset is not valid.
    """
    if (run / GRAPH).is_file():
        return _read_graph(run / GRAPH)
    if config.dataset == OWN_GRAPH:
        raise FileNotFoundError(
            f"run {run} was made on a graph that rbm.distill was given as an object, and has no {GRAPH}: that graph had"
            f" more than {MOST_BYTES >> 20} MiB, or the file was removed"
        )
    try:
        return load_configured_dataset(config, root)
    except FileNotFoundError as error:
        if not is_path(config.dataset):
            raise
        raise FileNotFoundError(
            f"{error}. Run {run} was made on it; if it was moved, write its new path as dataset into"
            f" {run / 'config.yaml'}"
        ) from error


def graph_of_resumed_run(run: Path, config: Config) -> Data:
    """The graph of a run that a command continues. One that :func:`rbm.distill` was given as an object is read from the
    run folder; a file is read again, and the run then compares it with the graph that it was started with.

    The paths of files are absolute in a run folder. A name such as ``org/graph`` only looks like a path.

    Raises:
        FileNotFoundError: the graph was given as an object and is not in the folder, or the dataset does not exist.
        ValueError: the saved graph or the dataset is not valid.
    """
    name = Path(config.dataset)
    if is_path(config.dataset) and (name.is_absolute() or name.exists()):
        return load_configured_dataset(config)
    if (run / GRAPH).is_file():
        return _read_graph(run / GRAPH)
    if not _is_named(config.dataset):
        raise FileNotFoundError(
            f"run {run} was made on a graph that rbm.distill was given as an object, and has no {GRAPH}, which a run"
            f" writes at its end; continue it from Python: rbm.distill(data, folder={str(run)!r}, resume=True) with the"
            " other arguments as they were"
        )
    return load_configured_dataset(config)


def teacher_of_run(run: Path, config: Config, split: GraphSplit, classes: int) -> nn.Module | None:
    """The teacher that a run trained, in eval mode; None if the run did not train one."""
    weights = run / "teacher.safetensors"
    if not weights.is_file():
        return None
    teacher = build_configured_teacher(config, split, classes).float()  # whatever the process's default dtype is
    load_weights(teacher, weights)
    return teacher.eval()


def split_of_run(run: Path, config: Config, root: Path | str | None = None) -> tuple[GraphSplit, int]:
    """The split of a run, and its number of classes; arguments as for :func:`graph_of_run`.

    Raises:
        FileNotFoundError: as :func:`graph_of_run`.
        ValueError: as :func:`graph_of_run`, or the graph is not that of the run.
    """
    data = graph_of_run(run, config, root)
    split = split_for(config, data, unseen_fraction=_inputs(run).get("unseen_fraction"))
    remedy = "restore that graph" if is_path(config.dataset) else "name the folder with that dataset by --root"
    _check_sizes(run, split.graph, f"its dataset {config.dataset!r}", remedy)
    if not (run / GRAPH).is_file() and (changed := _changed(run, data)):
        raise ValueError(
            f"run {run} was made on a graph with another {', '.join(changed)} than its dataset {config.dataset!r} has;"
            f" {remedy}, or run it again"
        )
    return split, num_classes(data)


def check_resumed_graph(run: Path, graph: Data) -> None:
    """Raise ValueError if a finished run that is resumed was made on a graph of another size."""
    if (run / "summary.json").is_file():
        remedy = "write to another folder, or predict the nodes of a graph that has grown by rbm predict --graph"
        _check_sizes(run, graph, "the graph now", remedy)


def _check_sizes(run: Path, graph: Data, what: str, remedy: str) -> None:
    summary = read_results(run / "summary.json")
    for name, size in (("nodes", graph.num_nodes), ("edges", graph.num_edges), ("features", graph.num_features)):
        if summary[name] != size:
            raise ValueError(
                f"run {run} was made on a graph of {summary[name]} {name}, and {what} has {size:,} {name};"
                f" {remedy}, or run it again"
            )


def _read_graph(path: Path) -> Data:
    tensors, values = read_sealed(path)
    width = values.pop("features")
    if "x" not in tensors:
        crow, col, entries = (tensors.pop(name) for name in _CSR)
        tensors["x"] = torch.sparse_csr_tensor(crow, col, entries, (len(crow) - 1, width))
    return Data(**tensors, **values)


def _inputs(run: Path) -> dict[str, Any]:
    """What :mod:`rbm.distillation.run_inputs` has written; empty for runs of earlier versions."""
    return read_json(run / INPUTS) if (run / INPUTS).is_file() else {}


def _changed(run: Path, data: Data) -> list[str]:
    """The names of parts of a graph that are not those that the run was given."""
    inputs, now = _inputs(run), graph_hashes(data)
    return [name for name in now if inputs.get(name, now[name]) != now[name]]


def _loads(config: Config, run: Path, data: Data) -> bool:
    """Whether the name of a graph loads what the run was given. Its masks may be others: of another seed, or one's own;
    and it may have a teacher's logits, or a number of classes of its own.

    A graph that cannot be loaded now, for example without a root, may be any.
    """
    try:
        loaded = load_configured_dataset(config)
        same = num_classes(loaded) == num_classes(data) and _logits_hash(loaded) == _logits_hash(data)
        return same and not _changed(run, loaded)
    except Exception:  # a plugin's loader may raise anything
        return False


def _logits_hash(data: Data) -> str | None:
    logits = data.get("teacher_logits")
    return fingerprint("input", "teacher_logits", [logits]) if isinstance(logits, Tensor) else None


def _is_named(dataset: str) -> bool:
    try:
        return not is_path(dataset) and bool(find_dataset(dataset))
    except ValueError:
        return False


def _plain(value: Any) -> float | int:
    return value.item() if isinstance(value, Tensor) else value
