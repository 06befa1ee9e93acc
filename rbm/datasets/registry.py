"""The graphs that the package loads by name, and how the two protocols split and normalise them."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch_geometric.data import Data

from rbm.config import PROTOCOLS

# Share of the test nodes that the inductive setting hides, but for Planetoid's graphs.
UNSEEN_FRACTION = 0.2
PATH_SUFFIXES = (".pt", ".pth", ".npz")


@dataclass(frozen=True)
class DatasetInfo:
    """What a dataset is and where its raw files lie.

    Attributes:
        name: the key in ``DATASETS`` and in the hyperparameter files of ``rbm/config/configs``.
        kind: how it is loaded: ``"digits"``, ``"planetoid"``, ``"attributed"``, ``"amazon"``, ``"coauthor"`` or
            ``"ogb"``.
        description: one line for people.
        folders: where below the root its files may lie; the first one is where a download goes.
        raw_files: the files expected in one of them.
        pyg_class: name of the class in ``torch_geometric.datasets`` that fetches it, if one does.
        pyg_name: the name that this class knows it by.
        url: the archive of a graph of the Open Graph Benchmark.
        component: nodes and undirected edges of the largest component where the protocol ``cpf`` takes that.
        note: what to know when its files are missing.
        loader: of a plugin's dataset: ``loader(root, seed)`` gives the graph, with masks; nothing else is read then.
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
    loader: Callable[[str | Path | None, int], Data] | None = None


def _pyg(name: str, kind: str, pyg_class: str, pyg_name: str, files: tuple[str, ...], *args, **more) -> DatasetInfo:
    folders = (f"{pyg_class}/{pyg_name}/raw", f"{pyg_name}/raw")  # the second below a root of PyG's own
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

# Planetoid's CiteSeer is not the one that the CPF protocol is about: other papers, other citations.
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

_ALIASES = {
    "computers": "amazon-computers",
    "computer": "amazon-computers",
    "amazon-computer": "amazon-computers",
    "photo": "amazon-photo",
    "photos": "amazon-photo",
    "cs": "academic-cs",
    "coauthor-cs": "academic-cs",
    "physics": "academic-physics",
    "coauthor-physics": "academic-physics",
    "arxiv": "ogbn-arxiv",
    "products": "ogbn-products",
}


def find_dataset(name: str) -> DatasetInfo:
    """The entry of ``DATASETS`` that ``name`` means, in any case, with ``_`` or ``-``; a few aliases work.

    Raises:
        TypeError: ``name`` is not text.
        ValueError: the name is unknown; the message lists the known ones and the closest.
    """
    if not isinstance(name, str):
        raise TypeError(f"dataset: got {type(name).__name__}, expected a name such as 'cora'")
    key = _key(name)
    if key in DATASETS:
        return DATASETS[key]
    close = difflib.get_close_matches(key, [*DATASETS, *_ALIASES], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"dataset: got {name!r}, expected one of {', '.join(DATASETS)}, or a file or folder{hint}")


def is_path(name: str | Path) -> bool:
    """Whether a dataset is a file or folder of one's own: a ``Path``, a text with a separator or one of
    ``PATH_SUFFIXES``, or what exists under that name, unless the package knows a graph by it (write ``./cora`` then).
    """
    if isinstance(name, Path):
        return True
    # Path("") is the working directory; an empty text is a mistake.
    if not isinstance(name, str) or not name or _key(name) in DATASETS:
        return False
    return "/" in name or "\\" in name or name.endswith(PATH_SUFFIXES) or Path(name).exists()


def dataset_name(dataset: str | Path) -> str:
    """The name that configurations and result files keep: the key in ``DATASETS``, or the path as it was given.

    Raises:
        TypeError, ValueError: as :func:`find_dataset`, where it is neither.
    """
    return str(dataset) if is_path(dataset) else find_dataset(dataset).name


def short_name(dataset: str) -> str:
    """What tables call a dataset: its name; of a graph given as a file or folder that of the file, without its path."""
    return Path(dataset).stem if "/" in dataset or "\\" in dataset or dataset.endswith(PATH_SUFFIXES) else dataset


def unseen_fraction(dataset: str | Path, protocol: str = "rbm") -> float:
    """Share of the test nodes that the inductive setting hides from training: a fifth.

    But all of Planetoid's public test nodes under the protocol ``rbm``, as that benchmark has always been used.

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
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    return _ALIASES.get(key, key)
