"""Splits: which nodes train, validate and test a student, and which nodes training may see.

The paper has two settings. *Transductive*: training sees the whole graph, and only the labels of validation and test
nodes are hidden. *Inductive*: some test nodes are hidden with all their edges. Training sees the remaining graph, and
the hidden ("unseen") nodes arrive afterwards, like new users of a deployed model.
"""

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rbm.config import SETTINGS, Config
from rbm.datasets.registry import UNSEEN_FRACTION
from rbm.datasets.validation import num_classes
from rbm.nn.half_rows import HalfPrecisionRows
from rbm.nn.sparse_rows import Rows, SparseRows, packed
from rbm.utils.arguments import check_at_least, check_number

if TYPE_CHECKING:
    from torch_geometric.data import Data

_GENERATORS = {"pcg64": np.random.default_rng, "mt19937": np.random.RandomState}


@dataclass(frozen=True, eq=False)
class GraphSplit:
    """A graph, and the part of it that training may see.

    Attributes:
        setting: ``"transductive"`` or ``"inductive"``.
        graph: the full graph.
        observed: what training may see, with its own masks; the same object as ``graph`` when transductive.
        observed_nodes: int64 ``[n_observed]``; row ``i`` of ``observed`` is node ``observed_nodes[i]`` of ``graph``.
        unseen_nodes: int64 ``[n_unseen]``, ascending ids in ``graph`` of the test nodes hidden from training.
    """

    setting: str
    graph: "Data"
    observed: "Data"
    observed_nodes: Tensor
    unseen_nodes: Tensor

    @cached_property
    def full_rows(self) -> Rows | HalfPrecisionRows:
        """Features of all nodes in a form for repeated passes, made once: see ``nn.sparse_rows.packed``."""
        return packed(self.graph.x)

    @cached_property
    def observed_rows(self) -> Rows | HalfPrecisionRows:
        """The same for the observed nodes."""
        return self.full_rows if self.observed is self.graph else packed(self.observed.x)

    def of_observed(self, rows: Tensor) -> Tensor:
        """The observed nodes' part of ``rows [N, ...]`` of all nodes: no copy if all nodes are observed."""
        return rows if self.observed is self.graph else rows[self.observed_nodes]


def split_for(config: Config, data: "Data", *, unseen_fraction: float | None = None) -> GraphSplit:
    """The split of a run by its setting and seed, without the test set if the run evaluates on validation nodes.

    Arguments and errors are those of :func:`split_graph`.
    """
    if config.evaluate_on == "validation":
        data = without_test_set(data, config.setting, unseen_fraction=unseen_fraction, seed=config.seed)
        unseen_fraction = None
    return split_graph(data, config.setting, unseen_fraction=unseen_fraction, seed=config.seed)


def split_graph(
    data: "Data", setting: str = "transductive", *, unseen_fraction: float | None = None, seed: int = 0
) -> GraphSplit:
    """Hide a part of the test nodes from training (inductive), or nothing (transductive).

    The unseen nodes are the first ``int(unseen_fraction * n_test)`` entries of ``torch.randperm(n_test)`` under
    ``seed``, used as positions in the ascending list of test nodes, as in the code of RbM, GLNN, NOSMOG and CoHOp.
    With ``unseen_fraction=1.0`` (Planetoid's protocol), every test node is unseen, and ``observed`` has no test nodes.
    Observed nodes are renumbered in the order training, validation, observed test, other nodes, each ascending. No edge
    of ``observed`` touches an unseen node.

    Args:
        data: a graph with ``train_mask``, ``val_mask`` and ``test_mask`` (see ``rbm.datasets.validate_data``).
        setting: ``"transductive"`` or ``"inductive"``.
        unseen_fraction: share of the test nodes to hide, in (0, 1]; checked but unused when transductive. By default
            ``data.unseen_fraction``, which :func:`rbm.datasets.load_dataset` sets, or a fifth if the graph has none.
        seed: seed of the permutation; unused when transductive.

    Raises:
        TypeError: the fraction is not a number.
        ValueError: an unknown setting, a fraction outside (0, 1], or a fraction that hides no node.
    """
    if setting not in SETTINGS:
        raise ValueError(f"setting: got {setting!r}, expected one of {', '.join(SETTINGS)}")
    if unseen_fraction is not None:
        _check_fraction("unseen_fraction", unseen_fraction)
    num_nodes = data.num_nodes
    if setting == "transductive":
        empty = torch.empty(0, dtype=torch.int64)
        return GraphSplit(setting, data, data, torch.arange(num_nodes), empty)

    if unseen_fraction is None:
        unseen_fraction = data.get("unseen_fraction", UNSEEN_FRACTION)
        is_tensor = isinstance(unseen_fraction, Tensor)
        _check_fraction("data.unseen_fraction", unseen_fraction.item() if is_tensor else unseen_fraction)
    test_nodes = _nodes(data.test_mask)
    count = int(unseen_fraction * test_nodes.numel())
    if count == 0:
        raise ValueError(
            f"unseen_fraction: {unseen_fraction} of {test_nodes.numel()} test nodes hides no node at all; "
            "mark more test nodes (data.test_mask), or in Python pass a larger unseen_fraction"
        )
    permutation = torch.randperm(test_nodes.numel(), generator=torch.Generator().manual_seed(seed))
    unseen = test_nodes[permutation[:count]].sort().values

    observed_test = data.test_mask.cpu().clone()
    observed_test[unseen] = False
    other = ~(data.train_mask | data.val_mask | data.test_mask)
    observed_nodes = torch.cat([_nodes(mask) for mask in (data.train_mask, data.val_mask, observed_test, other)])
    return GraphSplit(setting, data, _induced_subgraph(data, observed_nodes), observed_nodes, unseen)


