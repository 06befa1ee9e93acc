"""Initial memory vectors: K-means centres of the rows that each router sees, or means of given groups."""

import logging
import warnings
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
from rbm.utils.arguments import check_at_least


def kmeans_memory(rows: Features, num_experts: int, *, seed: int = 0, max_rows: int | None = None) -> Tensor:
    """K-means centres of the directions of rows, of unit length, ``[E, D]`` in float32 on the device of the rows.

    If the rows have fewer distinct directions than there are experts, some centres are equal, which a warning says.

    Args:
        rows: ``[B, D]``, dense or sparse, with ``B >= num_experts``.
        num_experts: ``E``.
        seed: of k-means++ (10 starts).
        max_rows: if there are this many rows or more, fit mini-batch K-means on ``max_rows`` rows drawn at random. By
            default, fit on all rows.

    Raises:
        ValueError: there are fewer rows than experts, ``max_rows`` is below the number of experts, or rows are not
            finite.
    """
    rows = as_rows(rows)
    if max_rows is not None and max_rows < num_experts:
        raise ValueError(f"max_rows is {max_rows}, expected at least {num_experts}, the number of experts")
    if rows.shape[0] < num_experts:
        raise ValueError(
            f"num_experts is {num_experts} but there are only {rows.shape[0]} rows to place memory vectors by;"
            " use fewer experts"
        )
    is_sampled = max_rows is not None and rows.shape[0] >= max_rows
    if is_sampled:
        rows = _sample(rows, max_rows, seed)
    found = _fit(_unit_rows(rows), num_experts, seed, in_mini_batches=is_sampled)
    return F.normalize(torch.from_numpy(found.cluster_centers_).float(), dim=-1).to(rows.device)


def group_nodes(rows: Tensor, num_groups: int, *, seed: int = 0) -> Tensor:
    """K-means groups of rows ``[B, H]``, by Euclidean distance: int64 ``[B]`` in ``[0, num_groups)``.

    If fewer rows than ``num_groups`` are distinct, some groups are empty, which a warning says.

    Raises:
        ValueError: there are fewer rows than groups, or rows are not finite.
    """
    if rows.shape[0] < num_groups:
        raise ValueError(f"num_experts is {num_groups} but there are only {rows.shape[0]} rows to group")
    if not torch.isfinite(rows).all():
        raise ValueError("rows hold NaN or infinity; K-means needs finite rows")
    groups = _fit(rows.detach().float().cpu().numpy(), num_groups, seed).labels_
    return torch.from_numpy(groups).long().to(rows.device)


def _fit(rows: np.ndarray | sp.csr_matrix, num_experts: int, seed: int, *, in_mini_batches: bool = False) -> Any:
    """Fitted K-means of scikit-learn, one group per expert; a warning says if it finds fewer."""
    from sklearn.cluster import KMeans, MiniBatchKMeans  # imported here because it takes most of a second
    from sklearn.exceptions import ConvergenceWarning

    kind = MiniBatchKMeans if in_mini_batches else KMeans
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # about equal rows, in words of scikit-learn
        found = kind(num_experts, n_init=10, random_state=seed).fit(rows)
    if (groups := len(np.unique(found.labels_))) < num_experts:
        logging.getLogger("rbm").warning(
            "memory: K-means finds only %d group%s among the rows of a router with %d experts, so some experts start"
            " without rows of their own. Features with few distinct rows need fewer experts.",
            *(groups, "" if groups == 1 else "s", num_experts),
        )
    return found


def group_memory(rows: Features, groups: Tensor, num_experts: int) -> Tensor:
    """Mean direction of the rows ``[B, D]`` of each group (int64 ``[B]``), of unit length, ``[E, D]``; zero for an
    empty group.
    """
    rows = as_rows(rows)
    equal_gates = torch.ones(rows.shape[0], 1, dtype=rows.dtype, device=rows.device)
    sums, _ = memory_statistics(rows, equal_gates, groups[:, None].int(), num_experts)
    return F.normalize(sums.float(), dim=-1)


def _sample(rows: Rows | HalfPrecisionRows, count: int, seed: int) -> Rows | HalfPrecisionRows:
    """``count`` rows drawn at random, in order, or all if there are no more. The draw depends only on the number of
    rows.
    """
    if rows.shape[0] <= count:
        return rows
    drawn = np.sort(np.random.default_rng(seed).choice(rows.shape[0], count, replace=False))
    return rows[torch.from_numpy(drawn).to(rows.device)]


