r"""HGMD: an MLP whose hard nodes learn from more of their neighbours (Wu et al., Teach Harder, Learn Poorer: Rethinking
Hard Sample Distillation for GNN-to-MLP Knowledge Distillation, CIKM 2024).

Hardness is an entropy relative to the largest one: that of the teacher's soft label ``p`` (knowledge hardness ``H``),
and that of the student's answer ``q`` after the last epoch (distillation hardness ``H'``). A node ``v`` takes its
neighbour ``u`` into its subgraph with the probability of the paper's subgraph extraction,

.. math:: a_{vu} = 1 - \exp\Big(-\eta(t) \cos(p_v, p_u) \frac{\sqrt{H_v H'_v}}{H_u}\Big),
    \quad \eta(t) = \eta \, 100^{-t / (T - 1)}

in epoch ``t`` of ``T``, and learns from the pairs that were drawn and from itself. HGMD-mixup mixes soft labels, with
``b`` drawn from Beta(beta, beta) for each pair,

.. math:: L = \lambda \, CE(q_v, y_v) + (1 - \lambda) \operatorname{mean}_{(v, u)}
    KL\big((1 - b a_{vu}) p_v + b a_{vu} p_u \,\|\, q_v\big)

and HGMD-weight weighs :math:`KL(p_u \| q_v)` by :math:`a_{vu} \cos(p_v, p_u)`, as shares of a node's pairs times their
number. The first epoch takes all pairs with :math:`a = 1`, as the released code does. Nothing is learned beside the
MLP; full batch, features alone.

Different from the released code (LirongWu/HGMD): a class of probability zero adds nothing to a divergence, where the
code adds 1e-6 to the labels of some graphs and none on others; and patience, epochs and selection are those of
every method here. Its hyperparameters are for a GCN teacher alone; ours are the same under any teacher.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rbm.config import HGMDConfig
from rbm.datasets.splits import GraphSplit
from rbm.distillation.soft_targets import Neighborhood, SoftTargets
from rbm.distillation.task import DistillationTask, TrainedStudent
from rbm.distillation.trainer import NodeTrainer
from rbm.nn import losses
from rbm.nn.students import MLPStudent
from rbm.teachers.outputs import TeacherOutputs

_FALL = 100.0  # of the rate, from the first epoch to the last
_LEAST = 1e-8  # of a relative entropy, which divides


def hardness(logits: Tensor) -> Tensor:
    """Entropy of each row's softmax relative to the largest one, ``[N]`` in (0, 1]."""
    entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
    return (entropy / entropy.max().clamp_min(_LEAST)).clamp_min(_LEAST)


class HGMDTrainer(NodeTrainer):
    """One step an epoch, with one student forward a node: the pairs of a node share its aggregated target."""

    def __init__(
        self, model: MLPStudent, split: GraphSplit, teacher_outputs: TeacherOutputs, config: HGMDConfig
    ) -> None:
        super().__init__(model, split, config, None)
        self.config = config
        self.graph = Neighborhood(split.observed.edge_index, split.observed.num_nodes)
        soft = teacher_outputs.soft_labels
        # Hardness and similarity are those of the labels as the teacher gives them; the temperature is the loss's.
        self.knowledge_hardness, self.teacher = hardness(soft), soft.softmax(-1)
        self.targets = losses.log_probabilities(soft, config.temperature).exp()
        v, u = self.graph.targets, self.graph.sources
        self.similarity = F.cosine_similarity(self.teacher[v], self.teacher[u], dim=-1)
        self.answers: Tensor | None = None  # of the student after the last epoch

    def probabilities(self, epoch: int) -> Tensor:
        """How likely each edge of the graph is to be drawn, ``[M']`` in [0, 1]; one before the student has answered."""
        if self.answers is None:
            return torch.ones_like(self.similarity)
        v, u = self.graph.targets, self.graph.sources
        rate = self.config.rate / _FALL ** (epoch / max(1, self.config.max_epochs - 1))
        knowledge, distillation = self.knowledge_hardness, hardness(self.answers)
        ratio = (knowledge[v] * distillation[v]).sqrt() / knowledge[u]
        return -torch.expm1(-rate * self.similarity * ratio)

    def aggregate(self, drawn: Tensor, probability: Tensor, share: Tensor) -> SoftTargets:
        """What the pairs that were ``drawn`` (positions of edges) and the nodes' own ask for, as a mean over pairs.

        Args:
            drawn: int64 ``[P]``.
            probability: of each of them, ``[P]``.
            share: ``[P]``, the draws from Beta(beta, beta).
        """
        v, u = self.graph.targets[drawn], self.graph.sources[drawn]
        p = self.targets
        if self.config.scheme == "mixup":
            mixed = (share * probability)[:, None]
            labels, weights = torch.lerp(p[v], p[u], mixed), torch.ones_like(probability)
            own = p.new_ones(len(p))
        else:
            labels, raw = p[u], probability * self.similarity[drawn]
            count = torch.bincount(v, minlength=len(p)) + 1
            total = torch.zeros_like(p[:, 0]).index_add_(0, v, raw) + 1  # its own pair: probability and cosine are one
            own = count / total
            weights = raw * own[v]
        mass = torch.zeros_like(p).index_add_(0, v, weights[:, None] * labels) + own[:, None] * p
        negentropy = -torch.special.entr(labels).sum(-1)
        constant = torch.zeros_like(own).index_add_(0, v, weights * negentropy)
        constant = constant - own * torch.special.entr(p).sum(-1)
        pairs = len(drawn) + len(p)
        return SoftTargets(mass / pairs, constant / pairs)

    def train_epoch(self, epoch: int) -> float:
        probability = self.probabilities(epoch)
        drawn = torch.bernoulli(probability).nonzero().flatten()
        beta = torch.full((len(drawn),), self.config.beta, device=drawn.device)
        share = torch.distributions.Beta(beta, beta).sample() if len(drawn) else beta
        target = self.aggregate(drawn, probability[drawn], share)
        self.optimizer.zero_grad()
        logits = self.model(self.observed_x)
        labels = self.split.observed.y[self.train_nodes]
        hard = losses.hard_label_loss(logits[self.train_nodes], labels)
        soft = target.loss(logits, None, self.config.temperature, "softmax")
        loss = self.config.label_weight * hard + (1 - self.config.label_weight) * soft
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def on_epoch_end(self, logits: Tensor) -> None:
        self.answers = logits

    def state(self) -> dict[str, Any]:
        return {"answers": self.answers}

    def restore(self, state: dict[str, Any]) -> None:
        self.answers = state["answers"]


def train_hgmd(task: DistillationTask) -> TrainedStudent:
    """Train an MLP on features alone."""
    config = task.config.hgmd
    student = task.new_student(MLPStudent, config)
    trainer = HGMDTrainer(student, task.split, task.teacher_outputs, config)
    return TrainedStudent(student, task.fit("hgmd", trainer, config), None)
