"""The batches of an epoch: their rows, their weights, and their division among ranks."""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rbm.config import DistillConfig
from rbm.distillation.soft_targets import Neighborhood, Pairs, list_pairs
from rbm.utils.distributed import local_slice, world_size


class Batch(NamedTuple):
    """Rows of one forward, their targets, and the weights of their losses.

    Attributes:
        nodes: int64 ``[B]``, the rows; None means all rows, in order.
        labelled: positions in the batch of the rows that learn their true class; None if there are none.
        hard_weight: weight of the *mean* cross-entropy of ``labelled``.
        soft_weight: weight of the soft-label loss; None if the rows only learn from labels.
        auxiliary_weight: weight of the student's auxiliary loss.
        similarity_weight: multiplies the configuration's weight of the similarity loss of ``labelled``.
        sources: int64 ``[B]``, the node whose soft label each row learns; None if each row has one aggregated target
            (:class:`rbm.distillation.soft_targets.SoftTargets`).
        pair_weights: weights of the rows' pairs with ``sources``, ``[B]``.
        ends_step: whether an optimiser step follows.
        share: weight of a mean over these rows in the mean over the rows of all ranks, times the number of ranks.
    """

    nodes: Tensor | None
    labelled: Tensor | None
    hard_weight: float
    soft_weight: float | None
    auxiliary_weight: float
    similarity_weight: float = 1.0
    sources: Tensor | None = None
    pair_weights: Tensor | None = None
    ends_step: bool = True
    share: float = 1.0

    def local_part(self, num_nodes: int, device: torch.device) -> "Batch":
        """This rank's rows of the batch, possibly none. The mean loss over ranks is the loss of the batch."""
        nodes = torch.arange(num_nodes, device=device) if self.nodes is None else self.nodes
        rows, ranks = local_slice(len(nodes)), world_size()
        labelled, hard_weight = None, 0.0
        if self.labelled is not None:
            is_local = (self.labelled >= rows.start) & (self.labelled < rows.stop)
            labelled = self.labelled[is_local] - rows.start
            hard_weight = self.hard_weight * ranks * len(labelled) / len(self.labelled)
        return self._replace(
            nodes=nodes[rows],
            labelled=labelled,
            hard_weight=hard_weight,
            soft_weight=None if self.soft_weight is None else self.soft_weight * ranks,
            sources=None if self.sources is None else self.sources[rows],
            pair_weights=None if self.pair_weights is None else self.pair_weights[rows],
            share=ranks * (rows.stop - rows.start) / len(nodes),
        )


def local_parts(batches: Iterator[Batch], num_nodes: int, device: torch.device) -> Iterable[Batch]:
    """This rank's part of each batch of an epoch; in a single process, the batches themselves.

    All ranks must draw the same batches, so all batches are drawn here, before a rank draws its own random numbers.
    """
    if world_size() == 1:
        return batches
    return [batch.local_part(num_nodes, device) for batch in batches]


def node_batches(config: DistillConfig, train_nodes: Tensor, pairs: Pairs, num_nodes: int) -> Iterator[Batch]:
    """Batches of every node once, with its aggregated target and, for labelled nodes, its hard label.

    With ``sum_of_batch_means``, hard, soft and embedding losses are weighted by the numbers of batches into which
    :func:`pair_batches`, like the released code, would divide labels and pairs.
    """
    size, device = config.batch_size or num_nodes, train_nodes.device
    hard_factor = soft_factor = auxiliary_factor = 1.0
    if config.reduction == "sum_of_batch_means":
        num_pairs = num_nodes + int(pairs.neighbors.count_nonzero())
        hard_factor, soft_factor = math.ceil(len(train_nodes) / size), math.ceil(num_pairs / size)
        auxiliary_factor = hard_factor + soft_factor
    similarity_factor = hard_factor
    hard_factor, soft_factor = _label_weights(config, hard_factor, soft_factor)
    if size >= num_nodes:
        yield Batch(None, train_nodes, hard_factor, soft_factor, auxiliary_factor)
        return

    is_labelled = torch.zeros(num_nodes, dtype=torch.bool, device=device).index_fill_(0, train_nodes, True)
    order = torch.randperm(num_nodes, device=device) if config.shuffle else torch.arange(num_nodes, device=device)
    # With one step per batch, each batch has the weight of the whole loss, not of its share.
    per_step = math.ceil(num_nodes / size) if config.step_per_batch else 1
    for start in range(0, num_nodes, size):
        nodes = order[start : start + size]
        labelled = is_labelled[nodes].nonzero().flatten()
        labelled_share = len(labelled) / len(train_nodes)
        yield Batch(
            nodes,
            labelled if len(labelled) else None,
            hard_factor * labelled_share * per_step,
            soft_factor * per_step,
            auxiliary_factor * per_step * len(nodes) / num_nodes,
            similarity_factor * labelled_share * per_step,
            ends_step=config.step_per_batch or start + size >= num_nodes,
        )


def pair_batches(config: DistillConfig, train_nodes: Tensor, pairs: Pairs, graph: Neighborhood) -> Iterator[Batch]:
    """Batches as in the released code: labelled nodes, then pairs, each pair with its own forward."""
    targets, sources, weights = list_pairs(pairs, graph)
    size = config.batch_size or graph.num_nodes
    hard_factor, soft_factor = _label_weights(config, 1.0, 1.0)
    rows = len(train_nodes) + len(targets)
    # As in node_batches: each step has the weight of the whole loss.
    per_step = math.ceil(len(train_nodes) / size) + math.ceil(len(targets) / size) if config.step_per_batch else 1
    for nodes in _shuffled(config, train_nodes).split(size):
        positions = torch.arange(len(nodes), device=nodes.device)
        similarity, auxiliary = per_step * len(nodes) / len(train_nodes), per_step * len(nodes) / rows
        if config.reduction == "sum_of_batch_means":
            similarity = auxiliary = 1.0
        # Without a step per batch, the step follows the batches of pairs.
        ends_step = config.step_per_batch
        yield Batch(nodes, positions, hard_factor * similarity, None, auxiliary, similarity, ends_step=ends_step)
    batches = _shuffled(config, torch.arange(len(targets), device=targets.device)).split(size)
    for number, chosen in enumerate(batches, start=1):
        pair_weights, auxiliary = weights[chosen] * per_step, per_step * len(chosen) / rows
        if config.reduction == "sum_of_batch_means":
            pair_weights, auxiliary = weights[chosen] / weights[chosen].sum(), 1.0
        ends_step = config.step_per_batch or number == len(batches)
        yield Batch(targets[chosen], None, 0.0, soft_factor, auxiliary, 0.0, sources[chosen], pair_weights, ends_step)


def _label_weights(config: DistillConfig, hard: float, soft: float) -> tuple[float, float]:
    scale = config.temperature**2 if config.temperature_squared else 1.0
    return config.label_weight * hard, (1 - config.label_weight) * scale * soft


def _shuffled(config: DistillConfig, rows: Tensor) -> Tensor:
    return rows[torch.randperm(len(rows), device=rows.device)] if config.shuffle else rows
