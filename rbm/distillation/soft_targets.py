r"""Soft targets of a node: the teacher's output for the node itself and for its reliable neighbours.

The distillation losses of the paper (Eqs. 9 and 12) are sums over *pairs*: the student's prediction for node ``v``
against the teacher's for ``u``, where ``u`` is ``v`` itself or a neighbour. Since

    sum_u w_vu KL(p_u || q_v) = sum_u w_vu sum_c p_uc log p_uc  -  sum_c (sum_u w_vu p_uc) log q_vc

and only ``q`` depends on the student, one forward and one aggregated target per node give the same loss as one forward
per pair. :class:`SoftTargets` computes these targets with one sparse product. The pairs themselves are only needed to
follow the released code, where each pair has its own forward and dropout mask.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.utils import remove_self_loops

from rbm.nn.losses import log_probabilities
from rbm.utils.chunks import row_chunks
from rbm_kernels.ops.sparse_expert_matmul.reference import csr

_CHUNK_NODES = 2**18
_CHUNK_EDGES = 2**23
TABLE_BYTES = 2**28  # largest table of log-probabilities that is kept, and largest that is aggregated in one block
_BLOCKS = 8  # number of column blocks in which larger tables are aggregated


class Neighborhood:
    """The in-neighbours of every node: directed edges ``u -> v`` without self-loops; duplicates are kept.

    Args:
        edge_index: int64 ``[2, M]``, ``u`` in row 0 and ``v`` in row 1.
        num_nodes: ``N``.

    Attributes:
        crow, sources: int64 ``[N + 1]`` and ``[M']``: the sources of node ``v`` are ``sources[crow[v]:crow[v + 1]]``,
            in the order of their edges.
    """

    def __init__(self, edge_index: Tensor, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        counts = edge_index.new_zeros(num_nodes)
        for _, targets in self._edge_chunks(edge_index):
            counts += torch.bincount(targets, minlength=num_nodes)
        self.crow = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        # A counting sort: a sort of all edges at once takes several times their memory.
        self.sources, free = edge_index.new_empty(int(self.crow[-1])), self.crow[:-1].clone()
        for sources, targets in self._edge_chunks(edge_index):
            targets, order = targets.sort(stable=True)
            groups, sizes = torch.unique_consecutive(targets, return_counts=True)
            place = torch.arange(len(targets), device=targets.device)
            place += (free[groups] - sizes.cumsum(0) + sizes).repeat_interleave(sizes, output_size=len(targets))
            self.sources[place] = sources[order]
            free[groups] += sizes

    def __len__(self) -> int:
        return self.sources.numel()

    @cached_property
    def targets(self) -> Tensor:
        """The target of each of the ``sources``, int64 ``[M']``, ascending; computed on first use."""
        return self.at_sources(torch.arange(self.num_nodes, device=self.crow.device))

    def at_sources(self, values: Tensor) -> Tensor:
        """``values [N]`` of each source's target, ``[M']``."""
        return values.repeat_interleave(self.crow.diff(), output_size=len(self))

    def sums(self, weights: Tensor) -> Tensor:
        """Sum of ``weights [M']`` over the sources of each node, ``[N]``, in a fixed order."""
        sums = weights.new_empty(self.num_nodes)
        for rows, crow, edges in self.node_chunks():
            running = weights[edges].double().cumsum(0)
            running = torch.cat([running.new_zeros(1), running])
            sums[rows] = (running[crow[1:]] - running[crow[:-1]]).to(weights.dtype)
        return sums

    def node_chunks(self) -> Iterator[tuple[slice, Tensor, slice]]:
        """Chunks of nodes, which bound the memory for intermediate results: the slice of nodes, the ``crow`` of the
        chunk, and its slice of ``sources``.
        """
        for rows in row_chunks(self.num_nodes, _CHUNK_NODES):
            crow = self.crow[rows.start : rows.stop + 1]
            yield rows, crow - crow[0], slice(int(crow[0]), int(crow[-1]))

    @staticmethod
    def _edge_chunks(edge_index: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Sources and targets of the edges without self-loops."""
        for part in row_chunks(edge_index.shape[1], _CHUNK_EDGES):
            sources, targets = remove_self_loops(edge_index[:, part])[0]
            yield sources, targets


class Pairs(NamedTuple):
    """Weights of the pairs of a distillation loss.

    Attributes:
        own: weight of every node's pair with itself.
        neighbors: ``[M']``, weight of every edge of the :class:`Neighborhood`; zero excludes a pair.
    """

    own: float
    neighbors: Tensor


def weigh_pairs(graph: Neighborhood, trust: Tensor | None, *, mean: str, draw: str) -> Pairs:
    """Weights of node ``v``'s pair with itself and with each of its neighbours.

    Args:
        graph: the edges.
        trust: ``[N]`` in [0, 1], see :meth:`rbm.distillation.reliability.Reliability.probabilities`; None excludes
            neighbours.
        mean: ``nodes`` is the paper's sum of two means over nodes: of the node's own pair (Eq. 9), and of the
            expectation over one neighbour ``u`` drawn with odds ``trust[u]`` (Eq. 12). ``pairs`` is the released code's
            single mean over own pairs and all drawn neighbour pairs, each drawn with probability ``trust[u]``.
        draw: ``expectation`` weights every neighbour; ``sample`` draws at each call from PyTorch's global generator.
    """
    count = graph.num_nodes
    if trust is None:
        return Pairs(1.0 / count, torch.zeros(len(graph), device=graph.sources.device))
    odds = trust[graph.sources]
    if mean == "pairs":
        drawn = torch.bernoulli(odds) if draw == "sample" else odds
        # With weights instead of draws, this is the expected number of pairs.
        total = count + float(drawn.sum())
        return Pairs(1.0 / total, drawn / total)
    if draw == "sample":
        return Pairs(1.0 / count, _one_neighbor(graph, odds) / count)
    odds /= graph.at_sources(graph.sums(odds).clamp_min(1e-12))  # in place: one vector less in memory for many edges
    odds /= count
    return Pairs(1.0 / count, odds)


def _one_neighbor(graph: Neighborhood, odds: Tensor) -> Tensor:
    """One for the source that each node draws, zero elsewhere. A node draws none if all its sources have zero odds."""
    running = odds.double().cumsum(0)
    before = torch.cat([running.new_zeros(1), running])[graph.crow[:-1]]
    mass = graph.sums(odds.double())
    drawing = (mass > 0).nonzero().flatten()
    points = before[drawing] + torch.rand(len(drawing), device=odds.device, dtype=torch.float64) * mass[drawing]
    chosen = torch.searchsorted(running, points, right=True)
    # Rounding may move a point past the end of its node's sources.
    chosen = torch.minimum(chosen, graph.crow[drawing + 1] - 1)
    return torch.zeros_like(odds).index_fill_(0, chosen, 1.0)


@dataclass(frozen=True)
class SoftTargets:
    """Aggregated soft labels of all nodes, with the loss of any subset of nodes.

    Attributes:
        mass: ``sum_u w_vu p_u``, ``[N, C]``.
        constant: ``sum_u w_vu sum_c p_uc log p_uc``, ``[N]``, the difference between divergence and cross-entropy.
    """

    mass: Tensor
    constant: Tensor

    @classmethod
    def of(cls, pairs: Pairs, graph: Neighborhood, logs: "Tensor | LogProbabilities") -> "SoftTargets":
        """Aggregate the teacher's log-probabilities ``[N, C]``, the result of :func:`teacher_log_probabilities`.

        A large table is aggregated in a few blocks of columns, so memory only holds the sums and one block.
        """
        (count, classes), options = logs.shape, {"dtype": logs.dtype, "device": logs.device}
        total = torch.empty(count, classes + 1, **options)
        weights = pairs.neighbors.to(logs.dtype)
        blocks = 1 if total.nbytes <= TABLE_BYTES else _BLOCKS
        negative_entropy = torch.zeros(count, **options)  # becomes the last column, after the classes
        for block in row_chunks(classes + 1, math.ceil((classes + 1) / blocks)):
            values = torch.empty(count, block.stop - block.start, **options)
            for rows in row_chunks(count, _CHUNK_NODES):
                part = logs[rows, block.start : min(block.stop, classes)]
                probabilities = part.exp()
                # A class that the teacher rules out adds 0 * log 0 = 0.
                negative_entropy[rows] += torch.where(probabilities > 0, probabilities * part, 0.0).sum(-1)
                values[rows, : part.shape[1]] = probabilities
                if block.stop > classes:
                    values[rows, -1] = negative_entropy[rows]
                total[rows, block] = pairs.own * values[rows]
            for rows, crow, edges in graph.node_chunks() if len(graph) else ():
                shape = (rows.stop - rows.start, count)
                total[rows, block] += csr(crow, graph.sources[edges], weights[edges], shape) @ values
        return cls(total[:, :-1], total[:, -1])

    def loss(self, logits: Tensor, nodes: Tensor | None, temperature: float, mode: str) -> Tensor:
        """Contribution of ``nodes`` (int64 ``[B]``; default: all) to the loss, with student logits ``[B, C]``."""
        mass, constant = (self.mass, self.constant) if nodes is None else (self.mass[nodes], self.constant[nodes])
        return constant.sum() - (mass * log_probabilities(logits, temperature, mode)).sum()


class LogProbabilities:
    """A teacher's log-probabilities, computed when they are indexed, from logits that may be a memory-mapped file.

    Args:
        logits: ``[N, C]``.
        temperature: as in :func:`rbm.nn.losses.log_probabilities`.
        mode: likewise.
    """

    def __init__(self, logits: Tensor, temperature: float, mode: str) -> None:
        self.logits, self.temperature, self.mode = logits, temperature, mode
        self.shape, self.dtype, self.device = logits.shape, logits.dtype, logits.device

    def __getitem__(self, index: slice | Tensor | tuple[slice, slice]) -> Tensor:
        """Log-probabilities of a slice of rows, of int64 row indices, or of a slice of rows and a slice of columns."""
        if not isinstance(index, tuple):
            return log_probabilities(self.logits[index], self.temperature, self.mode)
        logits = self.logits[index]
        if self.mode == "softmax":
            return (logits / self.temperature).sub_(self.norms[index[0], None])
        return (logits - self.norms[index[0], None]).div_(self.temperature)

    @cached_property
    def norms(self) -> Tensor:
        """Log-normalisers of the rows, ``[N]``. With them, a block of columns does not need the other columns."""
        norms, divisor = torch.empty_like(self.logits[:, 0]), self.temperature if self.mode == "softmax" else 1.0
        for rows in row_chunks(len(norms), _CHUNK_NODES):
            norms[rows] = torch.logsumexp(self.logits[rows] / divisor, dim=-1)
        return norms


def teacher_log_probabilities(logits: Tensor, temperature: float, mode: str) -> Tensor | LogProbabilities:
    """Log-probabilities of all nodes ``[N, C]``; arguments as for :class:`LogProbabilities`. They are computed once, or
    on each use if the table is too large to keep in memory.
    """
    found = LogProbabilities(logits, temperature, mode)
    return found if logits.nbytes > TABLE_BYTES else found[:]


def list_pairs(pairs: Pairs, graph: Neighborhood) -> tuple[Tensor, Tensor, Tensor]:
    """Targets, sources and weights of all pairs with a weight: first neighbours, ordered by target, then own pairs."""
    kept = pairs.neighbors.nonzero().flatten()
    own = torch.arange(graph.num_nodes, device=kept.device)
    own_weights = pairs.neighbors.new_full((graph.num_nodes,), pairs.own)
    return (
        torch.cat([graph.targets[kept], own]),
        torch.cat([graph.sources[kept], own]),
        torch.cat([pairs.neighbors[kept], own_weights]),
    )
