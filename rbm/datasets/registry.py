"""The graphs that the package loads by name."""

import difflib
from dataclasses import dataclass


@dataclass(frozen=True)
class DatasetInfo:
    """What a dataset is and where its raw files lie.

    Attributes:
        name: the key in ``DATASETS`` and in the hyperparameter files of ``rbm/configs``.
        kind: how it is loaded: ``"digits"``, ``"planetoid"``, ``"amazon"`` or ``"coauthor"``.
        unseen_fraction: share of the test nodes that the inductive setting hides from training.
        description: one line for people.
        pyg_class: name of the class in ``torch_geometric.datasets``; empty where no files are needed.
        pyg_name: the name that this class knows it by.
        raw_files: the files expected in ``<root>/<pyg_class>/<pyg_name>/raw``.
    """

    name: str
    kind: str
    unseen_fraction: float
    description: str
    pyg_class: str = ""
    pyg_name: str = ""
    raw_files: tuple[str, ...] = ()


def _planetoid(pyg_name: str, description: str) -> DatasetInfo:
    parts = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
    files = tuple(f"ind.{pyg_name.lower()}.{part}" for part in parts)
    # Planetoid's inductive protocol hides all of the 1,000 public test nodes.
    return DatasetInfo(pyg_name.lower(), "planetoid", 1.0, description, "Planetoid", pyg_name, files)


def _npz(name: str, pyg_class: str, pyg_name: str, file: str, description: str) -> DatasetInfo:
    return DatasetInfo(name, pyg_class.lower(), 0.2, description, pyg_class, pyg_name, (file,))


DATASETS: dict[str, DatasetInfo] = {
    info.name: info
    for info in (
        DatasetInfo("digits", "digits", 0.2, "1,797 handwritten digits, 8-nearest-neighbour graph; needs no files"),
        _planetoid("Cora", "citations between 2,708 machine-learning papers, 7 classes"),
        _planetoid("CiteSeer", "citations between 3,327 computer-science papers, 6 classes"),
        _planetoid("PubMed", "citations between 19,717 papers on diabetes, 3 classes"),
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
    )
}

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
}


def find_dataset(name: str) -> DatasetInfo:
    """The entry of ``DATASETS`` that ``name`` means, in any case, with ``_`` or ``-``; a few aliases work.

    Raises:
        TypeError: ``name`` is not text.
        ValueError: the name is unknown; the message lists the known ones and the closest.
    """
    if not isinstance(name, str):
        raise TypeError(f"dataset: got {type(name).__name__}, expected a name such as 'cora'")
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    key = _ALIASES.get(key, key)
    if key in DATASETS:
        return DATASETS[key]
    close = difflib.get_close_matches(key, [*DATASETS, *_ALIASES], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"dataset: got {name!r}, expected one of {', '.join(DATASETS)}{hint}")
