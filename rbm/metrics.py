"""What is measured of a trained model: accuracy, and the time that a prediction takes."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import k_hop_subgraph

from rbm.sparse import Features, as_rows
from rbm.stored import StoredRows
from rbm.students import predict
from rbm.teachers import edges_for, features_for


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of rows of ``logits [B, C]`` whose largest entry is the label, in [0, 1]; NaN for no rows."""
    if labels.numel() == 0:
        return float("nan")
    return (logits.argmax(dim=-1) == labels).sum().item() / labels.numel()


def class_share(groups: Tensor, labels: Tensor) -> float:
    """Share of the nodes whose class is the most frequent one of their group: ``groups [N]`` and ``labels [N]`` are
    integers from 0 on. It is what a classifier could reach that knew a node's group alone; nodes with label -1 do not
    count.
    """
    known = labels >= 0
    counts = torch.zeros(int(groups.max()) + 1, int(labels.max()) + 1, dtype=torch.int64)
    counts.index_put_((groups[known].long(), labels[known]), torch.ones((), dtype=torch.int64), accumulate=True)
    return int(counts.max(dim=1).values.sum()) / int(known.sum())


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode inside, and the mode that the module's owner had chosen afterwards."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


def median_milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Median wall-clock time of ``call`` in milliseconds, after a warm-up call. Waits for a CUDA device."""

    def timed() -> float:
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    timed()
    return statistics.median(timed() for _ in range(repeats))


@torch.no_grad()
def student_latency(student: nn.Module, x: Features, *, repeats: int = 30) -> tuple[float, float]:
    """Milliseconds that a student takes for one node, and for all rows of ``x [N, F]``."""
    x = x if isinstance(x, StoredRows) else as_rows(x)
    one = x[:1]
    with evaluating(student):
        return median_milliseconds(lambda: student(one), repeats), median_milliseconds(lambda: predict(student, x), 3)


@torch.no_grad()
def teacher_latency(teacher: nn.Module, graph: Data, *, num_layers: int, repeats: int = 30) -> tuple[float, float]:
    """Milliseconds that a teacher takes for one node, its neighbourhood gathered, and for all nodes.

    The nodes of the first figure are spread over the graph; each needs its ``num_layers``-hop neighbourhood.
    """
    x, edge_index, all_edges = features_for(teacher, graph.x), graph.edge_index, edges_for(teacher, graph)
    nodes = iter(torch.linspace(0, x.shape[0] - 1, repeats + 1).long().tolist())

    def one_node() -> Tensor:
        subset, edges, position, _ = k_hop_subgraph(
            next(nodes), num_layers, edge_index, relabel_nodes=True, num_nodes=x.shape[0]
        )
        return teacher(x[subset], edges)[position]

    with evaluating(teacher):
        return median_milliseconds(one_node, repeats), median_milliseconds(lambda: teacher(x, all_edges), 3)
