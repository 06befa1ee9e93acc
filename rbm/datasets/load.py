"""`load_dataset`: load a graph by its name, always in the same form."""

import hashlib
import os
from functools import lru_cache
from pathlib import Path

from torch_geometric.data import Data

from rbm.config import Config
from rbm.datasets.readers.digits import read_digits
from rbm.datasets.readers.features import check_sparse_features, pack_features, row_normalized
from rbm.datasets.readers.npz import read_npz_graph
from rbm.datasets.readers.ogb import read_ogb
from rbm.datasets.readers.planetoid import largest_component, read_attributed, read_planetoid
from rbm.datasets.readers.raw import find_raw_folder
from rbm.datasets.readers.user_files import part_files
from rbm.datasets.registry import (
    CPF_CITESEER,
    DatasetInfo,
    check_protocol,
    find_dataset,
    is_path,
    unseen_fraction,
)
from rbm.datasets.splits import per_class_masks
from rbm.datasets.user_graph import load_graph
from rbm.datasets.validation import num_classes, validate_data
from rbm.utils.repeatable import cpu_as_default

_CONFIGURED = ("protocol", "seed", "sparse_features", "undirected")  # options that are settings of a run
_READ_AT_ONCE = 2**24  # bytes
_SPLIT_RNG = {"rbm": "pcg64", "cpf": "mt19937"}


@cpu_as_default()
def load_dataset(
    name: str | Path,
    root: str | Path | None = None,
    *,
    protocol: str = "rbm",
    seed: int = 0,
    split_rng: str | None = None,
    normalize_features: bool | None = None,
    binarize: bool = False,
    keep_duplicates: bool = False,
    sparse_features: str = "auto",
    undirected: bool = False,
    download: bool = False,
) -> Data:
    """Load a graph by name, as the paper's experiments use it, or a graph of your own by its path.

    The literature uses two protocols. Results under different protocols are not comparable:

    ========================  ==========================================  ============================================
    graphs                    ``"rbm"`` (RbM, KRD)                        ``"cpf"`` (GLNN, NOSMOG, CoHOp)
    ========================  ==========================================  ============================================
    Cora, CiteSeer, PubMed    whole graph, row-normalised features, the   largest component, features as stored, a split
                              public split whatever the seed              by seed; CiteSeer from other raw files
    Amazon, Coauthor, digits  largest component, features as stored, a    the same, but for the generator
                              split by seed
    ogbn-arxiv, -products     undirected, features as stored, official    the same
                              split
    ========================  ==========================================  ============================================

    A split by seed has 20 training and 30 validation nodes per class; the rest are test nodes.

    Args:
        name: a key of ``DATASETS`` or an alias (``"photo"``, ``"coauthor-cs"``, ``"Cora"``); or the path of a file or
            folder, see :func:`rbm.datasets.load_graph`. For these, the protocol only selects the random generator.
        root: folder with raw files, in PyG's layout (``<root>/Planetoid/Cora/raw``) or OGB's (``<root>/ogbn_arxiv``);
            may be read-only.
        protocol: ``"rbm"`` or ``"cpf"``.
        seed: seed of the per-class split.
        split_rng: ``"pcg64"`` or ``"mt19937"``, see ``rbm.datasets.splits.per_class_masks``; None uses the first for
            ``rbm`` and the second for ``cpf``.
        normalize_features: divide each row of the features by its sum; None follows the protocol.
        binarize: Amazon and Coauthor only: features as in PyG, 1 where the raw value is positive.
        keep_duplicates: ogbn graphs only: see :func:`rbm.datasets.readers.ogb.read_ogb`.
        sparse_features: ``"always"`` returns ``x`` as a CSR tensor, ``"never"`` as a dense one. ``"auto"`` returns CSR
            if at most one entry in fifty is nonzero and a dense ``x`` would hold 2^24 numbers or more (64 MiB), as for
            the two Coauthor graphs. Small graphs train quickly either way, and other code expects dense tensors.
        undirected: add the reverse of each edge of a graph of your own, see :func:`rbm.datasets.load_graph`; refused
            for named graphs; those of the table are undirected.
        download: fetch missing raw files into ``root``. Otherwise the network is never used.

    Returns:
        ``x`` float32 ``[N, F]``, dense or CSR; ``edge_index`` int64 ``[2, M]``, symmetric, without self-loops or
        duplicates (graphs of your own: as they are); ``y`` int64 ``[N]``; ``train_mask``, ``val_mask``, ``test_mask``
        bool ``[N]``; ``num_classes`` int; ``name``, its name in results; and for graphs loaded by name
        ``unseen_fraction`` float, the share of the test nodes that the inductive setting hides.

    Raises:
        TypeError, ValueError: an unknown name, a missing root, an invalid option, or a corrupt file.
        FileNotFoundError: the root or raw files are missing.
        RuntimeError: the download failed.
    """
    check_protocol(protocol)
    check_sparse_features(sparse_features)
    split_rng = split_rng or _SPLIT_RNG[protocol]
    if is_path(name):
        _refuse("binarize", binarize, str(name), "Amazon and Coauthor")
        _refuse("keep_duplicates", keep_duplicates, str(name), "ogbn")
        data = load_graph(name, seed=seed, split_rng=split_rng, sparse_features=sparse_features, undirected=undirected)
        if normalize_features:
            data.x = row_normalized(data.x)
        return data

    info = _info(name, protocol)
    _refuse("binarize", binarize and info.kind not in ("amazon", "coauthor"), info.name, "Amazon and Coauthor")
    _refuse("keep_duplicates", keep_duplicates and info.kind != "ogb", info.name, "ogbn")
    _refuse("undirected", undirected, info.name, "your own")
    if info.loader is not None:
        data = info.loader(root, seed)
        validate_data(data)
        data.x, data.num_classes = pack_features(data.x, sparse_features), num_classes(data)
        data.name, data.unseen_fraction = info.name, unseen_fraction(info.name, protocol)
        return data
    is_citation = info.kind in ("planetoid", "attributed")
    data = _read(info, root, binarize=binarize, keep_duplicates=keep_duplicates, download=download)
    if is_citation and protocol == "cpf":
        data = largest_component(data, info)
    if normalize_features or (normalize_features is None and is_citation and protocol == "rbm"):
        data.x = row_normalized(data.x)
    data.x = pack_features(data.x, sparse_features)
    if info.kind != "ogb" and not (is_citation and protocol == "rbm"):
        masks = per_class_masks(data.y, seed=seed, split_rng=split_rng)
        data.train_mask, data.val_mask, data.test_mask = masks
    data.num_classes = int(data.y.max()) + 1
    data.name, data.unseen_fraction = info.name, unseen_fraction(info.name, protocol)
    return data


