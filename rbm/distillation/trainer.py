"""Trainers of students, whose epochs :func:`rbm.training.loop.fit` repeats.

:class:`StudentTrainer` is the common recipe of RbM, the plain MLP and the vanilla mixture of experts, which extend it.
Baselines with their own recipe (:mod:`rbm.distillation.methods`) derive from :class:`NodeTrainer`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rbm.config import Config, Network
from rbm.datasets.encodings import Encodings
from rbm.datasets.splits import GraphSplit
from rbm.distillation.adversarial import pgd_perturb
from rbm.distillation.batches import Batch, local_parts, node_batches, pair_batches
from rbm.distillation.reliability import Reliability
from rbm.distillation.soft_targets import Neighborhood, Pairs, SoftTargets, teacher_log_probabilities, weigh_pairs
from rbm.nn import losses
from rbm.nn.dropout import dropout
from rbm.nn.first_layer import FirstLayer
from rbm.nn.half_rows import HalfPrecisionRows
from rbm.nn.sparse_rows import Features, Rows, concat_columns, to_dense
from rbm.nn.students import MixtureStudent, Trace, predict
from rbm.teachers.outputs import TeacherOutputs
from rbm.training.loop import Trainer, build_adam
from rbm.training.metrics import expert_loads
from rbm.training.selection import Accuracies, split_accuracies
from rbm.utils.distributed import (
    Replicas,
    all_gather_rows,
    all_reduce_sum,
    average_gradients,
    broadcast_from_rank0,
    local_slice,
    own_randomness,
    world_size,
)
from rbm.utils.precision import wide


class NodeTrainer(Trainer):
    """Base class of the students' trainers: rows of nodes, evaluation, optimiser. Subclasses define the losses.

    Args:
        model: the student.
        split: the graph, and which nodes training may see.
        network: the student's section of the configuration.
        encodings: columns in addition to the features, or None.

    Attributes:
        observed_x, full_x: rows of the observed nodes, and of all nodes.
        train_nodes: int64, indices of the labelled nodes among the observed ones.
        projection: linear map that is trained with the student if a loss compares its hidden rows with the teacher's;
            or None.
        embedding: the teacher's hidden rows in such a similarity loss, ``[N_observed, H]``.
    """

    projection: nn.Linear | None = None
    embedding: Tensor

    def __init__(self, model: nn.Module, split: GraphSplit, network: Network, encodings: Encodings | None) -> None:
        self.model, self.split, self.network = model, split, network
        self.observed_x, self.full_x = student_inputs(split, encodings)
        self.train_nodes = split.observed.train_mask.nonzero().flatten()

    @torch.no_grad()
    def evaluate(self) -> Accuracies:
        logits = self.all_logits()
        observed = self.split.of_observed(logits)
        self.on_epoch_end(observed)
        return split_accuracies(observed, logits, self.split)

    def all_logits(self) -> Tensor:
        """Logits of all nodes, ``[N, C]``, without gradients."""
        return all_gather_rows(self.forward(predict, self.model, self.full_x, local_slice(self.full_x.shape[0])))

    def labelled_loss(self, logits: Tensor) -> Tensor:
        """Cross-entropy of the labelled nodes, from the logits of the observed nodes, ``[N_observed, C]``."""
        return losses.hard_label_loss(logits[self.train_nodes], self.split.observed.y[self.train_nodes])

    def compare_with_teacher(self, teacher_outputs: TeacherOutputs, width: int, reason: str) -> None:
        """Prepare :meth:`similarity_loss` for hidden rows of this width; ``reason`` is the setting that asks for it."""
        self.embedding = teacher_outputs.embedding(reason)
        self.projection = nn.Linear(width, width).to(self.embedding.device)

    def similarity_loss(self, hidden: Tensor, nodes: Tensor) -> Tensor:
        """Similarity loss of the student's hidden rows ``[B, H]``, projected, with the teacher's rows of ``nodes``."""
        projected = dropout(self.projection(wide(hidden)).relu(), self.network.dropout, self.model.training)
        return losses.similarity_loss(projected, self.embedding[nodes])

    def expert_loads(self) -> list[list[float]] | None:
        if not isinstance(self.model, MixtureStudent) or self.model.pretraining:
            return None
        return self.forward(expert_loads, self.model, self.full_x).tolist()

    def on_epoch_end(self, logits: Tensor) -> None:
        """Hook: called after each epoch with the logits of the observed nodes, ``[N_observed, C]``."""

    def build_optimizer(self) -> torch.optim.Optimizer:
        groups = [*self.parameter_groups(), *self.further_groups()]
        return build_adam(groups, lr=self.network.lr, weight_decay=self.network.weight_decay)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The model's parameters, and the projection's, as groups of the optimiser."""
        return [{"params": self.parameters_without([])}]

    def parameters_without(self, left_out: list[nn.Parameter]) -> list[nn.Parameter]:
        """The model's parameters, and the projection's, without those that have a group of their own."""
        left_out_ids = {id(parameter) for parameter in left_out}
        found = [parameter for parameter in self.model.parameters() if id(parameter) not in left_out_ids]
        return found if self.projection is None else [*found, *self.projection.parameters()]

    def state(self) -> dict[str, Any]:
        return {} if self.projection is None else self.projection.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        if self.projection is not None:
            self.projection.load_state_dict(state)

    def further_groups(self) -> list[dict[str, Any]]:
        """Groups of the optimiser in addition to the parameters."""
        return []


