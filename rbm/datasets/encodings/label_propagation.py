"""Label propagation: the share of each class near a node, computed from the labels of training nodes only.

By default, a node's own label can return to it from hop two on; see ``exclude_self`` of :func:`label_propagation`.
"""

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from rbm.datasets.encodings.graph import check_edges, in_matrix

# Numbers held in memory at a time with exclude_self: 256 MB.
_COLUMN_NUMBERS = 2**25


def label_propagation(
    edge_index: Tensor,
    labels: Tensor,
    train_mask: Tensor,
    num_classes: int,
    *,
    decay: float = 0.1,
    hops: int = 10,
    exclude_self: bool = False,
    self_loops: bool = False,
) -> Tensor:
    """Propagate the labels of training nodes along the edges.

    With ``P = D_in^{-1} A`` and ``Y`` the one-hot labels of training nodes (other rows zero)::

        L <- P (decay Y);  hops - 1 times: L <- L + P (decay L);  L = (I + decay P)^{hops-1} decay P Y =: M Y

    and each row is divided by its sum plus 1e-6. A repeated edge counts as often as it occurs. By default, a node's own
    label can return through a neighbour from hop two on; without self-loops, it does not reach the node at hop one.
    ``exclude_self`` removes all such paths: row ``i`` is ``sum_{j != i} M_ij Y_j``, so a node's row is bitwise
    independent of its own label. Rows of nodes outside ``train_mask`` stay the same up to rounding. This option costs
    as much as ``n_train / num_classes`` propagations.

    Args:
        edge_index: int64 ``[2, M]``; labels flow from row 0 to row 1.
        labels: int64 ``[N]``. Only those under ``train_mask`` are read; the others may have any value.
        train_mask: bool ``[N]``.
        num_classes: C.
        decay: the factor per hop.
        hops: number of propagations, at least 1.
        exclude_self: exclude each node's own label from its row.
        self_loops: add a self-loop to every node, through which each training node receives its own label (as the
            released code does on Planetoid and OGB). False also removes the self-loops of the graph.

    Returns:
        float32 ``[N, C]`` on the CPU; a row sums to almost 1, or to 0 if no label reaches the node.

    Raises:
        TypeError: a wrong dtype.
        ValueError: another shape, ids or training labels out of range, or a number out of range.
    """
    num_nodes = labels.shape[0]
    check_edges(edge_index, num_nodes)
    _check(labels, train_mask, num_classes, decay, hops)
    nodes = train_mask.nonzero().flatten().cpu().numpy()
    classes = labels[train_mask].cpu().numpy()
    step = _step(edge_index, num_nodes, decay, self_loops)
    if exclude_self:
        spread = _without_own(step, hops, nodes, classes, num_classes)
    else:
        start = np.zeros((num_nodes, num_classes))
        start[nodes, classes] = 1.0
        spread = _propagate(step, hops, start)
    return torch.from_numpy(spread / (spread.sum(axis=1, keepdims=True) + 1e-6)).float()


def _step(edge_index: Tensor, num_nodes: int, decay: float, self_loops: bool) -> sp.csr_matrix:
    """``decay P`` in float64."""
    from torch_geometric.utils import add_self_loops, remove_self_loops

    edges = edge_index.cpu()
    edges, _ = add_self_loops(edges, num_nodes=num_nodes) if self_loops else remove_self_loops(edges)
    sources, targets = edges.numpy()
    degrees = np.bincount(targets, minlength=num_nodes)
    scale = sp.diags(decay / np.maximum(degrees, 1))
    return (scale @ in_matrix(sources, targets, (num_nodes, num_nodes), np.float64)).tocsr()


def _propagate(step: sp.csr_matrix, hops: int, start: np.ndarray) -> np.ndarray:
    spread = step @ start
    for _ in range(hops - 1):
        spread = spread + step @ spread
    return spread


def _without_own(
    step: sp.csr_matrix, hops: int, nodes: np.ndarray, classes: np.ndarray, num_classes: int
) -> np.ndarray:
    """``sum_{j != i} M_ij Y_j``, by columns of ``M``: subtracting ``M_ii`` afterwards would leave a rounding error."""
    num_nodes = step.shape[0]
    spread = np.zeros((num_nodes, num_classes))
    width = max(1, min(256, _COLUMN_NUMBERS // max(num_nodes, 1)))
    for begin in range(0, nodes.size, width):
        some, column = nodes[begin : begin + width], np.arange(nodes[begin : begin + width].size)
        start = np.zeros((num_nodes, some.size))
        start[some, column] = 1.0
        columns = _propagate(step, hops, start)
        columns[some, column] = 0.0
        targets = np.zeros((some.size, num_classes))
        targets[column, classes[begin : begin + width]] = 1.0
        spread += columns @ targets
    return spread


def _check(labels: Tensor, train_mask: Tensor, num_classes: int, decay: float, hops: int) -> None:
    if labels.dtype != torch.int64:
        raise TypeError(f"labels: got {labels.dtype}, expected torch.int64 class numbers; use labels.long()")
    if train_mask.dtype != torch.bool:
        raise TypeError(f"train_mask: got {train_mask.dtype}, expected torch.bool, True for training nodes")
    if labels.dim() != 1 or train_mask.shape != labels.shape:
        raise ValueError(
            f"train_mask: got shape {list(train_mask.shape)} with labels of shape {list(labels.shape)}, expected [N]"
            " for both"
        )
    if not decay > 0:
        raise ValueError(f"decay: got {decay}, expected a positive number")
    if hops < 1:
        raise ValueError(f"hops: got {hops}, expected at least 1")
    known = labels[train_mask]
    if known.numel() and not (int(known.min()) >= 0 and int(known.max()) < num_classes):
        raise ValueError(
            f"labels: training nodes have classes from {int(known.min())} to {int(known.max())}, expected 0 to"
            f" {num_classes - 1}; renumber the classes or take these nodes out of train_mask"
        )