def load_configured_dataset(config: Config, root: str | Path | None = None) -> Data:
    """Load the graph of a configuration with :func:`load_dataset`; ``root`` replaces the configuration's."""
    options = {name: getattr(config, name) for name in _CONFIGURED}
    return load_dataset(config.dataset, root or config.root or None, **options)


def graph_settings(config: Config, root: str | Path | None = None) -> Config:
    """The settings of :func:`load_configured_dataset` alone; all others have their defaults."""
    options = {name: getattr(config, name) for name in ("dataset", *_CONFIGURED)}
    return Config(root=str(root or config.root), **options)


def check_files(name: str | Path, root: str | Path | None = None, *, protocol: str = "rbm") -> None:
    """Raise the errors of :func:`load_dataset` for missing raw files of a named graph, without reading the files."""
    if not is_path(name) and (info := _info(name, protocol)).raw_files:
        find_raw_folder(info, root)


def graph_checksum(name: str | Path) -> str:
    """A checksum of the files of a graph that is given by its path, which tells whether they have changed: 16
    hexadecimal digits. Empty for a named graph, and if the files are missing.
    """
    if not is_path(name) or not Path(name).exists():
        return ""
    return _checksum_of(tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in part_files(Path(name))))


@lru_cache(maxsize=32)  # sizes and times of the files tell whether it still holds
def _checksum_of(files: tuple[tuple[Path, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for file, size, _ in files:
        digest.update(os.fsencode(file.name) + f" {size}\n".encode())
        with file.open("rb") as content:
            while part := content.read(_READ_AT_ONCE):
                digest.update(part)
    return digest.hexdigest()[:16]


def _info(name: str, protocol: str) -> DatasetInfo:
    info = find_dataset(name)
    return CPF_CITESEER if protocol == "cpf" and info.name == "citeseer" else info


def _read(info: DatasetInfo, root: str | Path | None, *, binarize: bool, keep_duplicates: bool, download: bool) -> Data:
    if info.kind == "digits":
        return read_digits()
    folder = find_raw_folder(info, root, download=download)
    if info.kind == "planetoid":
        return read_planetoid(info, folder)
    if info.kind == "attributed":
        return read_attributed(info, folder)
    if info.kind == "ogb":
        return read_ogb(info, folder, keep_duplicates=keep_duplicates)
    return read_npz_graph(info, folder, binarize=binarize)


def _refuse(option: str, misplaced: bool, name: str, owners: str) -> None:
    if misplaced:
        raise ValueError(f"{option}: got True, expected False for {name}; only {owners} graphs have it")
