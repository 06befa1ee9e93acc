"""Checks of a graph before training starts."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rbm.nn.sparse_rows import SparseRows
from rbm.utils.chunks import drawn_rows, row_chunks, rows_not_finite

if TYPE_CHECKING:
    from torch_geometric.data import Data

MASKS = ("train_mask", "val_mask", "test_mask")
# What makes a graph with one type of nodes from another class.
REMEDIES = {"HeteroData": "; use its to_homogeneous()"}
# Every run makes a table [nodes, classes] and layers with one output per class: a wrong label could use up all memory.
MOST_CLASSES = 2**16
# With features a thousand times as large as normal ones, students are less accurate. With features a ten-thousandth as
# large, teachers learn nothing.
_SMALLEST, _LARGEST = 1e-3, 1000
# A column of features is taken for labels if each class has one value in it, and this many nodes have another value
# than the largest class: a word that all of the few nodes of a small class have is no label.
_FEWEST_OTHERS = 10
_DRAWN_NODES = 512
_OF_EDGES = {"edge_weight", "edge_weights", "edge_attr", "adj_data"}


def num_classes(data: "Data") -> int:
    """The number of classes: ``data.num_classes`` if it is set, else the largest label plus one."""
    known = data.get("num_classes")
    return int(known) if known is not None else int(data.y.max()) + 1


def check_class_numbers(where: str, labels: Tensor) -> None:
    """Raise ValueError if a class number in ``labels`` (any shape, int64) is ``MOST_CLASSES`` or more."""
    if labels.numel() and (largest := int(labels.max())) >= MOST_CLASSES:
        raise ValueError(
            f"{where} holds the class number {largest}, expected numbers below {MOST_CLASSES}; renumber the classes"
        )


def warn_of_absent_classes(where: str, labels: Tensor) -> None:
    """Warn of class numbers that no node has, since each becomes an output of every model.

    ``labels`` are int64; negative ones are unknown.
    """
    counts = torch.bincount(labels[labels >= 0])
    absent = (counts == 0).nonzero().flatten()
    if absent.numel():
        logging.getLogger("rbm").warning(
            "%s: no node has class %s, but classes are all numbers from 0 to %d, so %s. If this is a mistake, renumber"
            " the classes, for example with numpy.unique(y, return_inverse=True)[1]; if not, set num_classes=%d in the"
            " graph.",
            *(where, first_ids(absent), counts.numel() - 1),
            *("it counts as one" if absent.numel() == 1 else f"these {absent.numel()} count", counts.numel()),
        )


def warn_of_scale(x: Tensor) -> None:
    """Warn if features (dense or CSR) are so large or so small that networks hardly learn from them.

    Nothing is scaled here, since a student would then need the same scaling for every row that it predicts.
    """
    values = x.values() if x.layout == torch.sparse_csr else x
    parts = [values[rows].aminmax() for rows in row_chunks(len(values))] if values.numel() else []
    largest = max((float(max(-low, high)) for low, high in parts), default=0.0)
    if largest == 0 or _SMALLEST <= largest <= _LARGEST:
        return
    found = f"no absolute value exceeds {largest:.2g}"
    if largest > _LARGEST:
        if x.layout == torch.sparse_csr:
            columns = x.col_indices()[values.abs() > _LARGEST].unique()
        else:
            tops = torch.stack([values[rows].abs().amax(0) for rows in row_chunks(len(values))])
            columns = (tops > _LARGEST).any(0).nonzero().flatten()
        named = f"column {first_ids(columns)}" if columns.numel() == 1 else f"columns {first_ids(columns)}"
        found = f"{columns.numel()} of {x.size(1)} features have absolute values above {_LARGEST} ({named})"
        found += f", up to {largest:.2g}"
    logging.getLogger("rbm").warning(
        "data.x: %s. Networks learn poorly from such numbers. Scale the columns, for example to (x - mean) / std"
        " (x / std if x is sparse), and scale rows to predict with the same mean and std.",
        found,
    )


def warn_of_untaught_classes(data: "Data") -> None:
    """Warn of classes without a training node, and of a graph with a single class, which every model predicts."""
    present, training_labels = data.y[data.y >= 0].unique(), data.y[data.train_mask]
    logger = logging.getLogger("rbm")
    if present.numel() == 1:
        logger.warning(
            "data.y: every labelled node has class %d, so every model is right on all of them; check data.y", present
        )
    elif (absent := present[~torch.isin(present, training_labels)]).numel():
        logger.warning(
            "data.train_mask: no training node has class %s, so no model learns to predict it; add such nodes.",
            first_ids(absent),
        )


def warn_of_missing_edges(data: "Data") -> None:
    """Warn of a graph in which no edge joins two nodes: a teacher then knows no more than an MLP."""
    if not bool((data.edge_index[0] != data.edge_index[1]).any()):
        logging.getLogger("rbm").warning(
            "data.edge_index: no edge joins two nodes, so a teacher sees no more than an MLP, and encodings say nothing"
            " about a node. If the graph has edges, check where they are read from; otherwise, train students on"
            " features alone (--features-only)."
        )


def warn_of_labels_in_features(data: "Data") -> None:
    """Warn of columns of dense features that have one value per class, as labels that were left in the table do."""
    labelled = (data.y >= 0).nonzero().flatten()
    if data.x.layout != torch.strided or labelled.numel() == 0:
        return
    # A drawn part leaves few columns to be compared on all nodes.
    drawn = labelled[drawn_rows(labelled.numel(), _DRAWN_NODES, seed=0).to(labelled.device)]
    columns = torch.arange(data.x.size(1), device=data.x.device)
    for nodes, fewest in ((drawn, 1), (labelled, _FEWEST_OTHERS)):
        columns = columns[_others_by_class(data.x, data.y, nodes, columns) >= fewest]
    if columns.numel():
        logging.getLogger("rbm").warning(
            "data.x: %s %s one value per class, so that %s. If %s made from the labels, remove %s: accuracies mean"
            " nothing otherwise.",
            *(
                (f"column {first_ids(columns)}", "has", "it tells the class", "it was", "it")
                if columns.numel() == 1
                else (f"columns {first_ids(columns)}", "have", "they tell the class", "they were", "them")
            ),
        )


def _others_by_class(x: Tensor, y: Tensor, nodes: Tensor, columns: Tensor) -> Tensor:
    """How many of ``nodes`` have another value than the largest class, for each of ``columns``: int64.

    It is 0 for a column in which two nodes of a class differ.
    """
    classes, names = y[nodes].unique(return_inverse=True)
    shape = (classes.numel(), columns.numel())
    low, high = x.new_full(shape, torch.inf), x.new_full(shape, -torch.inf)
    for rows in row_chunks(nodes.numel(), max(1, 2**24 // max(1, columns.numel()))):
        part = x[nodes[rows, None], columns]
        at = names[rows, None].expand_as(part)
        low.scatter_reduce_(0, at, part, "amin")
        high.scatter_reduce_(0, at, part, "amax")
    sizes = torch.bincount(names)
    others = (sizes[:, None] * (low != low[sizes.argmax()])).sum(0)
    return others * (low == high).all(0)


def warn_of_graph(data: "Data") -> None:
    """Log what is unusual about a valid graph."""
    warn_of_scale(data.x)
    warn_of_labels_in_features(data)
    warn_of_untaught_classes(data)
    warn_of_missing_edges(data)
    warn_of_edge_weights("data", data.keys())


def warn_of_edge_weights(where: str, names: Iterable[str]) -> None:
    """Warn if one of the ``names`` in a graph is that of numbers of its edges, which nothing here reads."""
    if found := sorted(_OF_EDGES.intersection(Path(name).stem for name in names)):
        logging.getLogger("rbm").warning(
            "%s: %s %s not used, since teachers and encodings treat all edges alike. If weak edges should not count,"
            " leave them out of the edges.",
            *(where, " and ".join(found), "is" if len(found) == 1 else "are"),
        )


def validate_data(data: "Data") -> None:
    """Check that ``data`` can be distilled; the first problem is raised with a way to fix it.

    Expected: ``x`` float32 ``[N, F]``, finite, without gradient, dense or CSR (dense features may be stored as
    float16); ``edge_index`` int64 ``[2, M]`` with ids in ``[0, N)``, messages flowing from row 0 to row 1 (directed
    graphs are left as they are); ``y`` int64 ``[N]``, valid in the masks and possibly -1 outside them; ``train_mask``,
    ``val_mask``, ``test_mask`` bool ``[N]``, not empty, not overlapping.

    Raises:
        TypeError: not a ``Data``, or a tensor of the wrong kind or dtype.
        ValueError: anything else.
    """
    from torch_geometric.data import Data

    if not isinstance(data, Data):
        kind = type(data).__name__
        raise TypeError(
            f"data: got {kind}, expected torch_geometric.data.Data(x, edge_index, y, masks){REMEDIES.get(kind, '')}"
        )
    num_nodes = _check_features(data)
    if data.num_nodes != num_nodes:
        raise ValueError(
            f"data.num_nodes: got {data.num_nodes}, expected {num_nodes}, the number of rows of data.x; delete or"
            " correct it (if it is not set, PyG takes it from an attribute such as pos, n_id or batch)"
        )
    _check_edges(data, num_nodes)
    labels = _tensor(data, "y")
    if labels.shape != (num_nodes,):
        columns = labels.size(1) if labels.dim() == 2 and labels.size(0) == num_nodes else 0
        hint = f"; use data.y.{'squeeze(1)' if columns == 1 else 'argmax(1) of one-hot rows'}" if columns else ""
        raise ValueError(f"data.y: got shape {list(labels.shape)}, expected [{num_nodes}], one class per node{hint}")
    if labels.dtype != torch.int64:
        raise TypeError(f"data.y: got {labels.dtype}, expected torch.int64 class numbers; use data.y.long()")
    _check_masks(data, num_nodes)
    _check_labels(data)


def _tensor(data: "Data", name: str, layouts: tuple[torch.layout, ...] = (torch.strided,)) -> Tensor:
    value = data.get(name)
    if value is None:
        raise ValueError(f"data.{name}: missing, expected a tensor; {_to_set(data, name)}")
    if not isinstance(value, Tensor) or value.layout not in layouts:
        kind = f"a {value.layout} tensor" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(
            f"data.{name}: got {kind}, expected a dense{' or CSR' if layouts[1:] else ''} torch.Tensor"
            f"{_as_tensor(name, value, layouts)}"
        )
    return value


def _to_set(data: "Data", name: str) -> str:
    """Advice on how to set the tensor that is missing."""
    if name == "edge_index" and data.get("adj_t") is not None:
        return "set data.edge_index to torch_geometric.utils.to_edge_index(data.adj_t)[0].flip(0)"
    if name in MASKS:
        split = "torch_geometric.transforms.RandomNodeSplit(num_val=0.2, num_test=0.2)"
        return f"set data.{name}, or draw all masks with {split}(data)"
    return f"set data.{name} before passing the graph"


def _as_tensor(name: str, value: Any, layouts: tuple[torch.layout, ...]) -> str:
    """Advice on how to convert the given value to the expected tensor."""
    if isinstance(value, Tensor):
        return f"; use data.{name}.{'to_sparse_csr' if layouts[1:] else 'to_dense'}()"
    if not isinstance(value, list | tuple) and not (isinstance(value, np.ndarray) and value.ndim):
        return ""
    if len(value) and isinstance(value[0], str):
        return f"; names become class numbers by torch.from_numpy(numpy.unique(data.{name}, return_inverse=True)[1])"
    return f"; use torch.as_tensor(data.{name})"


def first_ids(ids: Tensor, limit: int = 5) -> str:
    """The first numbers of ``ids [n]`` for a message, such as ``"3, 7"``; dots stand for more than ``limit``."""
    shown = ", ".join(str(i) for i in ids[:limit].tolist())
    return shown + (", ..." if ids.numel() > limit else "")


def _check_features(data: "Data") -> int:
    x = _tensor(data, "x", (torch.strided, torch.sparse_csr))
    # Networks are float32, and their layers accept nothing else. Features stored as float16 are converted per batch.
    stored = x.layout == torch.strided and x.dtype == torch.float16
    if x.dtype != torch.float32 and not stored:
        raise TypeError(
            f"data.x: got {x.dtype}, expected torch.float32 features (dense ones may be stored as torch.float16);"
            " use data.x.float()"
        )
    if x.requires_grad:
        raise ValueError("data.x: requires a gradient, expected features that do not; use data.x.detach()")
    if x.dim() != 2 or 0 in x.shape:
        hint = "; use data.x[:, None] for a single feature" if x.dim() == 1 else ""
        raise ValueError(
            f"data.x: got shape {list(x.shape)}, expected [nodes, features] with at least one of each{hint}"
        )
    check_finite_features(x)
    return x.size(0)


def check_finite_features(x: Tensor, what: str = "data.x") -> None:
    """Raise ValueError, which calls the features ``what``, if features ``[N, F]``, dense or CSR, contain NaN or
    infinity.
    """
    if x.layout == torch.strided:
        bad = rows_not_finite(x)
    else:
        rows = SparseRows(x)
        bad = rows.spread(torch.arange(x.size(0), device=x.device))[~torch.isfinite(rows.values)].unique()
    if bad.numel():
        raise ValueError(
            f"{what}: {bad.numel()} of {x.size(0)} nodes have NaN or infinite features (node {first_ids(bad)}), "
            "expected finite numbers of float32, up to 3.4e38; repair or drop these nodes, for example with"
            " torch.nan_to_num, or scale features that are larger"
        )


def _check_edges(data: "Data", num_nodes: int) -> None:
    from torch_geometric import EdgeIndex

    edges = _tensor(data, "edge_index")
    if isinstance(edges, EdgeIndex):  # its operations return results of their own types
        raise TypeError(
            "data.edge_index: got an EdgeIndex of PyG, expected a torch.Tensor; use data.edge_index.as_tensor()"
        )
    if edges.dtype != torch.int64:
        raise TypeError(f"data.edge_index: got {edges.dtype}, expected torch.int64; use data.edge_index.long()")
    if edges.dim() != 2 or edges.size(0) != 2:
        hint = "; use data.edge_index.t()" if edges.dim() == 2 and edges.size(1) == 2 else ""
        raise ValueError(f"data.edge_index: got shape {list(edges.shape)}, expected [2, edges]{hint}")
    if not edges.numel():
        return
    lowest, highest = edges.aminmax()
    if lowest < 0 or highest >= num_nodes:
        bad = ((edges < 0) | (edges >= num_nodes)).any(dim=0).nonzero().flatten()
        source, target = edges[:, bad[0]].tolist()
        raise ValueError(
            f"data.edge_index: {bad.numel()} of {edges.size(1)} edges point outside the graph (edge {first_ids(bad)}; "
            f"edge {bad[0]} is {source} -> {target}), expected node ids from 0 to {num_nodes - 1}; "
            "renumber the nodes or drop these edges"
        )


def _check_masks(data: "Data", num_nodes: int) -> None:
    masks = {name: _tensor(data, name) for name in MASKS}
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            hint = f"data.{name}.bool()"
            if mask.dim() == 1 and (mask.size(0) != num_nodes or mask.max() > 1):  # node ids, as OGB has them
                hint = f"torch_geometric.utils.index_to_mask(data.{name}, {num_nodes})"
            raise TypeError(
                f"data.{name}: got {mask.dtype}, expected torch.bool, True for the nodes of the set; use {hint}"
            )
        if mask.shape != (num_nodes,):
            several = mask.dim() == 2 and mask.size(0) == num_nodes
            hint = f"; choose one of its {mask.size(1)} splits, data.{name}[:, 0]" if several else ""
            raise ValueError(f"data.{name}: got shape {list(mask.shape)}, expected [{num_nodes}]{hint}")
        if not mask.any():
            raise ValueError(f"data.{name}: no node is marked, expected at least one; mark nodes for this set")
    for one, other in (MASKS[:2], MASKS[::2], MASKS[1:]):
        both = (masks[one] & masks[other]).nonzero().flatten()
        if both.numel():
            raise ValueError(
                f"data.{one}: {both.numel()} nodes are in data.{other} as well (node {first_ids(both)}), expected "
                "disjoint sets; clear them in one of the two"
            )


def _check_labels(data: "Data") -> None:
    known = data.get("num_classes")
    if known is not None and (isinstance(known, bool) or not isinstance(known, int) or known < 1):
        raise TypeError(f"data.num_classes: got {known!r}, expected a positive int; set it or delete it")
    if known is not None and known > MOST_CLASSES:
        raise ValueError(f"data.num_classes: got {known}, expected at most {MOST_CLASSES}")
    check_class_numbers("data.y", data.y)
    used = data.train_mask | data.val_mask | data.test_mask
    wrong = (data.y < -1) | ((data.y < 0) & used)
    expected = "class numbers from 0 (-1, unknown, only outside the masks)"
    if known is not None:
        wrong |= data.y >= known
        expected = f"class numbers from 0 to {known - 1} (-1, unknown, only outside the masks)"
    bad = wrong.nonzero().flatten()
    if bad.numel():
        raise ValueError(
            f"data.y: {bad.numel()} labels are out of range (node {first_ids(bad)}; node {bad[0]} has "
            f"{int(data.y[bad[0]])}), expected {expected}; renumber the classes or take these nodes out of the masks"
        )
    if known is None:
        warn_of_absent_classes("data.y", data.y)
