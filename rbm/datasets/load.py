"""`load_dataset`: a graph by its name, always in the same form."""

from pathlib import Path

from torch_geometric.data import Data

from rbm.config import SPARSE_FEATURES
from rbm.datasets.readers import find_raw_folder, pack_features, read_digits, read_npz_graph, read_planetoid
from rbm.datasets.registry import find_dataset
from rbm.splits import per_class_masks


def load_dataset(
    name: str,
    root: str | Path | None = None,
    *,
    seed: int = 0,
    binarize: bool = False,
    split_rng: str = "pcg64",
    sparse_features: str = "auto",
    download: bool = False,
) -> Data:
    """Load a graph by name, as the paper's experiments use it.

    Cora, CiteSeer and PubMed: the full graph, the public split whatever the seed, row-normalised features. Amazon and
    Coauthor: the largest connected component, raw features; they and the digits are split by ``seed`` into 20 training
    and 30 validation nodes of each class, and test nodes.

    Args:
        name: a key of ``DATASETS`` or an alias (``"photo"``, ``"coauthor-cs"``, ``"Cora"``).
        root: folder with raw files in PyG's layout (``<root>/Planetoid/Cora/raw``); may be read-only.
        seed: seed of the per-class split.
        binarize: Amazon and Coauthor only: features as PyG gives them, 1 where the raw value is positive.
        split_rng: ``"pcg64"`` or ``"mt19937"``, see ``rbm.splits.per_class_masks``.
        sparse_features: ``"always"`` gives ``x`` as a CSR tensor, ``"never"`` as a dense one, ``"auto"`` as CSR where
            at most one entry in fifty is not zero and a dense ``x`` would hold 2^24 numbers or more (64 MiB): the two
            Coauthor graphs. Small graphs train quickly either way, and everyone's code takes dense tensors.
        download: let PyG fetch missing raw files into ``root``. Without it the network is never used.

    Returns:
        ``x`` float32 ``[N, F]``, dense or CSR; ``edge_index`` int64 ``[2, M]``, symmetric, without self-loops or
        duplicates; ``y`` int64 ``[N]``; ``train_mask``, ``val_mask``, ``test_mask`` bool ``[N]``; ``num_classes`` int.

    Raises:
        TypeError, ValueError: an unknown name, no root where one is needed, a bad option, a corrupt file.
        FileNotFoundError: the root or raw files are missing.
        RuntimeError: the download failed.
    """
    info = find_dataset(name)
    if sparse_features not in SPARSE_FEATURES:
        raise ValueError(f"sparse_features: got {sparse_features!r}, expected one of {', '.join(SPARSE_FEATURES)}")
    if binarize and info.kind not in ("amazon", "coauthor"):
        raise ValueError(f"binarize: got True, expected False for {info.name}; only Amazon and Coauthor graphs have it")
    if info.kind == "digits":
        data = read_digits()
    else:
        folder = find_raw_folder(info, root, download=download)
        if info.kind == "planetoid":
            data = read_planetoid(info, folder)
        else:
            data = read_npz_graph(info, folder, binarize=binarize)
    data.x = pack_features(data.x, sparse_features)
    if info.kind != "planetoid":
        masks = per_class_masks(data.y, seed=seed, split_rng=split_rng)
        data.train_mask, data.val_mask, data.test_mask = masks
    data.num_classes = int(data.y.max()) + 1
    return data
