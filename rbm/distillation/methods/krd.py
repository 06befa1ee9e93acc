r"""KRD: an MLP that learns from reliable neighbours (Wu et al., Quantifying the Knowledge in GNNs for Reliable
Distillation into MLPs, ICML 2023).

.. math:: L = \lambda \, CE(q_v, y_v) + (1 - \lambda) \, \operatorname{mean}_{(v, u)} KL(p_u \,\|\, q_v)

The pairs are each node with itself and with its neighbours. The first epochs use all pairs; later epochs draw
neighbours with probability ``1 - d_u ^ power``, anew in each epoch (:mod:`rbm.distillation.reliability`). Full batch,
features only.

Differences from the released code (LirongWu/RKD): an epoch draws with the exponent that the epochs before it have
learned, whereas the code learns and then draws in the same epoch. With ``krd.reliability.update_every`` above one, on
ogbn-arxiv, the code also keeps a draw until the next update.
"""

from typing import Any

import torch
from torch import Tensor

from rbm.config import Config, KRDConfig
from rbm.datasets.splits import GraphSplit
from rbm.distillation.reliability import Reliability
from rbm.distillation.soft_targets import Neighborhood, SoftTargets, weigh_pairs
from rbm.distillation.task import DistillationTask, TrainedStudent
from rbm.distillation.trainer import NodeTrainer
from rbm.nn import losses
from rbm.nn.students import MLPStudent
from rbm.teachers.outputs import TeacherOutputs


class KRDTrainer(NodeTrainer):
    """One step per epoch with one student forward per node: the pairs of a node share its aggregated target."""

    def __init__(self, model: MLPStudent, split: GraphSplit, teacher_outputs: TeacherOutputs, config: Config) -> None:
        super().__init__(model, split, config.krd, None)
        self.teacher_outputs, self.config = teacher_outputs, config.krd
        self.graph = Neighborhood(split.observed.edge_index, split.observed.num_nodes)
        self.teacher_logs = losses.log_probabilities(teacher_outputs.soft_labels, config.krd.temperature)
        settings = config.krd.reliability
        self.reliability = Reliability(teacher_outputs.entropy_change(settings, config.seed), settings)
        self.epoch = 0

    def epoch_loss(self, epoch: int) -> Tensor:
        self.epoch, config = epoch, self.config
        logits = self.forward(self.model, self.observed_x)
        hard = self.labelled_loss(logits)
        soft = self._targets(epoch).loss(logits, None, config.temperature, "softmax")
        return config.label_weight * hard + (1 - config.label_weight) * soft

    def _targets(self, epoch: int) -> SoftTargets:
        trust = self.reliability.probabilities()
        if epoch < self.config.reliability.update_start_epoch:
            trust = torch.ones_like(trust)
        pairs = weigh_pairs(self.graph, trust, mean="pairs", draw=self.config.draw)
        return SoftTargets.of(pairs, self.graph, self.teacher_logs)

    def on_epoch_end(self, logits: Tensor) -> None:
        if self.reliability.is_due(self.epoch):
            self.reliability.learn(logits.argmax(-1) == self.teacher_outputs.soft_labels.argmax(-1))

    def state(self) -> dict[str, Any]:
        return self.reliability.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.reliability.restore(state)


def train_krd(task: DistillationTask) -> TrainedStudent:
    """Train an MLP on features only."""
    config: KRDConfig = task.config.krd
    student = task.new_student(MLPStudent, config)
    trainer = KRDTrainer(student, task.split, task.teacher_outputs, task.config)
    return TrainedStudent(student, task.fit("krd", trainer, config), None)