def _unit_rows(rows: Rows) -> np.ndarray | sp.csr_matrix:
    """Rows of unit length in float32, for scikit-learn."""
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
    """Initialise the memory vectors of every layer of a model with K-means over the rows that arrive at its router.

    This runs one forward in eval mode, like the released code (the paper says only "inputs for each layer"): a layer is
    initialised when its rows arrive, and its new memory routes them for the layers after it. A layer that the forward
    calls several times is initialised at its first call. Call this function once before training.

    Args:
        model: a student, or any module that contains layers that route by memory.
        inputs: input of the model: one value (for a student, rows ``[B, F]``, dense or sparse), a tuple of positional
            arguments, or a mapping of keyword arguments. In a distributed process group, the same on all ranks.
        seed: of K-means and of the random draw, at least 0 and below 2^32.
        max_rows: use only this many entries of the first dimension of the inputs, drawn at random once. If a layer sees
            this many rows or more, mini-batch K-means is fitted on this many of them. All by default.
        groups: int64 ``[B]``, below the number of experts; replaces K-means in each layer. The vector of an expert is
            then the mean direction of the rows of its group, and each layer must see one row per input.

    Raises:
        TypeError: ``seed`` or ``max_rows`` is not a whole number, or ``groups`` is not an int64 tensor.
        ValueError: the model has no such layer or calls none, a layer sees fewer rows than it has experts, rows are
            not finite, ``seed`` or ``max_rows`` is out of range, ``groups`` names an expert that a layer does not have,
            or its length is not the number of a layer's rows.
        RuntimeError: the memory of a layer is parametrised.
    """
    if (seed := check_at_least("seed", seed, 0)) >= 2**32:
        raise ValueError(f"seed is {seed}, expected below 2^32")
    if groups is not None and (not isinstance(groups, Tensor) or groups.dtype != torch.int64 or groups.dim() != 1):
        found = f"{groups.dtype} {list(groups.shape)}" if isinstance(groups, Tensor) else f"a {type(groups).__name__}"
        raise TypeError(f"groups are {found}, expected an int64 tensor [B]")
    if max_rows is not None:
        max_rows = check_at_least("max_rows", max_rows, 1)
        inputs = sample_inputs(inputs, max_rows, seed)
        groups = None if groups is None else _sample(groups, max_rows, seed)

    def place(name: str, layer: MemoryRouter, rows: Rows) -> None:
        layer.check_memory_is_stored("initialize_memory() writes", "initialise before parametrising, or ")
        if groups is None:
            centers = kmeans_memory(rows, layer.num_experts, seed=seed, max_rows=max_rows)
        elif len(groups) != rows.shape[0]:
            raise ValueError(
                f"groups are {len(groups)} and layer {name!r} sees {rows.shape[0]} rows, expected one group a row"
            )
        elif len(groups) and (int(groups.min()) < 0 or int(groups.max()) >= layer.num_experts):
            raise ValueError(
                f"groups hold {int(groups.min())} to {int(groups.max())}, expected between 0 and"
                f" {layer.num_experts - 1}, the experts of layer {name!r}"
            )
        else:
            centers = group_memory(rows, groups, layer.num_experts)
        _place(layer, centers)

    visit_router_inputs(model, inputs, place)


def sample_inputs(inputs: Any, count: int, seed: int) -> Any:
    """``count`` entries of the first dimension of a model's inputs, the same ones in each argument."""
    if isinstance(inputs, Mapping):
        return {name: sample_inputs(value, count, seed) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list) and not is_sparse_pair(inputs):
        return tuple(sample_inputs(value, count, seed) for value in inputs)
    if isinstance(inputs, HalfPrecisionRows):
        return _sample(inputs, count, seed)
    rows = as_rows(inputs) if isinstance(inputs, Tensor | SparseRows | tuple | list) else None
    return inputs if rows is None or len(rows.shape) == 0 else _sample(rows, count, seed)


def _place(layer: MemoryRouter, centers: Tensor) -> None:
    # K-means leaves a centre at zero when rows are zero or there are fewer directions than experts. A zero vector has
    # no direction, so the layer keeps its random one.
    placed = centers.norm(dim=-1, keepdim=True) > 0
    layer.memory.copy_(torch.where(placed, centers.to(layer.memory.dtype), layer.memory))
