"""What one epoch of each trained network is: the steps that :func:`rbm.training.fit` repeats.

:class:`StudentTraining` is the recipe that RbM shares with the plain MLP and the vanilla mixture of experts, which add
to it what is theirs. Baselines with a recipe of their own (:mod:`rbm.baselines`) build on :class:`NodeTraining` alone.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rbm import losses
from rbm.adversarial import disturbed
from rbm.batches import Batch, node_batches, pair_batches
from rbm.config import ATTENTION_TEACHERS, Config, Network, RbMConfig
from rbm.encodings import Encodings
from rbm.initialization import initialize_memory
from rbm.metrics import expert_loads
from rbm.reliability import Reliability
from rbm.sampling import NeighborBatches
from rbm.soft_targets import Neighborhood, Pairs, SoftTargets, weigh_pairs
from rbm.sparse import Features, Rows, SparseRows, beside, packed
from rbm.splits import GraphSplit
from rbm.students import MixtureStudent, RbMStudent, Trace
from rbm.teachers import LabelInput, edges_for, features_for
from rbm.teaching import Teaching
from rbm.training import Accuracies, Learner, split_accuracies


class Training(Learner):
    """A model and its optimiser, and nothing that depends on the epoch or has to be kept beside them."""

    def resume_at(self, epoch: int) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


class TeacherTraining(Training):
    """A teacher learns the hard labels of the observed graph, full batch."""

    def __init__(self, model: nn.Module, split: GraphSplit, config: Config) -> None:
        self.model, self.split = model, split
        self.observed_edges = edges_for(model, split.observed)
        self.full_edges = edges_for(model, split.graph) if len(split.unseen_nodes) else self.observed_edges
        self.full_x = features_for(model, packed(split.graph.x))
        self.observed_x = features_for(model, packed(split.observed.x)) if len(split.unseen_nodes) else self.full_x
        self.optimizer = self.build_optimizer(model.parameters(), config)

    def build_optimizer(self, parameters: Iterable, config: Config) -> torch.optim.Optimizer:
        return build_adam(parameters, lr=config.teacher.lr, weight_decay=config.teacher.weight_decay)

    def train_epoch(self, epoch: int) -> float:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def loss(self) -> Tensor:
        """Of one pass over the observed graph."""
        graph = self.split.observed
        logits = self.model(self.observed_x, self.observed_edges)
        return losses.hard_label_loss(logits[graph.train_mask], graph.y[graph.train_mask])

    @torch.no_grad()
    def evaluate(self) -> Accuracies:
        logits = self.model(self.observed_x, self.observed_edges)
        # Unseen nodes come with their edges, after training: only they need the full graph.
        full_logits = self.model(self.full_x, self.full_edges) if len(self.split.unseen_nodes) else logits
        return split_accuracies(logits, full_logits, self.split)


class SampledTraining(TeacherTraining):
    """The same in batches of training nodes and neighbours drawn around them, an optimiser step each."""

    def __init__(self, model: nn.Module, split: GraphSplit, config: Config) -> None:
        super().__init__(model, split, config)
        nodes = split.observed.train_mask.nonzero().flatten()
        self.batches = NeighborBatches(split.observed, nodes, config.sampling, config.teacher.num_layers)

    def train_epoch(self, epoch: int) -> float:
        total = 0.0
        for sample in self.batches:
            self.optimizer.zero_grad()
            logits = self.model(self.observed_x[sample.nodes], sample.edges)[: sample.count]
            loss = losses.hard_label_loss(logits, self.split.observed.y[sample.nodes[: sample.count]])
            loss.backward()
            self.optimizer.step()
            total += loss.item() * sample.count
        return total / self.batches.count


class AttentionTraining(TeacherTraining):
    """The recipe of RevGAT and DRGAT: RMSprop with a warm-up, a loss that saturates, labels as input where asked."""

    def __init__(self, model: nn.Module, split: GraphSplit, config: Config) -> None:
        self.config = config
        super().__init__(model, split, config)

    def build_optimizer(self, parameters: Iterable, config: Config) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(parameters, lr=config.teacher.lr, weight_decay=config.teacher.weight_decay)

    def train_epoch(self, epoch: int) -> float:
        rise = min(1.0, (epoch + 1) / max(1, self.config.attention.warmup_epochs))
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.teacher.lr * rise
        return super().train_epoch(epoch)

    def loss(self) -> Tensor:
        graph = self.split.observed
        if isinstance(self.model, LabelInput):
            logits, nodes = self.model.practise(self.observed_x, self.observed_edges)
        else:
            logits, nodes = self.model(self.observed_x, self.observed_edges), graph.train_mask
        saturating = self.config.attention.loss == "log"
        loss = losses.saturating_label_loss if saturating else losses.hard_label_loss
        return loss(logits[nodes], graph.y[nodes])


class NodeTraining(Training):
    """A student that sees a row a node: what all of them have, whatever they learn from.

    Args:
        model: the student.
        split: the graph, and what training may see of it.
        network: the student's section of the configuration.
        encodings: columns beside the features.

    Attributes:
        observed_x, full_x: rows of the observed nodes, and of all.
        train_nodes: int64, the labelled ones among the observed.
        projection: trained beside the student, where a loss brings its hidden rows beside the teacher's; or None.
    """

    projection: nn.Linear | None = None

    def __init__(self, model: nn.Module, split: GraphSplit, network: Network, encodings: Encodings | None) -> None:
        self.model, self.split, self.network = model, split, network
        self.observed_x, self.full_x = student_inputs(split, encodings)
        self.train_nodes = split.observed.train_mask.nonzero().flatten()
        self.optimizer = self.build_optimizer()

    @torch.no_grad()
    def evaluate(self) -> Accuracies:
        logits = self.model(self.full_x)
        observed = logits[self.split.observed_nodes] if len(self.split.unseen_nodes) else logits
        self.notice(observed)
        return split_accuracies(observed, logits, self.split)

    def expert_loads(self) -> list[list[float]] | None:
        if not isinstance(self.model, MixtureStudent) or self.model.pretraining:
            return None
        return expert_loads(self.model, self.full_x).tolist()

    def notice(self, logits: Tensor) -> None:
        """See the logits of the observed nodes after an epoch."""

    def build_optimizer(self) -> torch.optim.Optimizer:
        parameters = [*self.model.parameters(), *([] if self.projection is None else self.projection.parameters())]
        groups = [{"params": parameters}, *self.further_groups()]
        return build_adam(groups, lr=self.network.lr, weight_decay=self.network.weight_decay)

    def further_groups(self) -> list[dict[str, Any]]:
        """Groups of the optimiser beside the parameters."""
        return []


class StudentTraining(NodeTraining):
    """A student learns the soft and hard labels of the observed nodes from their features and encodings."""

    def __init__(
        self,
        model: nn.Module,
        split: GraphSplit,
        teaching: Teaching,
        config: Config,
        encodings: Encodings | None = None,
        network: Network | None = None,
    ) -> None:
        self.teaching, self.config = teaching, config
        self.model, self.split = model, split
        self.projection = self._build_projection()
        super().__init__(model, split, network or config.mlp, encodings)
        distill = config.distill
        self.graph = Neighborhood(split.observed.edge_index, split.observed.num_nodes)
        self.teacher_logs = losses.log_probabilities(
            teaching.soft_labels, distill.temperature, distill.temperature_mode
        )
        self.reliability: Reliability | None = None
        if distill.neighbors:
            change = teaching.entropy_change(config.reliability, config.seed)
            self.reliability = Reliability(change, config.reliability)
        self.pairs: Pairs | None = None
        self.targets: SoftTargets | None = None
        self.epoch = 0

    def begin_epoch(self, epoch: int) -> None:
        """What a kind of student does before an epoch."""

    def inner_loss(self, trace: Trace) -> Tensor | None:
        """A student's loss on what happened inside it, from the trace of a batch; None where there is none."""

    def hold_still(self, still: bool) -> None:
        """Whether forwards from here on shall leave no trace in the student but gradients."""

    def train_epoch(self, epoch: int) -> float:
        self.epoch, distill = epoch, self.config.distill
        self.begin_epoch(epoch)
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

    def notice(self, logits: Tensor) -> None:
        if self.reliability and self.reliability.is_due(self.epoch):
            self.reliability.learn(logits.argmax(-1) == self.teaching.soft_labels.argmax(-1))
            self.pairs = None

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
        """The loss of a batch with its own rows; or with ``x`` in their place, which are held to no similarity."""
        own_rows = x is None
        if own_rows:
            x = self.observed_x if batch.nodes is None else self.observed_x[batch.nodes]
        logits, trace = self.model(x, return_trace=True)
        terms = []
        if batch.soft is not None:
            terms.append(batch.soft(logits))
        if batch.labelled is not None:
            nodes = batch.labelled if batch.nodes is None else batch.nodes[batch.labelled]
            labels = self.split.observed.y[nodes]
            terms.append(batch.hard_weight * losses.hard_label_loss(logits[batch.labelled], labels))
            if self.projection is not None and own_rows:
                terms.append(self._similarity_loss(trace.first[batch.labelled], nodes))
        inner = self.inner_loss(trace)
        if inner is not None:
            terms.append(batch.inner_weight * inner)
        return sum(terms)

    def _similarity_loss(self, first: Tensor, nodes: Tensor) -> Tensor:
        shown = F.dropout(self.projection(first).relu(), self.network.dropout, self.model.training)
        return self.config.distill.similarity_weight * losses.similarity_loss(shown, self.embedding[nodes])

    def _train_adversarial(self, batch: Batch) -> Tensor:
        """Add the gradients of the same batch with its inputs disturbed."""
        distill = self.config.distill
        rows = self.observed_x if batch.nodes is None else self.observed_x[batch.nodes]
        x = rows.to_dense() if isinstance(rows, SparseRows) else rows
        self.hold_still(not distill.update_memory_on_adversarial)
        harder = disturbed(
            x, lambda x: self._batch_loss(batch, x), eps=distill.adversarial_eps, steps=distill.adversarial_steps
        )
        loss = distill.adversarial_weight * self._batch_loss(batch, harder)
        loss.backward()
        self.hold_still(False)
        return loss.detach()

    def _build_projection(self) -> nn.Linear | None:
        """Brings the student's first layer beside the teacher's embedding; only the similarity loss asks for it."""
        if self.config.distill.similarity_weight == 0:
            return None
        self.embedding = self.teaching.embedding("distill")
        width = self.model.layers[0].out_features
        return nn.Linear(width, width).to(self.embedding.device)