def _check_fraction(name: str, share: float) -> None:
    check_number(name, share, lambda share: 0 < share <= 1, "a number in (0, 1]")


def without_test_set(
    data: "Data", setting: str = "transductive", *, unseen_fraction: float | None = None, seed: int = 0
) -> "Data":
    """A graph for choosing hyperparameters: half of the validation nodes, drawn by the seed, become its test nodes.

    The nodes that :func:`split_graph` would hide are removed with their edges, and the labels of the other test nodes
    are set to -1, so the choice cannot depend on the test set. The ``unseen_fraction`` of the result is 1: in the
    inductive setting all its test nodes are hidden, and so arrive as unseen nodes. Arguments and errors are those of
    :func:`split_graph`.
    """
    observed = split_graph(data, setting, unseen_fraction=unseen_fraction, seed=seed).observed
    return halved(observed, num_classes(data), seed)


def halved(observed: "Data", classes: int, seed: int, *, other: bool = False) -> "Data":
    """Make the graph of :func:`without_test_set` from an observed graph; the seed draws half of the validation nodes.

    With ``other``, the half that was not drawn becomes the test nodes; if the number of nodes is odd, it has one more.

    Raises:
        ValueError: there is only one validation node.
    """
    graph = copy.copy(observed)
    validation = _nodes(graph.val_mask)
    if validation.numel() < 2:
        raise ValueError("data.val_mask: 1 node is marked, expected at least 2 to set half of them apart")
    permutation = torch.randperm(validation.numel(), generator=torch.Generator().manual_seed(seed))
    graph.num_classes = classes
    graph.y = graph.y.masked_fill(graph.test_mask, -1)
    graph.test_mask = torch.zeros_like(graph.val_mask)
    middle = validation.numel() // 2
    graph.test_mask[validation[permutation[middle:] if other else permutation[:middle]]] = True
    graph.val_mask = graph.val_mask & ~graph.test_mask
    graph.unseen_fraction = 1.0
    return graph


def _nodes(mask: Tensor) -> Tensor:
    return mask.nonzero().flatten().cpu()


def _induced_subgraph(data: "Data", nodes: Tensor) -> "Data":
    """The subgraph on ``nodes``, its rows in exactly that order (PyG's ``Data.subgraph`` keeps ascending order).

    As there, PyG's rules tell which attributes have an entry per node or edge, and in which dimension: the last one if
    the name contains "index", else the first. Node ids in attributes other than ``edge_index`` stay those of ``data``.
    """
    from torch_geometric.data import Data

    nodes = nodes.to(data.edge_index.device)
    new_id = torch.full((data.num_nodes,), -1, dtype=torch.int64, device=nodes.device)
    new_id[nodes] = torch.arange(nodes.numel(), device=nodes.device)
    edges = new_id[data.edge_index]
    kept = (edges >= 0).all(dim=0)

    observed = Data()
    for key, value in data:
        if key == "edge_index":
            observed.edge_index = edges[:, kept]
        elif key == "num_nodes":
            observed.num_nodes = nodes.numel()
        elif data.is_node_attr(key):
            observed[key] = _selected(value, nodes, data.__cat_dim__(key, value))
        elif data.is_edge_attr(key):
            observed[key] = _selected(value, kept.nonzero().flatten(), data.__cat_dim__(key, value))
        else:
            observed[key] = value
    return observed


