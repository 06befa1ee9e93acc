"""How an epoch is cut into forwards, and how much each of them weighs."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rbm import losses
from rbm.config import DistillConfig
from rbm.soft_targets import Neighborhood, Pairs, SoftTargets, list_pairs


class Batch(NamedTuple):
    """Rows of one forward, and what their losses weigh.

    Attributes:
        nodes: int64 ``[B]``, the rows; None means all of them, in order.
        labelled: the rows, by their position in the batch, that learn their true class; None for none.
        hard_weight: of the *mean* cross-entropy of ``labelled``.
        soft: gives the weighted soft-label loss from the logits ``[B, C]``, or None.
        inner_weight: of the embedding losses, which are means over the rows.
    """

    nodes: Tensor | None
    labelled: Tensor | None
    hard_weight: float
    soft: "_NodeLoss | _PairLoss | None"
    inner_weight: float


@dataclass(frozen=True)
class _NodeLoss:
    targets: SoftTargets
    nodes: Tensor | None
    weight: float
    config: DistillConfig

    def __call__(self, logits: Tensor) -> Tensor:
        config = self.config
        return self.weight * self.targets.loss(logits, self.nodes, config.temperature, config.temperature_mode)


@dataclass(frozen=True)
class _PairLoss:
    teacher_log_probabilities: Tensor
    weights: Tensor
    weight: float
    config: DistillConfig

    def __call__(self, logits: Tensor) -> Tensor:
        config, teacher = self.config, self.teacher_log_probabilities
        loss = losses.pair_loss(logits, teacher, self.weights, config.temperature, config.temperature_mode)
        return self.weight * loss


def node_batches(config: DistillConfig, train_nodes: Tensor, pairs: Pairs, targets: SoftTargets) -> Iterator[Batch]:
    """Every node once, against its aggregated target; hard labels ride along.

    Under ``sum_of_batch_means`` hard, soft and embedding losses weigh by the numbers of batches that the released code
    would make of labels and pairs.
    """
    num_nodes, size = targets.constant.shape[0], config.batch_size
    hard_factor = soft_factor = inner_factor = 1.0
    if config.reduction == "sum_of_batch_means" and size:
        num_pairs = num_nodes + int(pairs.neighbors.count_nonzero())
        hard_factor, soft_factor = math.ceil(len(train_nodes) / size), math.ceil(num_pairs / size)
        inner_factor = hard_factor + soft_factor
    hard_factor, soft_factor = _label_weights(config, hard_factor, soft_factor)
    if not size or size >= num_nodes:
        soft = _NodeLoss(targets, None, soft_factor, config)
        yield Batch(None, train_nodes, hard_factor, soft, inner_factor)
        return

    device = targets.constant.device
    is_labelled = torch.zeros(num_nodes, dtype=torch.bool, device=device).index_fill_(0, train_nodes, True)
    order = torch.randperm(num_nodes, device=device) if config.shuffle else torch.arange(num_nodes, device=device)
    # A step sees one batch: it takes the whole loss's size from it, not its share.
    per_step = math.ceil(num_nodes / size) if config.step_per_batch else 1
    for nodes in order.split(size):
        labelled = is_labelled[nodes].nonzero().flatten()
        share = len(labelled) / len(train_nodes)
        soft = _NodeLoss(targets, nodes, soft_factor * per_step, config)
        inner = inner_factor * per_step * len(nodes) / num_nodes
        yield Batch(nodes, labelled if len(labelled) else None, hard_factor * share * per_step, soft, inner)


def pair_batches(
    config: DistillConfig, train_nodes: Tensor, pairs: Pairs, graph: Neighborhood, teacher_log_probabilities: Tensor
) -> Iterator[Batch]:
    """The released code's way: batches of labelled nodes, then batches of pairs, each pair with its own forward."""
    targets, sources, weights = list_pairs(pairs, graph)
    size = config.batch_size or graph.num_nodes
    hard_factor, soft_factor = _label_weights(config, 1.0, 1.0)
    rows = len(train_nodes) + len(targets)
    for nodes in _shuffled(config, train_nodes).split(size):
        every = torch.arange(len(nodes), device=nodes.device)
        if config.reduction == "sum_of_batch_means":
            yield Batch(nodes, every, hard_factor, None, 1.0)
        else:
            yield Batch(nodes, every, hard_factor * len(nodes) / len(train_nodes), None, len(nodes) / rows)
    for chosen in _shuffled(config, torch.arange(len(targets), device=targets.device)).split(size):
        mine, inner = weights[chosen], len(chosen) / rows
        if config.reduction == "sum_of_batch_means":
            mine, inner = mine / mine.sum(), 1.0
        soft = _PairLoss(teacher_log_probabilities[sources[chosen]], mine, soft_factor, config)
        yield Batch(targets[chosen], None, 0.0, soft, inner)


def _label_weights(config: DistillConfig, hard: float, soft: float) -> tuple[float, float]:
    scale = config.temperature**2 if config.temperature_squared else 1.0
    return config.label_weight * hard, (1 - config.label_weight) * scale * soft


def _shuffled(config: DistillConfig, rows: Tensor) -> Tensor:
    return rows[torch.randperm(len(rows), device=rows.device)] if config.shuffle else rows