class RbMTraining(StudentTraining):
    """An RbM student starts as its first experts alone (pretraining). Then these are cloned, the memory vectors are
    placed by K-means, the optimiser starts anew, and routing begins (paper, section 4.2).
    """

    def __init__(
        self,
        model: RbMStudent,
        split: GraphSplit,
        teaching: Teaching,
        config: Config,
        encodings: Encodings | None = None,
    ) -> None:
        super().__init__(model, split, teaching, config, encodings, config.rbm)
        model.pretraining = True

    def begin_epoch(self, epoch: int) -> None:
        if epoch == self.config.rbm.pretrain_epochs:
            self._begin_routing()
        self.model.set_decay(annealed_decay(self.config.rbm, epoch))

    def inner_loss(self, trace: Trace) -> Tensor | float | None:
        if not trace.routings:
            return None
        rbm = self.config.rbm
        return losses.embedding_loss(
            trace.routings,
            self.model.memories(),
            commitment_weight=rbm.commitment_weight,
            self_similarity_weight=rbm.self_similarity_weight,
            load_balance_weight=rbm.load_balance_weight,
        )

    def hold_still(self, still: bool) -> None:
        self.model.set_track_memory(not still)

    def resume_at(self, epoch: int) -> None:
        # The optimiser's groups and the routing switch follow from the epoch; their states are loaded afterwards.
        if epoch > self.config.rbm.pretrain_epochs:
            self.model.pretraining = False

    def _begin_routing(self) -> None:
        rbm = self.config.rbm
        if rbm.pretrain_epochs > 0:
            self.model.clone_experts()
        self.model.pretraining = False
        initialize_memory(self.model, self.observed_x, seed=self.config.seed, max_rows=rbm.kmeans_max_rows or None)
        if rbm.reset_optimizer:
            self.optimizer = self.build_optimizer()

    def further_groups(self) -> list[dict[str, Any]]:
        rbm = self.config.rbm
        if rbm.self_similarity_weight == 0:
            return []
        # The self-similarity loss is the one that moves memory vectors by gradient. Adam rescales that gradient,
        # so weight decay on it would steer the memory by itself: it stays off unless asked for.
        memories = [memory.requires_grad_() for memory in self.model.memories()]
        return [{"params": memories, "weight_decay": rbm.weight_decay if rbm.memory_weight_decay else 0.0}]


def teacher_training(model: nn.Module, split: GraphSplit, config: Config) -> TeacherTraining:
    """The training of the teacher that the configuration names."""
    if config.sampling.batch_size > 0:
        return SampledTraining(model, split, config)
    kind = AttentionTraining if config.teacher.name in ATTENTION_TEACHERS else TeacherTraining
    return kind(model, split, config)


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


def annealed_decay(config: RbMConfig, epoch: int) -> float:
    """Decay of the memory at an epoch: ``decay + (1 - decay) * delta * t / T``, at most one (paper, Eq. 13)."""
    return min(1.0, config.decay + (1 - config.decay) * config.anneal_delta * epoch / config.anneal_steps)