def _selected(value: Any, positions: Tensor, dim: int) -> Any:
    """The entries of an attribute, such as a tensor or a list of names, at int64 positions of one of its dimensions."""
    if isinstance(value, list | tuple):
        return [value[position] for position in positions.tolist()]
    if isinstance(value, np.ndarray):
        return value.take(positions.cpu().numpy(), axis=dim)
    if isinstance(value, Tensor) and value.layout == torch.sparse_csr:  # PyTorch cannot index it
        return SparseRows(value)[positions].to_csr()
    return value.index_select(dim, positions) if isinstance(value, Tensor) else value[positions]


def per_class_masks(
    labels: Tensor,
    *,
    seed: int = 0,
    train_per_class: int = 20,
    val_per_class: int = 30,
    split_rng: str = "pcg64",
    small_classes: str = "error",
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a training and a validation set with the same number of nodes per class; the rest is the test set.

    For each class in ascending order, ``train_per_class`` of its nodes are drawn without replacement. Then, again class
    by class, ``val_per_class`` of the remaining nodes are drawn.

    Args:
        labels: int64 ``[N]``; nodes with a negative (unknown) label are in no set.
        seed: seed of the generator.
        train_per_class: training nodes per class.
        val_per_class: validation nodes per class.
        split_rng: ``"pcg64"`` (NumPy's ``default_rng(seed)``) gives the splits of the RbM code, ``"mt19937"``
            (``RandomState(seed)``) those of GLNN and NOSMOG.
        small_classes: how to treat a class that cannot fill both sets and leave a test node. ``"error"`` raises.
            ``"share"`` uses one node for testing and divides the others between training and validation in proportion
            to the sizes above, rounded down for training, with at least one training node. With 11 nodes, 4 are for
            training and 6 for validation; with two, one is for training and one for testing; a single node is for
            training.

    Returns:
        Training, validation and test mask, bool ``[N]`` each.

    Raises:
        TypeError: the seed is not a whole number.
        ValueError: an unknown option, a negative seed, no labels, or a class that is too small.
    """
    if split_rng not in _GENERATORS:
        raise ValueError(f"split_rng: got {split_rng!r}, expected one of {', '.join(_GENERATORS)}")
    check_at_least("seed", seed, 0)
    if small_classes not in ("error", "share"):
        raise ValueError(f"small_classes: got {small_classes!r}, expected error or share")
    generator = _GENERATORS[split_rng](seed)
    classes = labels.cpu().numpy()
    free = classes >= 0
    if not free.any():
        raise ValueError("labels: no node has one (a class number from 0); a split by class needs some")
    numbers, counts = np.unique(classes[free], return_counts=True)
    both = train_per_class + val_per_class
    if small_classes == "error" and counts.min() <= both:
        smallest = counts.argmin()
        raise ValueError(
            f"labels: class {numbers[smallest]} has {counts[smallest]} nodes, expected more than {both} "
            f"({train_per_class} for training, {val_per_class} for validation, the rest for testing); "
            "use a larger graph, smaller train_per_class and val_per_class, or small_classes='share'"
        )
    shared = np.maximum(counts - 1, 1)
    train = np.where(counts > both, train_per_class, np.maximum(1, shared * train_per_class // both))
    val = np.where(counts > both, val_per_class, shared - train)
    masks = []
    for sizes in (train, val):
        candidates = [np.flatnonzero((classes == number) & free) for number in numbers]
        drawn = [generator.choice(nodes, size, replace=False) for nodes, size in zip(candidates, sizes, strict=True)]
        mask = np.zeros(classes.size, dtype=bool)
        mask[np.concatenate(drawn)] = True
        free &= ~mask
        masks.append(torch.from_numpy(mask))
    return masks[0], masks[1], torch.from_numpy(free)
