"""Trainers of teachers: an epoch is one step on the whole observed graph, or one step per batch of training nodes."""

from typing import Any

import torch
from torch import Tensor, nn

from rbm.config import ATTENTION_TEACHERS, Config
from rbm.datasets.splits import GraphSplit
from rbm.nn import losses
from rbm.nn.sparse_rows import Features
from rbm.teachers import LabelInput, LabelPropagation, edges_for, features_for
from rbm.teachers.labelled import LabelledNodes
from rbm.teachers.neighbor_sampling import NeighborBatches
from rbm.training.loop import Trainer, build_adam
from rbm.training.selection import Accuracies, split_accuracies


class TeacherTrainer(Trainer):
    """Trains a teacher on the hard labels of the observed graph, full batch."""

    def __init__(self, model: nn.Module, split: GraphSplit, config: Config) -> None:
        self.model, self.split, self.config, self.precision = model, split, config, config.precision
        self.observed_edges = edges_for(model, split.observed)
        self.full_edges = edges_for(model, split.graph) if len(split.unseen_nodes) else self.observed_edges
        self.full_x = features_for(model, split.full_rows)
        self.observed_x = features_for(model, split.observed_rows) if len(split.unseen_nodes) else self.full_x
        # Results that epochs share, if the teacher allows it.
        self.observed = self.full = None
        if LabelledNodes.serves(model, self.observed_x, self.observed_edges):
            self.observed = LabelledNodes(model, self.observed_x, self.observed_edges, self.step_nodes())
        if len(split.unseen_nodes) and LabelledNodes.serves(model, self.full_x, self.full_edges):
            self.full = LabelledNodes(model, self.full_x, self.full_edges)

    def step_nodes(self) -> Tensor | None:
        """The training nodes of a step on the whole observed graph, int64 ``[B]``; None without such a step."""
        return self.split.observed.train_mask.nonzero().flatten()

    def build_optimizer(self) -> torch.optim.Optimizer:
        teacher = self.config.teacher
        return build_adam(self.model.parameters(), lr=teacher.lr, weight_decay=teacher.weight_decay)

    def epoch_loss(self, epoch: int) -> Tensor:
        graph = self.split.observed
        if self.observed:
            logits = self.forward(self.observed.logits)
        else:
            logits = self.forward(self.model, self.observed_x, self.observed_edges)[graph.train_mask]
        return losses.hard_label_loss(logits, graph.y[graph.train_mask])

    @torch.no_grad()
    def logits(self) -> tuple[Tensor, Tensor]:
        """Logits of the observed nodes, ``[N_observed, C]``, and of all nodes, ``[N, C]``."""
        logits = self._all_logits(self.observed, self.observed_x, self.observed_edges)
        if not len(self.split.unseen_nodes):
            return logits, logits
        # Only unseen nodes, which come with their edges after training, need the full graph.
        return logits, self._all_logits(self.full, self.full_x, self.full_edges)

    def _all_logits(self, shared: LabelledNodes | None, x: Features, edges: Any) -> Tensor:
        return self.forward(shared.all_logits) if shared else self.forward(self.model, x, edges)

    def evaluate(self) -> Accuracies:
        return split_accuracies(*self.logits(), self.split)


class SampledTrainer(TeacherTrainer):
    """Trains in batches of training nodes with sampled neighbours, one optimiser step per batch."""

    def __init__(self, model: nn.Module, split: GraphSplit, config: Config) -> None:
        super().__init__(model, split, config)
        nodes = split.observed.train_mask.nonzero().flatten()
        self.batches = NeighborBatches(split.observed, nodes, config.sampling, config.teacher.num_layers)

    def step_nodes(self) -> None:
        return None

    def train_epoch(self, epoch: int) -> float:
        total = 0.0
        for sample in self.batches:
            self.optimizer.zero_grad()
            logits = self.forward(self.model, self.observed_x[sample.nodes], sample.edges)[: sample.count]
            loss = losses.hard_label_loss(logits, self.split.observed.y[sample.nodes[: sample.count]])
            loss.backward()
            self.optimizer.step()
            total += loss.item() * sample.count
        return total / self.batches.count


class AttentionTrainer(TeacherTrainer):
    """The recipe of RevGAT and DRGAT: RMSprop with a warm-up, and optionally a saturating loss and labels as input."""

    def build_optimizer(self) -> torch.optim.Optimizer:
        teacher = self.config.teacher
        return torch.optim.RMSprop(self.model.parameters(), lr=teacher.lr, weight_decay=teacher.weight_decay)

    def train_epoch(self, epoch: int) -> float:
        rise = min(1.0, (epoch + 1) / max(1, self.config.attention.warmup_epochs))
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.teacher.lr * rise
        return super().train_epoch(epoch)

    def epoch_loss(self, epoch: int) -> Tensor:
        graph = self.split.observed
        if isinstance(self.model, LabelInput):
            logits, nodes = self.forward(self.model.masked_forward, self.observed_x, self.observed_edges)
        else:
            logits, nodes = self.forward(self.model, self.observed_x, self.observed_edges), graph.train_mask
        saturating = self.config.attention.loss == "log"
        loss = losses.saturating_label_loss if saturating else losses.hard_label_loss
        return loss(logits[nodes], graph.y[nodes])


class NothingToTrain(TeacherTrainer):
    """Trainer of label propagation, which has no weights: an epoch evaluates it once."""

    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.zeros(1)], lr=1.0)  # checkpoints need an optimiser, which cannot be empty

    def train_epoch(self, epoch: int) -> float:
        return 0.0


def build_teacher_trainer(model: nn.Module, split: GraphSplit, config: Config) -> TeacherTrainer:
    """Build the trainer of the configuration's teacher."""
    if isinstance(model, LabelPropagation):
        return NothingToTrain(model, split, config)
    if config.sampling.batch_size > 0:
        return SampledTrainer(model, split, config)
    kind = AttentionTrainer if config.teacher.name in ATTENTION_TEACHERS else TeacherTrainer
    return kind(model, split, config)
