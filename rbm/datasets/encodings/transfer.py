"""Encodings of nodes that arrive after training: the mean of their neighbours' encodings."""

import numpy as np
import torch
from torch import Tensor

from rbm.datasets.encodings.graph import check_edges, in_matrix

FILLS = ("observed_mean", "all_mean")
_COLUMNS_AT_ONCE = 256


@torch.no_grad()
def transfer(
    observed: Tensor, observed_nodes: Tensor, edge_index: Tensor, num_nodes: int, fill: str = "observed_mean"
) -> Tensor:
    """Encodings for all nodes of the full graph: observed nodes keep theirs, unseen nodes get their neighbours' mean.

    Neighbours of a node are the sources of its incoming edges; a duplicate edge counts twice. The mean is taken once,
    not over several hops, so unseen neighbours contribute nothing. A node without observed neighbours gets zeros.

    Args:
        observed: ``[n_observed, d]``, floating.
        observed_nodes: int64 ``[n_observed]``; row ``i`` of ``observed`` belongs to this node of the full graph.
        edge_index: int64 ``[2, M]``, the full graph.
        num_nodes: N, the number of nodes of the full graph.
        fill: ``"observed_mean"`` averages over observed neighbours only; ``"all_mean"`` averages over all neighbours,
            counting unseen ones (and the node itself, if it has a self-loop) as zeros. The latter is what the released
            code does; it makes the mean shorter.

    Returns:
        ``[N, d]`` with the dtype and on the device of ``observed``.

    Raises:
        TypeError: ``observed`` is not floating, or ids are not int64.
        ValueError: another shape, ids outside the graph or repeated, or an unknown ``fill``.
    """
    _check(observed, observed_nodes, num_nodes, fill)
    check_edges(edge_index, num_nodes)
    row = np.full(num_nodes, -1, np.int64)  # the row of each observed node in `observed`
    row[observed_nodes.cpu().numpy()] = np.arange(observed.shape[0])
    unseen = np.flatnonzero(row < 0)
    new_row = np.empty(num_nodes, np.int64)
    new_row[unseen] = np.arange(unseen.size)

    sources, targets = edge_index.cpu().numpy()
    arriving = row[targets] < 0
    sources, targets = row[sources[arriving]], new_row[targets[arriving]]
    giving = sources >= 0
    matrix = in_matrix(sources[giving], targets[giving], (unseen.size, observed.shape[0]), np.float64)
    counted = targets[giving] if fill == "observed_mean" else targets
    counts = np.maximum(np.bincount(counted, minlength=unseen.size), 1)[:, None]

    full = observed.new_zeros(num_nodes, observed.shape[1])
    full[observed_nodes.to(observed.device)] = observed
    unseen = torch.from_numpy(unseen).to(observed.device)
    # Some columns at a time: a float64 copy of propagated bags of words takes gigabytes.
    for first in range(0, observed.shape[1], _COLUMNS_AT_ONCE):
        columns = slice(first, first + _COLUMNS_AT_ONCE)
        means = matrix @ observed[:, columns].detach().cpu().double().numpy() / counts
        full[unseen, columns] = torch.from_numpy(means).to(observed)
    return full


def _check(observed: Tensor, observed_nodes: Tensor, num_nodes: int, fill: str) -> None:
    if fill not in FILLS:
        raise ValueError(f"fill: got {fill!r}, expected one of {', '.join(FILLS)}")
    if not observed.is_floating_point():
        raise TypeError(f"observed: got {observed.dtype}, expected a floating dtype; use observed.float()")
    if observed.dim() != 2:
        raise ValueError(f"observed: got shape {list(observed.shape)}, expected [observed nodes, width]")
    if observed_nodes.dtype != torch.int64:
        raise TypeError(f"observed_nodes: got {observed_nodes.dtype}, expected torch.int64; use observed_nodes.long()")
    if observed_nodes.shape != observed.shape[:1]:
        raise ValueError(
            f"observed_nodes: got shape {list(observed_nodes.shape)}, expected [{observed.shape[0]}], one id for each"
            " row of observed"
        )
    if observed_nodes.numel() == 0:
        return
    low, high = int(observed_nodes.min()), int(observed_nodes.max())
    if low < 0 or high >= num_nodes:
        raise ValueError(f"observed_nodes: got ids from {low} to {high}, expected 0 to {num_nodes - 1}")
    if observed_nodes.unique().numel() < observed_nodes.numel():
        raise ValueError("observed_nodes: some ids are there twice, expected one row for each node; drop the others")
