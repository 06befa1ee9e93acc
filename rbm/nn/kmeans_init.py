"""Initial memory vectors: K-means centres of the rows that each router sees, or the means of given groups."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rbm.nn.half_rows import HalfPrecisionRows
from rbm.nn.memory_router import MemoryRouter
from rbm.nn.routing_record import is_sparse_pair, visit_router_inputs
from rbm.nn.sparse_rows import Features, Rows, SparseRows, as_rows, memory_statistics


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
    from sklearn.cluster import KMeans, MiniBatchKMeans  # most of a second, which others are spared

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
    from sklearn.cluster import KMeans

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
    model: nn.Module, inputs: Any, *, seed: int = 0, max_rows: int | None = None, groups: Tensor | None = None
) -> None:
    """Place the memory vectors of every layer of a model by K-means over the rows that arrive at its router.

    One forward in eval mode does it, as the released code does (the paper says only "inputs for each layer"): a layer
    is placed when its rows arrive, and routes them by its new memory to the layers after it. A layer that the forward
    calls several times is placed by its first call. Call it once before training.

    Args:
        model: a student, or any module with layers that route by memory in it.
        inputs: what the model takes: one value (of a student rows ``[B, F]``, dense or sparse), a tuple of positional
            arguments, or a mapping of keyword arguments.
        seed: of K-means, and of what is drawn.
        max_rows: that many of the first dimension of the inputs, drawn at random once, stand for all; where a layer
            sees so many rows or more, K-means takes that many of them, by mini-batches. All by default.
        groups: int64 ``[B]``, below the number of experts, takes the place of each layer's K-means: an expert's vector
            is the mean direction of its group's rows. Each layer then sees one row for each of the inputs.

    Raises:
        ValueError: the model has no such layer or calls none, a layer sees fewer rows than it has experts, rows are
            not finite, or ``groups`` are not as many as a layer's rows.
    """
    if max_rows is not None:
        inputs = sample_inputs(inputs, max_rows, seed)
        groups = None if groups is None else _sample(groups, max_rows, seed)

    def place(name: str, layer: MemoryRouter, rows: Rows) -> None:
        if groups is None:
            centers = kmeans_memory(rows, layer.num_experts, seed=seed, max_rows=max_rows)
        elif len(groups) != rows.shape[0]:
            raise ValueError(
                f"groups are {len(groups)} and layer {name!r} sees {rows.shape[0]} rows, expected one group a row"
            )
        else:
            centers = group_memory(rows, groups, layer.num_experts)
        _place(layer, centers)

    visit_router_inputs(model, inputs, place)


def sample_inputs(inputs: Any, count: int, seed: int) -> Any:
    """So many of the first dimension of what a model takes, the same of each of its arguments."""
    if isinstance(inputs, Mapping):
        return {name: sample_inputs(value, count, seed) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list) and not is_sparse_pair(inputs):
        return tuple(sample_inputs(value, count, seed) for value in inputs)
    if isinstance(inputs, HalfPrecisionRows):
        return _sample(inputs, count, seed)
    rows = as_rows(inputs) if isinstance(inputs, Tensor | SparseRows | tuple | list) else None
    return inputs if rows is None or len(rows.shape) == 0 else _sample(rows, count, seed)


def _place(layer: MemoryRouter, centers: Tensor) -> None:
    # K-means leaves a centre at zero when rows are zero or fewer directions than experts exist. Such a vector has no
    # direction to be near to; the layer's random start has one.
    placed = centers.norm(dim=-1, keepdim=True) > 0
    layer.memory.copy_(torch.where(placed, centers.to(layer.memory.dtype), layer.memory))
