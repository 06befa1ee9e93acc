"""`load_graph`: load a user's own graph in the form that the rest of the package expects."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

from rbm.datasets.readers.features import check_sparse_features, csr_in_order, pack_features
from rbm.datasets.readers.node_ids import MOST_EXACT
from rbm.datasets.readers.user_files import as_tensor, read_parts
from rbm.datasets.registry import dataset_name
from rbm.datasets.splits import per_class_masks
from rbm.datasets.validation import MASKS, check_class_numbers, warn_of_absent_classes, warn_of_edge_weights
from rbm.utils.arguments import check_at_least, check_flags
from rbm.utils.files import as_path, check_utf8
from rbm.utils.repeatable import cpu_as_default

# Smaller float16 features are converted to float32 when loaded, since all code accepts float32.
MIN_STORED_NUMEL = 2**24
# If a smaller share of the edges has its reverse, the list may contain each undirected edge once. Random directed
# graphs have a few reverse edges by chance. Longer lists are not checked, since that takes seconds and gigabytes.
_MOST_RETURNED, _MOST_COMPARED = 0.05, 2**24
_FEWEST_TEST_NODES = 0.1  # share of the labelled nodes
_SPLIT_WORDS = ("mask", "train", "valid", "test", "split")


@cpu_as_default()
def load_graph(
    path: str | Path,
    *,
    seed: int = 0,
    split_rng: str = "pcg64",
    small_classes: str = "share",
    sparse_features: str = "auto",
    undirected: bool = False,
) -> Data:
    """Load a graph from files: features, edges, labels, and optionally masks and a teacher's logits.

    ``path`` is one of

    * a PyG ``Data`` (or a dictionary of tensors) written by ``torch.save``, ``.pt`` or ``.pth``, or the
      ``processed/data.pt`` of a PyG dataset with one graph; it is opened with ``weights_only=True``, so no code in it
      can run;
    * an ``.npz`` of arrays; features may be the four arrays of ``scipy.sparse.save_npz`` (CSR) instead of one;
    * an ``.npz`` of the gnn-benchmark, with ``adj_data`` and so on, ``attr_data`` and so on, and ``labels``;
    * a folder with one file per part: ``.npy`` (memory-mapped), ``.npz`` (one array, or ``scipy.sparse.save_npz``),
      ``.parquet`` (needs ``pyarrow``) or ``.csv`` (a header is skipped; with pandas, use
      ``to_csv(FILE, index=False, header=False)``). float16 features of at least 2^24 numbers stay as they are, and
      students read their batches from the file. Edge weights are not used, which a warning says.

    The parts have the same names in all formats:

    * ``x``, ``features`` or ``node_features``: numbers ``[N, F]``.
    * ``edge_index`` or ``edges``: whole numbers ``[2, M]`` or ``[M, 2]``, source and target. An array of shape
      ``[2, 2]`` is read as the first; tables have one edge per row. Self-loops, duplicates and directions are kept;
      messages flow from the first node of an edge to the second. For a graph without edges, give an empty array.
    * ``y``, ``labels`` or ``node_labels``: class numbers ``[N]`` from 0; -1 or NaN means unknown and is allowed outside
      the masks only. A number that no node has, such as 2 among 0, 1, 3, counts as a class, with a warning. To declare
      the number of classes and avoid the warning, add the number ``num_classes`` as a part.
    * ``train_mask``, ``val_mask`` and ``test_mask`` (or ``train_masks`` and so on, or ``train`` and so on): true or
      false for each node, or node ids; or ``masks``, ``[N, 3]`` or ``[3, N]``, in this order. Without masks, 20
      training and 30 validation nodes per class are drawn from the labelled nodes
      (:func:`rbm.datasets.splits.per_class_masks`). A mask may hold ``S`` splits, ``[N, S]`` or ``[S, N]``; seed ``s``
      uses split ``s % S``.
    * ``teacher_logits`` or ``logits``: a teacher's logits ``[N, C]``, for ``rbm distill --teacher logits``.

    In a folder, a column ``id`` or ``node_id`` of ``x.csv`` or ``x.parquet`` names the nodes, by strings or numbers
    (needs ``pyarrow``). Edges in a table are then pairs of ids; edges with an unknown id are left out, with a warning.
    Tables of labels, masks and logits may have such a column too, and then their rows may come in any order. A node
    that a table of labels lacks, or whose field is empty there, has no label; one that a mask lacks is not in the set.
    A mask may also be a list of ids.

    Args:
        path: the file or folder.
        seed: seed of the split if the files have none; selects the split if they have several.
        split_rng: its generator.
        small_classes: how to split a class with too few nodes, see :func:`rbm.datasets.splits.per_class_masks`.
        sparse_features: as for :func:`rbm.datasets.load_dataset`.
        undirected: add the reverse of each edge, for files that list each undirected edge once; duplicates are removed.

    Returns:
        As :func:`rbm.datasets.load_dataset`, plus ``teacher_logits`` float32 ``[N, C]`` and ``node_ids``
        (:class:`rbm.datasets.readers.node_ids.NodeIds`) if the files have them.

    Raises:
        FileNotFoundError: ``path`` does not exist.
        ModuleNotFoundError: a Parquet file, without ``pyarrow``.
        TypeError: an option has another type.
        ValueError: a file cannot be read, a part is missing, the parts do not fit together, or an invalid option.
    """
    check_sparse_features(sparse_features)
    check_at_least("seed", seed, 0)  # here too, since a file of several masks needs no generator
    check_flags(undirected=undirected)
    path = as_path("dataset", path)
    check_utf8("dataset", path)  # results name it
    parts = read_parts(path)
    _check_present(path, parts, ("x", "edge_index", "y"))
    x = _features(path, parts["x"])
    num_nodes = x.size(0)
    _warn_of_row_numbers(f"{path}, x", x)
    y = _labels(path, parts["y"])
    y = y.squeeze(1) if y.dim() == 2 and y.size(1) == 1 else y
    if y.shape != (num_nodes,):
        hint = ""
        if _has_header_label(y, x):
            hint = "; is the first line of a .csv a header of pandas? write it with header=False"
        if y.dim() == 2 and len(y) == num_nodes:
            one_hot = bool(((y == 0) | (y == 1)).all() and (y.sum(1) == 1).all())
            hint = "; for one-hot rows, use y.argmax(1)" if one_hot else "; keep one of its columns"
        raise ValueError(
            f"dataset: {path}, y has shape {list(y.shape)}, expected [{num_nodes}], a class for each node{hint}"
        )
    check_class_numbers(f"dataset: {path}, y", y)
    if not bool((y >= 0).any()):
        raise ValueError(f"dataset: {path}, y has no label, expected a class number from 0 for some nodes")
    if "num_classes" not in parts:
        warn_of_absent_classes(f"dataset: {path}, y", y)
    warn_of_edge_weights(f"dataset: {path}", parts["others"])
    data = _nodes_and_edges(path, parts, x, sparse_features, undirected)
    data.y = y
    masks = _masks(path, parts, num_nodes, seed)
    if masks is None:
        # A misspelt mask must not turn into a random split.
        if suspicious := [name for name in parts["others"] if any(word in name.lower() for word in _SPLIT_WORDS)]:
            raise ValueError(
                f"dataset: {path} holds {', '.join(suspicious)}, but no masks of a known name and form; call them "
                "train_mask, val_mask and test_mask, or remove them for a split drawn by the seed"
            )
        masks = per_class_masks(y, seed=seed, split_rng=split_rng, small_classes=small_classes)
        _warn_of_few_test_nodes(path, *masks)
    data.train_mask, data.val_mask, data.test_mask = masks
    classes = _class_count(path, parts.get("num_classes"), y)
    if "teacher_logits" in parts:
        logits = as_tensor(parts["teacher_logits"], f"{path}, teacher_logits")
        if logits.dim() != 2 or logits.size(0) != num_nodes or logits.size(1) < classes:
            raise ValueError(
                f"dataset: {path}, teacher_logits has shape {list(logits.shape)}, expected [{num_nodes}, {classes}]: a "
                "row for each node, a column for each class"
            )
        _warn_of_row_numbers(f"{path}, teacher_logits", logits)
        data.teacher_logits = logits.to(torch.float32)
        classes = logits.size(1)
    data.num_classes, data.name = classes, dataset_name(path)
    return data


def load_unlabelled_graph(path: str | Path, *, sparse_features: str = "auto", undirected: bool = False) -> Data:
    """Load features, edges and ids of nodes from the files of :func:`load_graph`, which also tells the arguments and
    the errors. Labels, masks and logits may be missing, and are not read into the result.
    """
    path = as_path("graph", path)
    with _called_graph():
        parts = read_parts(path)
        _check_present(path, parts, ("x", "edge_index"))
        return _nodes_and_edges(path, parts, _features(path, parts["x"]), sparse_features, undirected, grown=True)


@contextmanager
def _called_graph() -> Iterator[None]:
    """Let errors and warnings of the readers below name the argument ``graph`` instead of ``dataset``."""

    def renamed(message: Any) -> Any:
        return f"graph:{message[8:]}" if isinstance(message, str) and message.startswith("dataset:") else message

    def rename(record: logging.LogRecord) -> bool:
        record.msg = renamed(record.msg)
        return True

    logger = logging.getLogger("rbm")
    logger.addFilter(rename)
    try:
        yield
    except (ValueError, OSError, ModuleNotFoundError) as error:
        error.args = tuple(map(renamed, error.args))
        raise
    finally:
        logger.removeFilter(rename)


def _check_present(path: Path, parts: dict[str, Any], names: tuple[str, ...]) -> None:
    if missing := [name for name in names if name not in parts]:
        labels = " and y (or labels)" if "y" in names else ""
        raise ValueError(
            f"dataset: {path} lacks {', '.join(missing)}; expected x (or features), edge_index (or edges; an "
            f"empty array where there are none){labels}{_found_arrays(parts)}"
        )


def _nodes_and_edges(
    path: Path, parts: dict[str, Any], x: Tensor, sparse_features: str, undirected: bool, *, grown: bool = False
) -> Data:
    edges = _edges(path, parts["edge_index"], x.size(0))
    if undirected:
        edges = to_undirected(edges, num_nodes=x.size(0))
    else:
        _warn_of_single_directions(path, edges, x.size(0), grown)
    data = Data(x=pack_features(x, sparse_features), edge_index=edges)
    if parts.get("node_ids") is not None:
        data.node_ids = parts["node_ids"]
    return data


def _has_header_label(y: Tensor, x: Tensor) -> bool:
    return y.dim() == 1 and y.size(0) == x.size(0) + 1 and int(y[0]) == 0


def _found_arrays(parts: dict[str, Any]) -> str:
    return f" (it has {', '.join(parts['others'][:8])})" if parts["others"] else ""


def _features(path: Path, x: Any) -> Tensor:
    x = as_tensor(x, f"{path}, x", sparse=True)
    if x.layout not in (torch.strided, torch.sparse_csr) or x.dim() != 2 or 0 in x.shape:
        known = x.layout in (torch.strided, torch.sparse_csr)
        kind = f"shape {list(x.shape)}" if known else f"layout {x.layout}"
        hint = "; use x[:, None] for a single feature" if x.dim() == 1 and known else ""
        hint = hint if known else "; use x.to_sparse_csr()"
        raise ValueError(
            f"dataset: {path}, x has {kind}, expected dense or CSR features [nodes, features], not empty{hint}"
        )
    if x.layout == torch.strided and x.dtype == torch.float16 and path.is_dir() and x.numel() >= MIN_STORED_NUMEL:
        return x
    return csr_in_order(x) if x.layout == torch.sparse_csr else x.to(torch.float32).contiguous()


def _whole(where: str, value: Any) -> Tensor:
    """Convert to int64; floating-point numbers, which tables often have, must be whole."""
    value = as_tensor(value, where)
    if value.is_floating_point():
        if not bool((value.isfinite() & (value == value.round())).all()):
            raise ValueError(f"dataset: {where} holds numbers that are not whole, expected whole ones")
        if bool((value.abs() > MOST_EXACT).any()):
            raise ValueError(f"dataset: {where} holds floating-point numbers beyond 2^53, which are not exact")
    elif value.dtype == torch.bool:
        raise ValueError(f"dataset: {where} is {value.dtype}, expected whole numbers; use astype(int) for 0 and 1")
    return value.to(torch.int64)


def _labels(path: Path, value: Any) -> Tensor:
    """Convert labels to int64; NaN, an unknown label, becomes -1."""
    value = as_tensor(value, f"{path}, y")
    if value.is_floating_point():
        value = value.masked_fill(value.isnan(), -1.0)
    return _whole(f"{path}, y", value)


def _class_count(path: Path, value: Any, y: Tensor) -> int:
    """The declared number of classes, checked against the labels; by default the largest label plus one."""
    labelled = int(y.max()) + 1
    if value is None:
        return labelled
    where = f"{path}, num_classes"
    value = _whole(where, torch.tensor(value) if isinstance(value, int) else value)
    if value.numel() != 1 or int(value) < 1:
        raise ValueError(f"dataset: {where} is {value.tolist()}, expected one number, at least 1")
    check_class_numbers(f"dataset: {where}", value - 1)
    if int(value) < labelled:
        raise ValueError(
            f"dataset: {where} is {int(value)}, but y holds the class number {labelled - 1}, expected numbers below"
            f" num_classes; number the classes from 0, or set num_classes to {labelled} or more"
        )
    return int(value)


def _edges(path: Path, edges: Any, num_nodes: int) -> Tensor:
    edges = _whole(f"{path}, edge_index", edges)
    if edges.numel() == 0:
        return edges.new_empty(2, 0)
    if edges.dim() != 2 or 2 not in edges.shape:
        raise ValueError(f"dataset: {path}, edge_index has shape {list(edges.shape)}, expected [2, M] or [M, 2]")
    _check_ids(f"{path}, edge_index", edges, num_nodes)
    return (edges if edges.size(0) == 2 else edges.t()).contiguous()


def _warn_of_single_directions(path: Path, edges: Tensor, num_nodes: int, grown: bool) -> None:
    """Warn if hardly any edge has its reverse, as in a list with each undirected edge once: half would be missing.

    The edges of a ``grown`` graph are read as those of the run's graph, so only its file can be mended.
    """
    if edges.size(1) > _MOST_COMPARED:
        return
    sources, targets = edges[:, edges[0] != edges[1]]
    keys = (sources * num_nodes + targets).unique()
    returned = torch.isin(keys % num_nodes * num_nodes + keys // num_nodes, keys)
    if keys.numel() and (share := float(returned.double().mean())) < _MOST_RETURNED:
        logging.getLogger("rbm").warning(
            "dataset: %s, edge_index has %s distinct edges; the reverse edge is present for %s of them. Messages flow"
            " from the first node of an edge to the second. If the graph is undirected, %s.",
            *(path, f"{keys.numel():,}", f"{share:.1%}" if share else "none"),
            "add the reverse of each edge to the file"
            if grown
            else "use --undirected (load_graph(PATH, undirected=True)), which adds the reverse of each edge",
        )


def _warn_of_row_numbers(where: str, table: Tensor) -> None:
    """Warn if the first of several columns counts the rows, as an index that was written with the table does."""
    rows, columns = table.shape
    if table.layout != torch.strided or rows < 3 or columns < 2:
        return
    for some in (3, rows):  # three rows of most tables are enough, which may be mapped from a large file
        if not torch.equal(table[:some, 0].double(), torch.arange(some, dtype=torch.float64)):
            return
    logging.getLogger("rbm").warning(
        "dataset: %s has the numbers of the rows, 0, 1, 2 and so on, as its first column. If they are an index, which"
        " says nothing about a node, write the table without it (in pandas with index=False).",
        where,
    )


def _warn_of_few_test_nodes(path: Path, train_mask: Tensor, val_mask: Tensor, test_mask: Tensor) -> None:
    """Warn if the drawn split leaves few of the labelled nodes for testing, as small classes do."""
    labelled, left = int((train_mask | val_mask | test_mask).sum()), int(test_mask.sum())
    if left < _FEWEST_TEST_NODES * labelled:
        logging.getLogger("rbm").warning(
            "dataset: %s has no masks, and the drawn split leaves %s of %s labelled nodes for testing, because a class"
            " of at most 50 labelled nodes leaves one; give train_mask, val_mask and test_mask to test on more.",
            *(path, f"{left:,}", f"{labelled:,}"),
        )


def _masks(path: Path, parts: dict[str, Any], num_nodes: int, seed: int) -> list[Tensor] | None:
    present = [name for name in MASKS if name in parts]
    if "masks" in parts:
        if present:
            raise ValueError(f"dataset: {path} holds both masks and {present[0]}, expected one of them")
        masks = as_tensor(parts["masks"], f"{path}, masks")
        if masks.shape == (3, num_nodes) and num_nodes != 3:
            masks = masks.t()
        if masks.shape != (num_nodes, 3):
            raise ValueError(f"dataset: {path}, masks has shape {list(masks.shape)}, expected [{num_nodes}, 3]")
        return [_flags(f"{path}, masks", column) for column in masks.unbind(1)]
    if not present:
        return None
    if absent := [name for name in MASKS if name not in parts]:
        raise ValueError(
            f"dataset: {path} has {', '.join(present)} but lacks {', '.join(absent)}; expected all or none: use some"
            " nodes of another mask, or remove all masks for a split drawn by the seed"
        )
    values = {name: as_tensor(parts[name], f"{path}, {name}") for name in MASKS}
    for name, value in values.items():
        if value.dim() == 2 and len(value) != num_nodes and value.size(1) == num_nodes:
            values[name] = value.t()
    counts = {name: value.size(1) for name, value in values.items() if value.dim() == 2 and len(value) == num_nodes}
    if len(set(counts.values())) > 1 or 0 in counts.values():
        found = ", ".join(f"{name} [{num_nodes}, {count}]" for name, count in counts.items())
        raise ValueError(f"dataset: {path} has {found}, expected one column per split, equally many in each mask")
    for name, count in counts.items():
        values[name] = values[name][:, seed % count]
    if counts and (count := max(counts.values())) > 1:
        logging.getLogger("rbm").warning(
            "dataset: %s has masks for %d splits; seed %d uses split %d, counted from 0.",
            *(path, count, seed, seed % count),
        )
    return [_mask(f"{path}, {name}", values[name], num_nodes) for name in MASKS]


def _mask(where: str, value: Any, num_nodes: int) -> Tensor:
    value = as_tensor(value, where)
    if value.dim() != 1:
        raise ValueError(
            f"dataset: {where} has shape {list(value.shape)}, expected [{num_nodes}], [{num_nodes}, splits] or a list"
            " of node ids"
        )
    # Distinct ids of more than two nodes cannot all be 0 or 1, so such numbers mean true and false.
    if value.dtype == torch.bool or (value.numel() == num_nodes > 2 and bool(((value == 0) | (value == 1)).all())):
        if value.numel() != num_nodes:
            raise ValueError(
                f"dataset: {where} has {value.numel()} entries, expected one for each of {num_nodes} nodes"
            )
        return _flags(where, value)
    ids = _whole(where, value)
    _check_ids(where, ids, num_nodes)
    mask = torch.zeros(num_nodes, dtype=torch.bool)
    mask[ids] = True
    if int(mask.sum()) < ids.numel():
        raise ValueError(
            f"dataset: {where} names a node twice, expected each node id once, or 0 or 1 for each of {num_nodes} nodes"
        )
    return mask


def _check_ids(where: str, ids: Tensor, num_nodes: int) -> None:
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_nodes:
        raise ValueError(
            f"dataset: {where} holds node ids from {int(ids.min())} to {int(ids.max())}, expected 0 to {num_nodes - 1}"
        )


def _flags(where: str, value: Tensor) -> Tensor:
    if not bool(((value == 0) | (value == 1)).all()):
        raise ValueError(f"dataset: {where} holds other values than 0 and 1")
    return value.to(torch.bool).clone()
