"""Timers of predictions: of a student from rows, of a teacher from node ids.

Times are wall-clock milliseconds of consecutive calls. The rows of a student are available before the clock starts. A
teacher gets node ids, and its time includes gathering their neighbourhood.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import k_hop_subgraph

from rbm.nn.evaluation import evaluating
from rbm.nn.half_rows import HalfPrecisionRows
from rbm.nn.sparse_rows import Features, as_rows
from rbm.nn.students import predict
from rbm.teachers import Teacher, edges_for, features_for

# Slow calls are timed at least this often, however long it takes: percentiles of fewer times mean nothing.
_FEWEST = 20
_REPEATS = 30  # calls for one node, of which a run reports the median


def milliseconds(
    call: Callable[[Any], object], inputs: Iterator[Any], repeats: int, *, seconds: float = float("inf")
) -> list[float]:
    """Times of ``call(next(inputs))`` after a warm-up call, without the time for creating the inputs.

    Returns ``repeats`` times, or fewer, but at least twenty, when ``seconds`` have passed. Synchronises a CUDA device.
    """

    def timed() -> float:
        given = next(inputs)
        start = time.perf_counter()
        call(given)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    timed()
    end, times = time.perf_counter() + seconds, []
    while len(times) < repeats and (len(times) < _FEWEST or time.perf_counter() < end):
        times.append(timed())
    return times


@torch.no_grad()
def student_latency(student: nn.Module, x: Features) -> tuple[float, float]:
    """Median milliseconds of a student for one node, and for all rows of ``x [N, F]``."""
    x = x if isinstance(x, HalfPrecisionRows) else as_rows(x)
    with evaluating(student):
        one_node = milliseconds(student, itertools.repeat(x[:1]), _REPEATS)
        all_nodes = milliseconds(lambda rows: predict(student, rows), itertools.repeat(x), 3)
    return statistics.median(one_node), statistics.median(all_nodes)


@torch.no_grad()
def teacher_latency(teacher: nn.Module, graph: Data, *, num_layers: int) -> tuple[float, float]:
    """Median milliseconds of a teacher for one node, including gathering its neighbourhood, and for all nodes.

    The nodes of the first figure are spread over the graph. Each needs its neighbourhood, of as many hops as
    :func:`neighborhood_answer` says.
    """
    x, edges = features_for(teacher, graph.x), edges_for(teacher, graph)
    nodes = iter(torch.linspace(0, x.shape[0] - 1, _REPEATS + 1, device=x.device).long().split(1))
    with evaluating(teacher):
        one_node = milliseconds(neighborhood_answer(teacher, graph, num_layers), nodes, _REPEATS)
        all_nodes = milliseconds(lambda edges: teacher(x, edges), itertools.repeat(edges), 3)
    return statistics.median(one_node), statistics.median(all_nodes)


def neighborhood_answer(teacher: nn.Module, graph: Data, num_layers: int) -> Callable[[Tensor], Tensor]:
    """A function from the ids of a few nodes, int64 ``[B]``, to the teacher's logits ``[B, C]``.

    It gathers edges and features of their neighbourhood and runs the teacher on that subgraph. The neighbourhood has
    :meth:`rbm.teachers.Teacher.reach` hops, and ``num_layers`` for a module of another class. It is for timing:
    ``gcn``, ``revgat`` and ``drgat`` scale messages by degrees, which are smaller there for the outermost nodes, and a
    subgraph has no known labels, so their logits differ from those on the whole graph.
    """
    x = features_for(teacher, graph.x)
    reach = teacher.reach(num_layers) if isinstance(teacher, Teacher) else num_layers

    def answer(nodes: Tensor) -> Tensor:
        subset, edges, position, _ = k_hop_subgraph(
            nodes, reach, graph.edge_index, relabel_nodes=True, num_nodes=x.shape[0]
        )
        return teacher(x[subset], edges)[position]

    return answer