class StudentTrainer(NodeTrainer):
    """Trains a student on soft and hard labels of the observed nodes, with features and encodings as input.

    The loss mixes the true classes of the labelled nodes with the teacher's soft labels of each node (paper, Eq. 9) and
    of its reliable neighbours (Eq. 12), and adds the student's auxiliary loss (Eq. 13 for RbM). Subclasses have hooks:
    :meth:`begin_epoch`, :meth:`auxiliary_loss`, :meth:`optimizer_step` and :meth:`freeze_memory`.

    Args:
        model: the student.
        split: the graph, and which nodes training may see.
        teacher_outputs: the teacher's soft labels and other outputs that the losses need.
        config: configuration of the run.
        encodings: columns in addition to the features, or None.
        network: the student's section of the configuration; by default ``config.mlp``.
    """

    def __init__(
        self,
        model: nn.Module,
        split: GraphSplit,
        teacher_outputs: TeacherOutputs,
        config: Config,
        encodings: Encodings | None = None,
        network: Network | None = None,
    ) -> None:
        super().__init__(model, split, network or config.mlp, encodings)
        self.teacher_outputs, self.config = teacher_outputs, config
        distill = config.distill
        if distill.similarity_weight != 0:
            width = model.layers[0].out_features
            self.compare_with_teacher(teacher_outputs, width, "distill.similarity_weight is set")
        self.replicas = Replicas(model)
        self.graph = Neighborhood(split.observed.edge_index, split.observed.num_nodes)
        self.teacher_logs = teacher_log_probabilities(
            teacher_outputs.soft_labels, distill.temperature, distill.temperature_mode
        )
        # Without a table of the teacher's logs, evaluation avoids the equally large table of all logits, unless a
        # subclass uses it.
        makes_tables = isinstance(self.teacher_logs, Tensor)
        self.evaluates_logits = makes_tables or type(self).on_epoch_end is not StudentTrainer.on_epoch_end
        self.reliability: Reliability | None = None
        if distill.neighbors:
            change = teacher_outputs.entropy_change(config.reliability, config.seed)
            self.reliability = Reliability(change, config.reliability)
        self.pairs: Pairs | None = None
        self.targets: SoftTargets | None = None
        self.epoch = 0
        self.first_layer: FirstLayer | None = None
        nodes = self.graph.num_nodes
        all_at_once = distill.forward == "node" and (distill.batch_size or nodes) >= nodes
        if all_at_once and world_size() == 1 and FirstLayer.serves(model, self.observed_x):
            self.first_layer = FirstLayer(model, self.observed_x)
            self.unseen_x = self.full_x[split.unseen_nodes] if len(split.unseen_nodes) else None

    def all_logits(self) -> Tensor:
        if self.first_layer is None:
            return super().all_logits()
        observed = self.forward(self.first_layer.logits)
        if self.unseen_x is None:
            return observed
        logits = observed.new_empty(self.full_x.shape[0], observed.shape[1])
        logits[self.split.observed_nodes] = observed
        logits[self.split.unseen_nodes] = self.forward(predict, self.model, self.unseen_x)
        return logits

    @torch.no_grad()
    def evaluate(self) -> Accuracies:
        if self.evaluates_logits:
            return super().evaluate()
        rows = local_slice(self.full_x.shape[0])
        answers = self.forward(predict, self.model, self.full_x, rows, lambda logits: logits.argmax(-1))
        answers = all_gather_rows(answers)
        observed = self.split.of_observed(answers)
        self._learn_reliability(observed)
        return split_accuracies(observed, answers, self.split)

    def begin_epoch(self, epoch: int) -> None:
        """Hook: called before each epoch."""

    def auxiliary_loss(self, trace: Trace, share: float) -> Tensor | None:
        """Hook: an additional loss, computed from the trace of a batch's forward, or None.

        Means over the rows of the batch are weighted by ``share`` (see :class:`rbm.distillation.batches.Batch`).
        """

    def optimizer_step(self) -> None:
        """Hook: update the parameters."""
        self.optimizer.step()

    def freeze_memory(self, frozen: bool) -> None:
        """Hook: while ``frozen``, training forwards do not move the memory vectors of the student."""

    def train_epoch(self, epoch: int) -> float:
        self.epoch = epoch
        self.begin_epoch(epoch)
        self.update_targets()
        batches = local_parts(self._batches(), self.graph.num_nodes, self.teacher_logs.device)
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.teacher_logs.device)
        with own_randomness(epoch):
            for batch in batches:
                total = total + self._train_batch(batch)
                if batch.ends_step:
                    average_gradients(self.projection)
                    self.optimizer_step()
                    self.optimizer.zero_grad()
        return float(all_reduce_sum(total) / world_size())

    def on_epoch_end(self, logits: Tensor) -> None:
        self._learn_reliability(logits.argmax(-1))

    def _learn_reliability(self, answers: Tensor) -> None:
        """Learn the exponent of reliability from the student's classes, int64 ``[N_observed]``."""
        if self.reliability and self.reliability.is_due(self.epoch):
            self.reliability.learn(answers == self.teacher_outputs.soft_labels.argmax(-1))
            # The fit may be rounded differently on each machine, but all ranks must draw the same neighbours.
            self.reliability.power = broadcast_from_rank0(lambda: self.reliability.power)
            self.pairs = None

    def state(self) -> dict[str, Any]:
        reliability = self.reliability.state() if self.reliability else {}
        return {"reliability": reliability, "projection": super().state()}

    def restore(self, state: dict[str, Any]) -> None:
        if self.reliability:
            self.reliability.restore(state["reliability"])
        super().restore(state["projection"])

    def update_targets(self) -> None:
        """Compute weights and targets of this epoch. Without random draws, they change only with the reliability."""
        distill = self.config.distill
        draws = self.reliability is not None and distill.draw == "sample"
        if self.pairs is not None and not draws:
            return
        trust = self.reliability.probabilities() if self.reliability else None
        self.pairs = weigh_pairs(self.graph, trust, mean=distill.mean, draw=distill.draw)
        if distill.forward == "node":
            self.targets = SoftTargets.of(self.pairs, self.graph, self.teacher_logs)

    def _batches(self) -> Iterator[Batch]:
        distill = self.config.distill
        if distill.forward == "node":
            return node_batches(distill, self.train_nodes, self.pairs, self.graph.num_nodes)
        return pair_batches(distill, self.train_nodes, self.pairs, self.graph)

    def _train_batch(self, batch: Batch) -> Tensor:
        """Run forward and backward of a batch, and return its loss."""
        some_unused = getattr(self.model, "pretraining", False)
        adversarial = self.config.distill.adversarial_weight > 0
        rows = self.observed_x if batch.nodes is None else self.observed_x[batch.nodes]
        with self.replicas.passing(ends_step=batch.ends_step and not adversarial, some_unused=some_unused) as student:
            loss = self._batch_loss(batch, student, rows, similarity=self.projection is not None)
            loss.backward()
        loss = loss.detach()
        if adversarial:
            with self.replicas.passing(ends_step=batch.ends_step, some_unused=some_unused) as student:
                loss = loss + self._train_adversarial(batch, student, rows)
        return loss

    def _batch_loss(self, batch: Batch, student: nn.Module, x: Features, *, similarity: bool = False) -> Tensor:
        """The loss of a batch with rows ``x``; ``similarity`` adds the similarity loss of the labelled rows."""
        is_cached = self.first_layer is not None and x is self.observed_x
        if is_cached:
            logits, trace = self.forward(self.first_layer.train)
        else:
            logits, trace = self.forward(student, x, return_trace=True)
        terms = []
        if batch.soft_weight is not None:
            terms.append(batch.soft_weight * self._soft_loss(batch, logits))
        if batch.labelled is not None:
            nodes = batch.labelled if batch.nodes is None else batch.nodes[batch.labelled]
            if len(nodes):
                labels = self.split.observed.y[nodes]
                terms.append(batch.hard_weight * losses.hard_label_loss(logits[batch.labelled], labels))
            if similarity:
                similar = self.similarity_loss(trace.first[batch.labelled], nodes)
                terms.append(self.config.distill.similarity_weight * batch.similarity_weight * similar)
        auxiliary = self.auxiliary_loss(trace, batch.share)
        if auxiliary is not None:
            terms.append(batch.auxiliary_weight * auxiliary)
        if not len(logits):
            terms.append(logits.sum())  # zero, so that a rank without rows takes part in the backward
        return sum(terms)

    def _soft_loss(self, batch: Batch, logits: Tensor) -> Tensor:
        distill = self.config.distill
        if batch.sources is None:
            return self.targets.loss(logits, batch.nodes, distill.temperature, distill.temperature_mode)
        teacher = self.teacher_logs[batch.sources]
        return losses.pair_loss(logits, teacher, batch.pair_weights, distill.temperature, distill.temperature_mode)

    def _train_adversarial(self, batch: Batch, student: nn.Module, rows: Rows) -> Tensor:
        """Add the gradients of the same batch with adversarially perturbed inputs."""
        distill = self.config.distill
        self.freeze_memory(not distill.update_memory_on_adversarial)
        perturbed = pgd_perturb(
            to_dense(rows),
            # Only the gradient of the input is used, so there is nothing to average over ranks.
            lambda x: self._batch_loss(batch, self.model, x),
            eps=distill.adversarial_eps,
            steps=distill.adversarial_steps,
        )
        loss = distill.adversarial_weight * self._batch_loss(batch, student, perturbed)
        loss.backward()
        self.freeze_memory(False)
        return loss.detach()


def student_inputs(
    split: GraphSplit, encodings: Encodings | None
) -> tuple[Rows | HalfPrecisionRows, Rows | HalfPrecisionRows]:
    """Rows of the observed nodes and of all nodes: features, then the encodings."""
    if encodings is None:
        return split.observed_rows, split.full_rows
    if split.observed is split.graph:
        rows = concat_columns(split.full_rows, encodings.full)
        return rows, rows
    observed = concat_columns(split.observed_rows, encodings.observed)
    return observed, concat_columns(split.full_rows, encodings.full)
