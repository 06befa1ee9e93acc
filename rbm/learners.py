"""What one epoch of each trained network is: the steps that :func:`rbm.training.fit` repeats."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rbm import losses
from rbm.adversarial import disturbed
from rbm.batches import Batch, node_batches, pair_batches
from rbm.config import Config, StudentConfig
from rbm.encodings import Encodings
from rbm.initialization import initialize_memory
from rbm.layer import Routing
from rbm.reliability import Reliability
from rbm.soft_targets import Neighborhood, Pairs, SoftTargets, weigh_pairs
from rbm.sparse import Features, Rows, SparseRows, beside, packed
from rbm.splits import GraphSplit
from rbm.students import MLPStudent, RbMStudent
from rbm.teachers import edges_for, features_for
from rbm.teaching import Teaching
from rbm.training import Accuracies, split_accuracies


class TeacherTraining:
    """A teacher learns the hard labels of the observed graph, full batch."""

    def __init__(self, model: nn.Module, split: GraphSplit, config: Config) -> None:
        self.model, self.split = model, split
        self.observed_edges = edges_for(model, split.observed)
        self.full_edges = edges_for(model, split.graph) if len(split.unseen_nodes) else self.observed_edges
        self.full_x = features_for(model, packed(split.graph.x))
        self.observed_x = features_for(model, packed(split.observed.x)) if len(split.unseen_nodes) else self.full_x
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

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


class StudentTraining:
    """A student learns the soft and hard labels of the observed nodes from their features and encodings.

    An RbM student starts as its first experts alone (pretraining). Then these are cloned, the memory vectors are placed
    by K-means, the optimiser starts anew, and routing begins (paper, section 4.2).
    """

    def __init__(
        self,
        model: MLPStudent | RbMStudent,
        split: GraphSplit,
        teaching: Teaching,
        config: Config,
        encodings: Encodings | None = None,
    ) -> None:
        self.model, self.split, self.teaching, self.config = model, split, teaching, config
        self.observed_x, self.full_x = student_inputs(split, encodings)
        self.train_nodes = split.observed.train_mask.nonzero().flatten()
        self.routed = isinstance(model, RbMStudent)
        self.pretrain_epochs = config.student.pretrain_epochs if self.routed else 0
        if self.routed:
            model.pretraining = True

        distill = config.distill
        self.graph = Neighborhood(split.observed.edge_index, split.observed.num_nodes)
        self.teacher_logs = losses.log_probabilities(
            teaching.soft_labels, distill.temperature, distill.temperature_mode
        )
        self.reliability = Reliability(teaching.entropy_change, config.reliability) if distill.neighbors else None
        self.pairs: Pairs | None = None
        self.targets: SoftTargets | None = None
        self.projection = self._build_projection()
        self.optimizer = self._build_optimizer()
        self.epoch = 0

    def train_epoch(self, epoch: int) -> float:
        self.epoch, distill = epoch, self.config.distill
        if self.routed:
            if epoch == self.pretrain_epochs:
                self._begin_routing()
            self.model.set_decay(annealed_decay(self.config.student, epoch))
        self._weigh_pairs()
        self.optimizer.zero_grad()
        total = 0.0
        for batch in self._batches():
            loss = self._batch_loss(batch)
            loss.backward()
            total += loss.detach()
            if distill.adversarial_weight > 0:
                total += self._train_adversarial(batch)
            if distill.step_per_batch:
                self.optimizer.step()
                self.optimizer.zero_grad()
        if not distill.step_per_batch:
            self.optimizer.step()
        return float(total)

    @torch.no_grad()
    def evaluate(self) -> Accuracies:
        logits = self.model(self.full_x)
        observed = logits[self.split.observed_nodes] if len(self.split.unseen_nodes) else logits
        if self.reliability and self.reliability.is_due(self.epoch):
            self.reliability.learn(observed.argmax(-1) == self.teaching.soft_labels.argmax(-1))
            self.pairs = None
        return split_accuracies(observed, logits, self.split)

    def resume_at(self, epoch: int) -> None:
        # The optimiser's groups and the routing switch follow from the epoch; their states are loaded afterwards.
        if self.routed and epoch > self.pretrain_epochs:
            self.model.pretraining = False

    def state(self) -> dict[str, Any]:
        return {
            "reliability": self.reliability.state() if self.reliability else {},
            "projection": self.projection.state_dict() if self.projection else {},
        }

    def restore(self, state: dict[str, Any]) -> None:
        if self.reliability:
            self.reliability.restore(state["reliability"])
        if self.projection:
            self.projection.load_state_dict(state["projection"])

    def _weigh_pairs(self) -> None:
        """Weights and targets of this epoch; where nothing is drawn, those of the last are good until trust moves."""
        distill = self.config.distill
        if self.pairs is not None and distill.draw == "expectation":
            return
        trust = self.reliability.probabilities() if self.reliability else None
        self.pairs = weigh_pairs(self.graph, trust, mean=distill.mean, draw=distill.draw)
        if distill.forward == "node":
            self.targets = SoftTargets.of(self.pairs, self.graph, self.teacher_logs)

    def _batches(self) -> Iterator[Batch]:
        distill = self.config.distill
        if distill.forward == "node":
            return node_batches(distill, self.train_nodes, self.pairs, self.targets)
        return pair_batches(distill, self.train_nodes, self.pairs, self.graph, self.teacher_logs)

    def _batch_loss(self, batch: Batch, x: Features | None = None) -> Tensor:
        """The loss of a batch, with its own rows or with ``x`` in their place."""
        if x is None:
            x = self.observed_x if batch.nodes is None else self.observed_x[batch.nodes]
        logits, trace = self.model(x, return_trace=True)
        terms = []
        if batch.soft is not None:
            terms.append(batch.soft(logits))
        if batch.labelled is not None:
            nodes = batch.labelled if batch.nodes is None else batch.nodes[batch.labelled]
            labels = self.split.observed.y[nodes]
            terms.append(batch.hard_weight * losses.hard_label_loss(logits[batch.labelled], labels))
            if self.projection is not None:
                terms.append(self._similarity_loss(trace.first[batch.labelled], nodes))
        if trace.routings:
            terms.append(batch.inner_weight * self._embedding_loss(trace.routings))
        return sum(terms)

    def _embedding_loss(self, routings: list[Routing]) -> Tensor | float:
        student = self.config.student
        return losses.embedding_loss(
            routings,
            self.model.memories(),
            commitment_weight=student.commitment_weight,
            self_similarity_weight=student.self_similarity_weight,
            load_balance_weight=student.load_balance_weight,
        )

    def _similarity_loss(self, first: Tensor, nodes: Tensor) -> Tensor:
        section = self.config.student if self.routed else self.config.mlp
        shown = F.dropout(self.projection(first).relu(), section.dropout, self.model.training)
        return self.config.distill.similarity_weight * losses.similarity_loss(shown, self.teaching.embedding[nodes])

    def _train_adversarial(self, batch: Batch) -> Tensor:
        """Add the gradients of the same batch with its inputs disturbed."""
        distill = self.config.distill
        rows = self.observed_x if batch.nodes is None else self.observed_x[batch.nodes]
        x = rows.to_dense() if isinstance(rows, SparseRows) else rows
        if self.routed:
            self.model.set_track_memory(distill.update_memory_on_adversarial)
        harder = disturbed(
            x, lambda x: self._batch_loss(batch, x), eps=distill.adversarial_eps, steps=distill.adversarial_steps
        )
        loss = distill.adversarial_weight * self._batch_loss(batch, harder)
        loss.backward()
        if self.routed:
            self.model.set_track_memory(True)
        return loss.detach()

    def _begin_routing(self) -> None:
        if self.pretrain_epochs > 0:
            self.model.clone_experts()
        self.model.pretraining = False
        max_rows = self.config.student.kmeans_max_rows or None
        initialize_memory(self.model, self.observed_x, seed=self.config.seed, max_rows=max_rows)
        if self.config.student.reset_optimizer:
            self.optimizer = self._build_optimizer()

    def _build_projection(self) -> nn.Linear | None:
        """Brings the student's first layer beside the teacher's embedding; only the similarity loss asks for it."""
        if self.config.distill.similarity_weight == 0:
            return None
        if self.teaching.embedding is None:
            raise ValueError(
                "distill.similarity_weight is set, but this teacher shows no hidden layer to be similar to; use a"
                " teacher of this package, or one with a method embed(x, edge_index) -> [N, H]"
            )
        first = self.model.layers[0]
        return nn.Linear(first.out_features, first.out_features).to(self.split.graph.x.device)

    def _build_optimizer(self) -> torch.optim.Optimizer:
        section = self.config.student if self.routed else self.config.mlp
        parameters = [*self.model.parameters(), *([] if self.projection is None else self.projection.parameters())]
        groups: list[dict[str, Any]] = [{"params": parameters}]
        if self.routed and self.config.student.self_similarity_weight > 0:
            # The self-similarity loss is the one that moves memory vectors by gradient. Adam rescales that gradient,
            # so weight decay on it would steer the memory by itself: it stays off unless asked for.
            memories = [memory.requires_grad_() for memory in self.model.memories()]
            decay = section.weight_decay if self.config.student.memory_weight_decay else 0.0
            groups.append({"params": memories, "weight_decay": decay})
        return build_adam(groups, lr=section.lr, weight_decay=section.weight_decay)


def student_inputs(split: GraphSplit, encodings: Encodings | None) -> tuple[Rows, Rows]:
    """Rows of the observed nodes and of all nodes: features, and beside them the encodings."""
    full = packed(split.graph.x)
    observed = full if split.observed is split.graph else packed(split.observed.x)
    if encodings is None:
        return observed, full
    return beside(observed, encodings.observed), beside(full, encodings.full)


def build_adam(parameters: Iterable, *, lr: float, weight_decay: float) -> torch.optim.Adam:
    """Adam in one pass over each parameter. The default makes about ten: seconds add up where features are sparse."""
    return torch.optim.Adam(parameters, lr=lr, weight_decay=weight_decay, fused=True)


def annealed_decay(config: StudentConfig, epoch: int) -> float:
    """Decay of the memory at an epoch: ``decay + (1 - decay) * delta * t / T``, at most one (paper, Eq. 13)."""
    return min(1.0, config.decay + (1 - config.decay) * config.anneal_delta * epoch / config.anneal_steps)
