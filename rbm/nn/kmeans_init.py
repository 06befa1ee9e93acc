"""Where the memory vectors start: at the K-means centres of what each router sees, or at the means of given groups."""

import numpy as np
import scipy.sparse as sp
import torch
from sklearn.cluster import KMeans, MiniBatchKMeans
from torch import Tensor
from torch.nn import functional as F

from rbm.nn.half_rows import HalfPrecisionRows
from rbm.nn.rbm_layer import FusedRbMLayer
from rbm.nn.sparse_rows import Features, Rows, as_rows, memory_statistics
from rbm.nn.students import RbMStudent


def kmeans_memory(rows: Features, num_experts: int, *, seed: int = 0, max_rows: int | None = None) -> Tensor:
    """K-means centres of the rows' directions, unit length, ``[E, D]`` in float32 on the rows' device.

    Args:
        rows: ``[B, D]``, dense or sparse, at least ``num_experts`` of them.
        num_experts: ``E``.
        seed: of k-means++ (10 starts).
        max_rows: where there are so many or more, fit on that many drawn at random, and by mini-batches; on all by
            default.

    Raises:
        ValueError: fewer rows than experts, or rows that are not finite.
    """
    rows = as_rows(rows)
    if rows.shape[0] < num_experts:
        raise ValueError(
            f"num_experts is {num_experts} but there are only {rows.shape[0]} rows to place memory vectors by;"
            " use fewer experts"
        )
    kind: type[KMeans | MiniBatchKMeans] = KMeans
    if max_rows is not None and rows.shape[0] >= max_rows:
        rows, kind = _sample(rows, max_rows, seed), MiniBatchKMeans
    centers = kind(num_experts, n_init=10, random_state=seed).fit(_unit_rows(rows)).cluster_centers_
    return F.normalize(torch.from_numpy(centers).float(), dim=-1).to(rows.device)


def group_nodes(told_apart_by: Tensor, num_groups: int, *, seed: int = 0) -> Tensor:
    """K-means groups of rows ``[B, H]``, by Euclidean distance: int64 ``[B]`` in ``[0, num_groups)``.

    Raises:
        ValueError: fewer rows than groups, or rows that are not finite.
    """
    if told_apart_by.shape[0] < num_groups:
        raise ValueError(f"num_experts is {num_groups} but there are only {told_apart_by.shape[0]} rows to group")
    if not torch.isfinite(told_apart_by).all():
        raise ValueError("rows hold NaN or infinity; K-means needs finite rows")
    groups = KMeans(num_groups, n_init=10, random_state=seed).fit_predict(told_apart_by.detach().float().cpu().numpy())
    return torch.from_numpy(groups).long().to(told_apart_by.device)


def group_memory(rows: Features, groups: Tensor, num_experts: int) -> Tensor:
    """Mean direction of the rows ``[B, D]`` of each group (int64 ``[B]``), unit length, ``[E, D]``; zero of none."""
    rows = as_rows(rows)
    alike = torch.ones(rows.shape[0], 1, dtype=rows.dtype, device=rows.device)
    sums, _ = memory_statistics(rows, alike, groups[:, None].int(), num_experts)
    return F.normalize(sums.float(), dim=-1)


def _sample(rows: Rows | HalfPrecisionRows | Tensor, count: int, seed: int) -> Rows | HalfPrecisionRows | Tensor:
    """So many rows drawn at random, in their order; all where there are no more. Alike for all that have as many."""
    if rows.shape[0] <= count:
        return rows
    drawn = np.sort(np.random.default_rng(seed).choice(rows.shape[0], count, replace=False))
    return rows[torch.from_numpy(drawn).to(rows.device)]


def _unit_rows(rows: Rows) -> np.ndarray | sp.csr_matrix:
    """Rows of unit length in float32, as scikit-learn takes them."""
    parts = [rows] if isinstance(rows, Tensor) else [rows.values, *([] if rows.dense is None else [rows.dense])]
    if not all(torch.isfinite(part).all() for part in parts):
        raise ValueError("rows hold NaN or infinity; K-means needs finite rows")
    if isinstance(rows, Tensor):
        return F.normalize(rows.detach().float(), dim=-1).cpu().numpy()
    rows = rows.to("cpu", torch.float32)
    norms = rows.squared_norms().detach().sqrt().clamp_min(1e-12)
    values = rows.values / rows.spread(norms)
    shape = (rows.shape[0], rows.width)
    unit = sp.csr_matrix((values.numpy(), rows.col.numpy(), rows.crow.numpy()), shape)
    if rows.dense is None:
        return unit
    return sp.hstack([unit, sp.csr_matrix((rows.dense.detach() / norms[:, None]).numpy())], format="csr")


@torch.no_grad()
def initialize_memory(
    student: RbMStudent, x: Features, *, seed: int = 0, max_rows: int | None = None, groups: Tensor | None = None
) -> None:
    """Place every layer's memory vectors, first layer first, by the rows ``x [B, F]`` as they arrive at each router.

    A layer that has its memory routes the rows to the next one, in eval mode, as the released code does (the paper says
    only "inputs for each layer"). With ``max_rows`` that many rows, drawn at random once, stand for all. ``groups``
    (int64 ``[B]``, below the number of experts) take the place of each layer's K-means: an expert's vector is the mean
    direction of its group's rows.
    """
    x = x if isinstance(x, HalfPrecisionRows) else as_rows(x)
    if max_rows is not None:
        x = _sample(x, max_rows, seed)
        groups = None if groups is None else _sample(groups, max_rows, seed)
    training = student.training
    student.eval()
    for layer, rows in student.router_inputs(x):
        if groups is None:
            centers = kmeans_memory(rows, layer.num_experts, seed=seed, max_rows=max_rows)
        else:
            centers = group_memory(rows, groups, layer.num_experts)
        _place(layer, centers)
    student.train(training)


def _place(layer: FusedRbMLayer, centers: Tensor) -> None:
    # K-means leaves a centre at zero when rows are zero or fewer directions than experts exist. Such a vector has no
    # direction to be near to; the layer's random start has one.
    placed = centers.norm(dim=-1, keepdim=True) > 0
    layer.memory.copy_(torch.where(placed, centers.to(layer.memory.dtype), layer.memory))
