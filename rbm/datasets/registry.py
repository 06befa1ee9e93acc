"""The graphs that the package loads by name, and the share of unseen test nodes under each protocol."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rbm.config import PROTOCOLS
from rbm.config.dataset_names import ALIASES, full_name, plain
from rbm.utils.files import absolute, check_utf8
from rbm.utils.suggestions import did_you_mean

if TYPE_CHECKING:
    from torch_geometric.data import Data

# Share of the test nodes that the inductive setting hides, except for Planetoid's graphs.
UNSEEN_FRACTION = 0.2
PATH_SUFFIXES = (".pt", ".pth", ".npz")


@dataclass(frozen=True)
class DatasetInfo:
    """Description of a dataset and of its raw files.

    Attributes:
        name: the key in ``DATASETS`` and in the hyperparameter files of ``rbm/config/configs``.
        kind: how it is loaded: ``"digits"``, ``"planetoid"``, ``"attributed"``, ``"amazon"``, ``"coauthor"`` or
            ``"ogb"``.
        description: one line for users.
        folders: folders below the root in which its files are looked for; downloads go to the first.
        raw_files: the files expected in one of these folders.
        pyg_class: the class in ``torch_geometric.datasets`` that downloads it, if any.
        pyg_name: its name in that class.
        url: the archive of a graph of the Open Graph Benchmark.
        component: nodes and undirected edges of the largest component, if the protocol ``cpf`` uses that.
        note: a hint for the message about missing files.
        loader: for a plugin's dataset: ``loader(root, seed)`` returns the graph with masks; no files are read then.
    """

    name: str
    kind: str
    description: str
    folders: tuple[str, ...] = ()
    raw_files: tuple[str, ...] = ()
    pyg_class: str = ""
    pyg_name: str = ""
    url: str = ""
    component: tuple[int, int] | None = None
    note: str = ""
    loader: Callable[[str | Path | None, int], "Data"] | None = None


def _pyg(name: str, kind: str, pyg_class: str, pyg_name: str, files: tuple[str, ...], *args, **more) -> DatasetInfo:
    folders = (f"{pyg_class}/{pyg_name}/raw", f"{pyg_name}/raw")  # the second for a root that a PyG class was given
    return DatasetInfo(name, kind, *args, folders, files, pyg_class, pyg_name, **more)


def _planetoid(pyg_name: str, component: tuple[int, int] | None, description: str) -> DatasetInfo:
    parts = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
    files = tuple(f"ind.{pyg_name.lower()}.{part}" for part in parts)
    return _pyg(pyg_name.lower(), "planetoid", "Planetoid", pyg_name, files, description, component=component)


def _npz(name: str, pyg_class: str, pyg_name: str, file: str, description: str) -> DatasetInfo:
    return _pyg(name, pyg_class.lower(), pyg_class, pyg_name, (file,), description)


def _ogb(name: str, split: str, archive: str, description: str) -> DatasetInfo:
    raw = ("edge", "node-feat", "node-label", "num-node-list", "num-edge-list")
    files = (
        *(f"raw/{part}.csv.gz" for part in raw),
        *(f"split/{split}/{x}.csv.gz" for x in ("train", "valid", "test")),
    )
    folder = name.replace("-", "_")
    url = f"https://snap.stanford.edu/ogb/data/nodeproppred/{archive}.zip"
    return DatasetInfo(name, "ogb", description, (folder, f"{folder}_pyg"), files, url=url)


DATASETS: dict[str, DatasetInfo] = {
    info.name: info
    for info in (
        DatasetInfo("digits", "digits", "1,797 handwritten digits, 8-nearest-neighbour graph; needs no files"),
        _planetoid("Cora", (2485, 5069), "citations between 2,708 machine-learning papers, 7 classes"),
        _planetoid("CiteSeer", None, "citations between 3,327 computer-science papers, 6 classes"),
        _planetoid("PubMed", (19717, 44324), "citations between 19,717 papers on diabetes, 3 classes"),
        _npz(
            "amazon-computers",
            "Amazon",
            "Computers",
            "amazon_electronics_computers.npz",
            "13,381 products bought together, 10 classes",
        ),
        _npz(
            "amazon-photo",
            "Amazon",
            "Photo",
            "amazon_electronics_photo.npz",
            "7,487 products bought together, 8 classes",
        ),
        _npz(
            "academic-cs",
            "Coauthor",
            "CS",
            "ms_academic_cs.npz",
            "18,333 co-authors in computer science, 15 classes",
        ),
        _npz(
            "academic-physics",
            "Coauthor",
            "Physics",
            "ms_academic_phy.npz",
            "34,493 co-authors in physics, 5 classes",
        ),
        _ogb("ogbn-arxiv", "time", "arxiv", "citations between 169,343 papers on arXiv, 40 classes"),
        _ogb("ogbn-products", "sales_ranking", "products", "2,449,029 products bought together, 47 classes"),
    )
}

# The CPF protocol does not use Planetoid's CiteSeer, but a graph of other papers and citations.
CPF_CITESEER = _pyg(
    "citeseer",
    "attributed",
    "AttributedGraphDataset",
    "citeseer",
    ("attrs.npz", "edgelist.txt", "labels.txt"),
    "citations between 3,312 computer-science papers, 6 classes",
    component=(2110, 3668),
    note=(
        "The protocol 'cpf' takes the CiteSeer of torch_geometric.datasets.AttributedGraphDataset(root, 'CiteSeer'), "
        "with 2,110 nodes in its largest component; Planetoid's has 2,120 there and is another graph. "
    ),
)


def find_dataset(name: str) -> DatasetInfo:
    """Find the entry of ``DATASETS`` for a name or alias, ignoring case and treating ``_`` as ``-``.

    Raises:
        TypeError: ``name`` is not a string.
        ValueError: the name is unknown; the message lists the known names and the closest match.
    """
    if not isinstance(name, str):
        raise TypeError(f"dataset: got {type(name).__name__}, expected a name such as 'cora'")
    key = _key(name)
    if key in DATASETS:
        return DATASETS[key]
    hint = did_you_mean(key, [*DATASETS, *ALIASES])
    raise ValueError(f"dataset: got {name!r}, expected one of {', '.join(DATASETS)}, or a file or folder{hint}")


def is_path(name: str | Path) -> bool:
    """Whether ``name`` is the path of a user's file or folder instead of a dataset name.

    It is if it is a ``Path``, if it contains a path separator or ends in one of ``PATH_SUFFIXES``, or if it exists. A
    known dataset name is never a path (write ``./cora`` for a folder of that name).
    """
    if isinstance(name, Path):
        return True
    # Path("") is the working directory, but an empty string is a mistake.
    if not isinstance(name, str) or not name or _key(name) in DATASETS:
        return False
    return "/" in name or "\\" in name or name.endswith(PATH_SUFFIXES) or os.path.exists(name)


def dataset_name(dataset: str | Path) -> str:
    """The name used in configurations and result files: the key in ``DATASETS``, or the path as given.

    A ``Path`` that reads like a known name, such as ``Path("cora")``, becomes ``./cora``.

    Raises:
        TypeError, ValueError: it is neither, as for :func:`find_dataset`.
    """
    if not is_path(dataset):
        return find_dataset(dataset).name
    return f"./{dataset}" if _key(str(dataset)) in DATASETS else str(dataset)


def absolute_name(dataset: str) -> str:
    """The name of a dataset, or the absolute path of an existing file or folder, valid in any working directory."""
    if not is_path(dataset):
        return dataset
    path = absolute("dataset", dataset)
    if not os.path.exists(path):
        return dataset
    check_utf8("dataset", path)  # results name it
    return path


def short_name(dataset: str) -> str:
    """The name of a dataset in tables; for a graph given as a path, its name without folder and ending."""
    path = Path(dataset)
    return path.stem if path.suffix in PATH_SUFFIXES else path.name or dataset  # "wiki.2020" is a folder


def graph_name(dataset: str) -> str:
    """The name of a run's graph in its results: of a path, the short one; any other name, such as ``org/graph``, as it
    is. Runs store paths as absolute ones; those of earlier versions may be relative.
    """
    path = Path(dataset)
    return short_name(dataset) if path.is_absolute() or path.suffix in PATH_SUFFIXES else dataset


def unseen_fraction(dataset: str | Path, protocol: str = "rbm") -> float:
    """Share of the test nodes that the inductive setting hides from training: a fifth.

    For Planetoid's graphs under the protocol ``rbm``, it is all public test nodes, as is usual for that benchmark.

    Raises:
        TypeError, ValueError: an unknown dataset or protocol.
    """
    check_protocol(protocol)
    planetoid = not is_path(dataset) and find_dataset(dataset).kind == "planetoid"
    return 1.0 if planetoid and protocol == "rbm" else UNSEEN_FRACTION


def check_protocol(protocol: str) -> None:
    """Raise ValueError unless ``protocol`` is one of ``PROTOCOLS``."""
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol: got {protocol!r}, expected one of {', '.join(PROTOCOLS)}")


def _key(name: str) -> str:
    """The key in ``DATASETS`` that a name or alias means, however a plugin has written it; a plain form of the name if
    there is none.
    """
    wanted = full_name(name)
    return next((key for key in DATASETS if plain(key) == wanted), wanted)
