"""The figures of a mixture in a report: load and classes of its experts, and the inputs of its last router."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rbm.distillation.registry import title_of
from rbm.distillation.result import Distillation
from rbm.nn.evaluation import evaluating
from rbm.nn.losses import expert_load
from rbm.nn.sparse_rows import to_dense
from rbm.nn.students import MixtureStudent
from rbm.training.metrics import purity
from rbm.utils.chunks import drawn_rows
from rbm_kernels.ops.cosine_topk.reference import unit

if TYPE_CHECKING:
    from sklearn.decomposition import PCA

MOST_NODES = 20_000
MOST_POINTS = 600


def mixture_of(result: Distillation) -> str | None:
    """The kept student if it is a mixture, otherwise the RbM student, otherwise the last mixture; None without one."""
    mixtures = [method for method, student in result.students.items() if isinstance(student, MixtureStudent)]
    if not mixtures:
        return None
    return next((method for method in (result.method, "rbm") if method in mixtures), mixtures[-1])


@torch.no_grad()
def last_router(result: Distillation, method: str) -> tuple[Tensor, Tensor]:
    """Inputs of a mixture's last router for all nodes, ``[N, H]``, and the top expert of each node, ``[N]``."""
    student, x = result.students[method], result.student_inputs(method)
    with evaluating(student):
        *_, (_, rows) = student.router_inputs(x)
        _, (routings, *_) = student(x, return_trace=True)
    return to_dense(rows).cpu(), routings[-1].experts[:, 0].cpu()


@torch.no_grad()
def observe_experts(result: Distillation, seed: int) -> dict[str, Any] | None:
    """For each layer, the load of the experts and its entropy, their shares of each class, and the dead experts; and
    the last router's inputs in a plane. None if no student is a mixture.

    At most :data:`MOST_NODES` nodes of the graph, drawn with the seed, are used.
    """
    method = mixture_of(result)
    if method is None:
        return None
    student, x, labels = result.students[method], result.student_inputs(method), result.split.graph.y.cpu()
    nodes = drawn_rows(len(labels), MOST_NODES, seed)
    rows, labels = x[nodes.to(x.device)], labels[nodes]
    with evaluating(student):
        _, (routings, *_) = student(rows, return_trace=True)
        *_, (last, seen) = student.router_inputs(rows)
    layers = [_layer(routing, layer, labels) for routing, layer in zip(routings, student.layers, strict=True)]
    seen = to_dense(seen).float().cpu()
    memory = getattr(last, "memory", None)
    return {
        "method": method,
        "title": title_of(method),
        "nodes": len(nodes),
        "of": int(result.split.graph.num_nodes),
        "top_k": int(last.top_k),
        "layers": layers,
        "space": _plane(seen, routings[-1].experts[:, 0].cpu(), labels, memory, seed),
    }


def _layer(routing: Any, layer: Any, labels: Tensor) -> dict[str, Any]:
    experts, gates = routing.experts.cpu().long(), routing.gates.float().cpu()
    load = expert_load(routing, layer.num_experts).cpu().double()
    load = load / load.sum()
    known = labels >= 0
    classes = int(labels.max()) + 1
    mass = torch.zeros(classes, layer.num_experts, dtype=torch.float64)
    columns = experts[known].flatten()
    rows = labels[known].repeat_interleave(experts.shape[1])
    mass.index_put_((rows, columns), gates[known].flatten().double(), accumulate=True)
    by_class = F.normalize(mass, p=1, dim=1)
    row_counts = torch.bincount(experts.flatten(), minlength=layer.num_experts)
    entropy = float(torch.special.entr(load).sum())
    return {
        "in": int(layer.in_features),
        "out": int(layer.out_features),
        "load": _rounded(load),
        "asked": row_counts.tolist(),
        "dead": (row_counts == 0).nonzero().flatten().tolist(),
        "entropy": round(entropy, 5),
        "most_entropy": round(float(np.log(layer.num_experts)), 5),
        "effective": round(float(np.exp(entropy)), 3),
        "purity": round(purity(experts[:, 0], labels), 5),
        "chance": round(purity(torch.zeros_like(experts[:, 0]), labels), 5),
        "by_class": [_rounded(row) for row in by_class],
    }


def _rounded(values: Tensor) -> list[float]:
    return [round(float(value), 5) for value in values]


def fit_components(rows: np.ndarray, parts: int, **options: Any) -> tuple["PCA", np.ndarray]:
    """The PCA of rows ``[n, F]`` with these ``options``, and the rows in its components, ``[n, parts]``."""
    from sklearn.decomposition import PCA

    pca = PCA(parts, **options)
    with np.errstate(invalid="ignore"):  # equal rows have no variance, of which PCA takes shares
        return pca, pca.fit_transform(rows)


def _plane(seen: Tensor, top: Tensor, labels: Tensor, memory: Tensor | None, seed: int) -> dict[str, Any]:
    """The inputs of a router in the plane of their two principal components. Rows are scaled to length one, because
    the router compares directions (cosines). The memory vectors are projected into the same plane.
    """
    from threadpoolctl import threadpool_limits

    drawn = drawn_rows(len(seen), MOST_POINTS, seed)
    rows = unit(seen[drawn]).numpy()
    parts = min(2, *rows.shape)
    solver = "full" if min(rows.shape) < 500 else "randomized"
    with threadpool_limits(limits=1):
        pca, points = fit_components(rows, parts, svd_solver=solver, random_state=seed)
    total = np.nan_to_num(pca.explained_variance_ratio_)
    has_memory = memory is not None and memory.dim() == 2 and memory.shape[1] == seen.shape[1]
    marks = pca.transform(unit(memory.float().cpu()).numpy()) if has_memory else []
    return {
        "width": seen.shape[1],
        "shown": len(drawn),
        "explained": [round(float(share), 4) for share in total] + [0.0] * (2 - parts),
        "points": [[*_pair(point), int(top[i]), int(labels[i])] for point, i in zip(points, drawn, strict=True)],
        "memories": [_pair(mark) for mark in marks],
    }


def _pair(point: np.ndarray) -> list[float]:
    return [round(float(value), 4) for value in point] + [0.0] * (2 - len(point))
