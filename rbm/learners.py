"""What one epoch of each trained network is: the steps that :func:`rbm.training.fit` repeats."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rbm import losses
from rbm.config import Config, StudentConfig
from rbm.initialization import initialize_memory
from rbm.metrics import accuracy
from rbm.sparse import as_rows
from rbm.splits import GraphSplit
from rbm.students import MLPStudent, RbMStudent
from rbm.teachers import edges_for, features_for
from rbm.training import Accuracies


class TeacherTraining:
    """A teacher learns the hard labels of the observed graph, full batch."""

    def __init__(self, model: nn.Module, split: GraphSplit, config: Config) -> None:
        self.model, self.split = model, split
        self.observed_edges = edges_for(model, split.observed)
        self.full_edges = edges_for(model, split.graph) if len(split.unseen_nodes) else self.observed_edges
        self.observed_x, self.full_x = features_for(model, split.observed.x), features_for(model, split.graph.x)
        self.optimizer = build_adam(model.parameters(), lr=config.teacher.lr, weight_decay=config.teacher.weight_decay)

    def train_epoch(self, epoch: int) -> float:
        graph = self.split.observed
        self.optimizer.zero_grad()
        logits = self.model(self.observed_x, self.observed_edges)
        loss = losses.hard_label_loss(logits[graph.train_mask], graph.y[graph.train_mask])
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate(self) -> Accuracies:
        logits = self.model(self.observed_x, self.observed_edges)
        # Unseen nodes come with their edges, after training: only they need the full graph.
        full_logits = self.model(self.full_x, self.full_edges) if len(self.split.unseen_nodes) else logits
        return split_accuracies(logits, full_logits, self.split)

    def resume_at(self, epoch: int) -> None:
        pass


class StudentTraining:
    """A student learns soft and hard labels of the observed nodes from their features, full batch.

    An RbM student starts as its first experts alone (pretraining). Then these are cloned, the memory vectors are placed
    by K-means, the optimiser starts anew, and routing begins (paper, section 4.2).
    """

    def __init__(self, model: MLPStudent | RbMStudent, split: GraphSplit, soft_labels: Tensor, config: Config) -> None:
        self.model, self.split, self.soft_labels, self.config = model, split, soft_labels, config
        self.observed_x, self.full_x = as_rows(split.observed.x), as_rows(split.graph.x)
        self.routed = isinstance(model, RbMStudent)
        self.pretrain_epochs = config.student.pretrain_epochs if self.routed else 0
        if self.routed:
            model.pretraining = True
        self.optimizer = self._build_optimizer()

    def train_epoch(self, epoch: int) -> float:
        if self.routed:
            if epoch == self.pretrain_epochs:
                self._begin_routing()
            self.model.set_decay(annealed_decay(self.config.student, epoch))
        self.optimizer.zero_grad()
        logits, routings = self.model(self.observed_x, return_routing=True)
        loss = self._loss(logits, routings)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate(self) -> Accuracies:
        if not len(self.split.unseen_nodes):
            logits = self.model(self.observed_x)
            return split_accuracies(logits, logits, self.split)
        full_logits = self.model(self.full_x)
        return split_accuracies(full_logits[self.split.observed_nodes], full_logits, self.split)

    def resume_at(self, epoch: int) -> None:
        # The optimiser's groups and the routing switch follow from the epoch; their states are loaded afterwards.
        if self.routed and epoch > self.pretrain_epochs:
            self.model.pretraining = False

    def _loss(self, logits: Tensor, routings: list) -> Tensor:
        graph, distill, student = self.split.observed, self.config.distill, self.config.student
        hard = losses.hard_label_loss(logits[graph.train_mask], graph.y[graph.train_mask])
        soft = losses.soft_label_loss(logits, self.soft_labels, distill.temperature, distill.temperature_mode)
        loss = distill.label_weight * hard + (1 - distill.label_weight) * soft
        if not routings:
            return loss
        return loss + losses.embedding_loss(
            routings,
            self.model.memories(),
            commitment_weight=student.commitment_weight,
            self_similarity_weight=student.self_similarity_weight,
            load_balance_weight=student.load_balance_weight,
        )

    def _begin_routing(self) -> None:
        if self.pretrain_epochs > 0:
            self.model.clone_experts()
        self.model.pretraining = False
        max_rows = self.config.student.kmeans_max_rows or None
        initialize_memory(self.model, self.observed_x, seed=self.config.seed, max_rows=max_rows)
        if self.config.student.reset_optimizer:
            self.optimizer = self._build_optimizer()

    def _build_optimizer(self) -> torch.optim.Optimizer:
        section = self.config.student if self.routed else self.config.mlp
        groups: list[dict[str, Any]] = [{"params": list(self.model.parameters())}]
        if self.routed and self.config.student.self_similarity_weight > 0:
            # The self-similarity loss is the one that moves memory vectors by gradient. Adam rescales that gradient,
            # so weight decay on it would steer the memory by itself: it stays off unless asked for.
            memories = [memory.requires_grad_() for memory in self.model.memories()]
            decay = section.weight_decay if self.config.student.memory_weight_decay else 0.0
            groups.append({"params": memories, "weight_decay": decay})
        return build_adam(groups, lr=section.lr, weight_decay=section.weight_decay)


def build_adam(parameters: Iterable, *, lr: float, weight_decay: float) -> torch.optim.Adam:
    """Adam in one pass over each parameter. The default makes about ten: seconds add up where features are sparse."""
    return torch.optim.Adam(parameters, lr=lr, weight_decay=weight_decay, fused=True)


def annealed_decay(config: StudentConfig, epoch: int) -> float:
    """Decay of the memory at an epoch: ``decay + (1 - decay) * delta * t / T``, at most one (paper, Eq. 13)."""
    return min(1.0, config.decay + (1 - config.decay) * config.anneal_delta * epoch / config.anneal_steps)


def split_accuracies(observed_logits: Tensor, full_logits: Tensor, split: GraphSplit) -> Accuracies:
    """Train and validation accuracy on the observed graph; test accuracy on unseen nodes where there are any."""
    observed, full = split.observed, split.graph
    test = split.unseen_nodes if len(split.unseen_nodes) else full.test_mask
    return Accuracies(
        accuracy(observed_logits[observed.train_mask], observed.y[observed.train_mask]),
        accuracy(observed_logits[observed.val_mask], observed.y[observed.val_mask]),
        accuracy(full_logits[test], full.y[test]),
    )
