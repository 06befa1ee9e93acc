r"""What a node learns from soft labels: the teacher's answer for itself, and for neighbours that can be trusted.

The distillation losses of the paper (Eqs. 8 and 11) are sums over *pairs*: the student's answer for node ``v`` against
the teacher's for ``u``, where ``u`` is ``v`` itself or a neighbour. Since

    sum_u w_vu KL(p_u || q_v) = sum_u w_vu sum_c p_uc log p_uc  -  sum_c (sum_u w_vu p_uc) log q_vc

and only ``q`` depends on the student, one forward a node and one aggregated target a node give the same loss as one
forward a pair: :class:`SoftTargets` (the sums are one sparse product). The pairs themselves serve those who want the
released code's way, where each pair has a forward and a dropout mask of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.utils import remove_self_loops

from rbm.nn.losses import log_probabilities
from rbm_kernels.ops.sparse_expert_matmul.reference import csr

_CHUNK_NODES = 2**18


class Neighborhood:
    """For every node, the nodes whose messages reach it: directed edges ``u -> v`` without self-loops, duplicates kept.

    Args:
        edge_index: int64 ``[2, M]``, ``u`` in row 0 and ``v`` in row 1.
        num_nodes: ``N``.

    Attributes:
        crow, sources: ``[N + 1]`` and ``[M']``: the sources of node ``v`` are ``sources[crow[v]:crow[v + 1]]``.
    """

    def __init__(self, edge_index: Tensor, num_nodes: int) -> None:
        edges, _ = remove_self_loops(edge_index)
        targets, order = edges[1].sort(stable=True)
        self.num_nodes = num_nodes
        self.sources = edges[0, order]
        self.targets = targets
        counts = torch.bincount(targets, minlength=num_nodes)
        self.crow = torch.cat([counts.new_zeros(1), counts.cumsum(0)])

    def __len__(self) -> int:
        return self.sources.numel()

    def sums(self, weights: Tensor) -> Tensor:
        """Sum of ``weights [M']`` over the sources of each node, ``[N]``, in a fixed order."""
        running = torch.cat([weights.new_zeros(1, dtype=torch.float64), weights.double().cumsum(0)])
        return (running[self.crow[1:]] - running[self.crow[:-1]]).to(weights.dtype)


class Pairs(NamedTuple):
    """Weights of the pairs of a distillation loss; all together weigh what the loss says.

    Attributes:
        own: weight of every node's pair with itself.
        neighbors: ``[M']``, weight of every edge of the :class:`Neighborhood`; zero leaves a pair out.
    """

    own: float
    neighbors: Tensor


def weigh_pairs(graph: Neighborhood, trust: Tensor | None, *, mean: str, draw: str) -> Pairs:
    """Weights of node ``v``'s pair with itself and with each of its neighbours.

    Args:
        graph: the edges.
        trust: ``[N]`` in [0, 1], see :meth:`rbm.distillation.reliability.Reliability.probabilities`; None leaves
            neighbours out.
        mean: ``nodes`` is the paper's sum of two means over nodes: of the node's own pair (Eq. 8), and of the
            expectation over one neighbour ``u`` drawn with odds ``trust[u]`` (Eq. 11). ``pairs`` is the released code's
            single mean over own pairs and all neighbours' pairs that were drawn, each with probability ``trust[u]``.
        draw: ``expectation`` weighs every neighbour; ``sample`` draws, anew at each call, from PyTorch's global
            generator.
    """
    count = graph.num_nodes
    if trust is None:
        return Pairs(1.0 / count, torch.zeros(len(graph), device=graph.sources.device))
    odds = trust[graph.sources]
    if mean == "pairs":
        drawn = torch.bernoulli(odds) if draw == "sample" else odds
        # Their expected number stands for their number where all are weighed.
        total = count + float(drawn.sum())
        return Pairs(1.0 / total, drawn / total)
    weights = (
        _one_neighbor(graph, odds) if draw == "sample" else odds / graph.sums(odds)[graph.targets].clamp_min(1e-12)
    )
    return Pairs(1.0 / count, weights / count)


def _one_neighbor(graph: Neighborhood, odds: Tensor) -> Tensor:
    """One for the source that each node drew, zero elsewhere; a node whose sources all have odds zero draws none."""
    running = odds.double().cumsum(0)
    before = torch.cat([running.new_zeros(1), running])[graph.crow[:-1]]
    mass = graph.sums(odds.double())
    drawing = (mass > 0).nonzero().flatten()
    points = before[drawing] + torch.rand(len(drawing), device=odds.device, dtype=torch.float64) * mass[drawing]
    chosen = torch.searchsorted(running, points, right=True)
    # Rounding may carry a point over the end of its node's sources.
    chosen = torch.minimum(chosen, graph.crow[drawing + 1] - 1)
    return torch.zeros_like(odds).index_fill_(0, chosen, 1.0)


@dataclass(frozen=True)
class SoftTargets:
    """Aggregated soft labels of all nodes, from which the loss of any part of the nodes follows.

    Attributes:
        mass: ``sum_u w_vu p_u``, ``[N, C]``.
        constant: ``sum_u w_vu sum_c p_uc log p_uc``, ``[N]``: what makes it a divergence and not a cross-entropy.
    """

    mass: Tensor
    constant: Tensor

    @classmethod
    def of(cls, pairs: Pairs, graph: Neighborhood, teacher_log_probabilities: Tensor) -> "SoftTargets":
        """From the teacher's log-probabilities ``[N, C]``, as :func:`rbm.nn.losses.log_probabilities` gives them."""
        logs = teacher_log_probabilities
        values = logs.new_empty(logs.shape[0], logs.shape[1] + 1)
        for rows in _chunks(graph.num_nodes):
            probabilities = logs[rows].exp()
            values[rows, :-1] = probabilities
            # A class that the teacher rules out adds 0 * log 0 = 0.
            values[rows, -1] = torch.where(probabilities > 0, probabilities * logs[rows], 0.0).sum(-1)
        total = pairs.own * values
        weights = pairs.neighbors.to(values.dtype)
        for rows in _chunks(graph.num_nodes) if len(graph) else ():
            crow = graph.crow[rows.start : rows.stop + 1]
            edges = slice(int(crow[0]), int(crow[-1]))
            shape = (rows.stop - rows.start, graph.num_nodes)
            total[rows] += csr(crow - crow[0], graph.sources[edges], weights[edges], shape) @ values
        return cls(total[:, :-1], total[:, -1])

    def loss(self, logits: Tensor, nodes: Tensor | None, temperature: float, mode: str) -> Tensor:
        """What ``nodes`` (int64 ``[B]``; all by default) add to the loss with student logits ``[B, C]``."""
        mass, constant = (self.mass, self.constant) if nodes is None else (self.mass[nodes], self.constant[nodes])
        return constant.sum() - (mass * log_probabilities(logits, temperature, mode)).sum()


def _chunks(num_nodes: int) -> Iterator[slice]:
    """Slices of nodes whose sums are formed at once: the memory for intermediate results stays bounded."""
    for start in range(0, num_nodes, _CHUNK_NODES):
        yield slice(start, min(start + _CHUNK_NODES, num_nodes))


def list_pairs(pairs: Pairs, graph: Neighborhood) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs that weigh anything: targets, sources, weights; neighbours' pairs first, in order of their targets."""
    kept = pairs.neighbors.nonzero().flatten()
    own = torch.arange(graph.num_nodes, device=kept.device)
    own_weights = pairs.neighbors.new_full((graph.num_nodes,), pairs.own)
    return (
        torch.cat([graph.targets[kept], own]),
        torch.cat([graph.sources[kept], own]),
        torch.cat([pairs.neighbors[kept], own_weights]),
    )
