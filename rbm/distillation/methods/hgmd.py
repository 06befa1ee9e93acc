r"""HGMD: an MLP whose hard nodes learn from more of their neighbours (Wu et al., Teach Harder, Learn Poorer: Rethinking
Hard Sample Distillation for GNN-to-MLP Knowledge Distillation, CIKM 2024).

Hardness is the entropy divided by the largest entropy of all nodes: of the teacher's soft label ``p`` for knowledge
hardness ``H``, of the student's prediction ``q`` after the last epoch for distillation hardness ``H'``. A node ``v``
adds its neighbour ``u`` to its subgraph with the probability of the paper's subgraph extraction,

.. math:: a_{vu} = 1 - \exp\Big(-\eta(t) \cos(p_v, p_u) \frac{\sqrt{H_v H'_v}}{H_u}\Big),
    \quad \eta(t) = \eta \, 100^{-t / (T - 1)}

in epoch ``t`` of ``T``. It learns from the pairs that were drawn and from itself. HGMD-mixup mixes soft labels, with
``b`` drawn from Beta(beta, beta) for each pair,

.. math:: L = \lambda \, CE(q_v, y_v) + (1 - \lambda) \operatorname{mean}_{(v, u)}
    KL\big((1 - b a_{vu}) p_v + b a_{vu} p_u \,\|\, q_v\big)

and HGMD-weight weights :math:`KL(p_u \| q_v)` by :math:`a_{vu} \cos(p_v, p_u)`. These weights are normalised over the
pairs of each node and multiplied by their number. The first epoch uses all pairs with :math:`a = 1`, like the released
code. Only the MLP has parameters. Full batch, features only.

Differences from the released code (LirongWu/HGMD): a class of probability zero adds nothing to a divergence, whereas
the code adds 1e-6 to the labels of some graphs and nothing on others. Patience, epochs and selection are the same as
for every method here. The published hyperparameters are for a GCN teacher only; ours are the same for any teacher.
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

_FALL = 100.0  # factor by which the rate decays from the first epoch to the last
_LEAST = 1e-8  # lower bound of a relative entropy, which is a divisor


def hardness(logits: Tensor) -> Tensor:
    """Entropy of each row's softmax divided by the largest one, ``[N]`` in (0, 1]."""
    entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
    return (entropy / entropy.max().clamp_min(_LEAST)).clamp_min(_LEAST)


class HGMDTrainer(NodeTrainer):
    """One step per epoch with one student forward per node: the pairs of a node share its aggregated target."""

    def __init__(
        self, model: MLPStudent, split: GraphSplit, teacher_outputs: TeacherOutputs, config: HGMDConfig
    ) -> None:
        super().__init__(model, split, config, None)
        self.config = config
        self.graph = Neighborhood(split.observed.edge_index, split.observed.num_nodes)
        soft = teacher_outputs.soft_labels
        # Hardness and similarity use the teacher's logits as they are; the temperature only applies to the loss.
        self.knowledge_hardness, self.teacher = hardness(soft), soft.softmax(-1)
        self.targets = losses.log_probabilities(soft, config.temperature).exp()
        v, u = self.graph.targets, self.graph.sources
        self.similarity = F.cosine_similarity(self.teacher[v], self.teacher[u], dim=-1)
        self.last_logits: Tensor | None = None  # of the student after the last epoch

    def probabilities(self, epoch: int) -> Tensor:
        """Probability of drawing each edge of the graph, ``[M']`` in [0, 1]; one in the first epoch."""
        if self.last_logits is None:
            return torch.ones_like(self.similarity)
        v, u = self.graph.targets, self.graph.sources
        rate = self.config.rate / _FALL ** (epoch / (self.config.max_epochs - 1))
        knowledge, distillation = self.knowledge_hardness, hardness(self.last_logits)
        ratio = (knowledge[v] * distillation[v]).sqrt() / knowledge[u]
        return -torch.expm1(-rate * self.similarity * ratio)

    def aggregate(self, drawn: Tensor, probability: Tensor, share: Tensor) -> SoftTargets:
        """Aggregated targets of the drawn pairs and of each node's pair with itself, as a mean over all these pairs.

        Args:
            drawn: int64 ``[P]``, positions of the drawn edges.
            probability: probability of each drawn edge, ``[P]``.
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
            total = torch.zeros_like(p[:, 0]).index_add_(0, v, raw) + 1  # own pair: probability and cosine are one
            own = count / total
            weights = raw * own[v]
        mass = torch.zeros_like(p).index_add_(0, v, weights[:, None] * labels) + own[:, None] * p
        negentropy = -torch.special.entr(labels).sum(-1)
        constant = torch.zeros_like(own).index_add_(0, v, weights * negentropy)
        constant = constant - own * torch.special.entr(p).sum(-1)
        pairs = len(drawn) + len(p)
        return SoftTargets(mass / pairs, constant / pairs)

    def epoch_loss(self, epoch: int) -> Tensor:
        probability = self.probabilities(epoch)
        drawn = torch.bernoulli(probability).nonzero().flatten()
        beta = torch.full((len(drawn),), self.config.beta, device=drawn.device)
        share = torch.distributions.Beta(beta, beta).sample() if len(drawn) else beta
        target = self.aggregate(drawn, probability[drawn], share)
        logits = self.forward(self.model, self.observed_x)
        hard = self.labelled_loss(logits)
        soft = target.loss(logits, None, self.config.temperature, "softmax")
        return self.config.label_weight * hard + (1 - self.config.label_weight) * soft

    def on_epoch_end(self, logits: Tensor) -> None:
        self.last_logits = logits

    def state(self) -> dict[str, Any]:
        return {"answers": self.last_logits}

    def restore(self, state: dict[str, Any]) -> None:
        self.last_logits = state["answers"]


def train_hgmd(task: DistillationTask) -> TrainedStudent:
    """Train an MLP on features only."""
    config = task.config.hgmd
    student = task.new_student(MLPStudent, config)
    trainer = HGMDTrainer(student, task.split, task.teacher_outputs, config)
    return TrainedStudent(student, task.fit("hgmd", trainer, config), None)
