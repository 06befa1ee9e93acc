r"""GLNN: an MLP that learns each node's soft label in mini-batches (Zhang et al., Graph-less Neural Networks, ICLR
2022).

.. math:: L = \lambda \, CE(q_v, y_v) + (1 - \lambda) \, KL(p_v \,\|\, q_v)

The schedule differs from RbM's: an epoch is a pass over the labelled nodes and then a pass over all observed nodes,
both in shuffled batches with one optimiser step per batch.
"""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from rbm.config import GLNNConfig
from rbm.datasets.encodings import Encodings
from rbm.datasets.splits import GraphSplit
from rbm.distillation.task import DistillationTask, TrainedStudent
from rbm.distillation.trainer import NodeTrainer
from rbm.nn import losses
from rbm.nn.students import MLPStudent
from rbm.teachers.outputs import TeacherOutputs

# The loss of logits [B, C] of nodes, int64 [B].
NodeLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class GLNNTrainer(NodeTrainer):
    """Two passes per epoch, one step per batch. Methods with the same schedule override :meth:`batch_loss`."""

    def __init__(
        self,
        model: MLPStudent,
        split: GraphSplit,
        teacher_outputs: TeacherOutputs,
        config: GLNNConfig,
        encodings: Encodings | None = None,
    ) -> None:
        super().__init__(model, split, config, encodings)
        self.teacher_outputs, self.config = teacher_outputs, config
        self.observed_nodes = torch.arange(split.observed.num_nodes, device=split.observed.x.device)

    def train_epoch(self, epoch: int) -> float:
        weight, total = self.config.label_weight, 0.0
        if weight > 0 or self.config.zero_weight_pass:
            total += self._pass(self.train_nodes, self.hard_loss, weight)
        if weight < 1 or self.config.zero_weight_pass:
            total += self._pass(self.observed_nodes, self.soft_loss, 1 - weight)
        return float(total)

    def hard_loss(self, logits: Tensor, nodes: Tensor) -> Tensor:
        return losses.hard_label_loss(logits, self.split.observed.y[nodes])

    def soft_loss(self, logits: Tensor, nodes: Tensor) -> Tensor:
        return losses.soft_label_loss(logits, self.teacher_outputs.soft_labels[nodes])

    def batch_loss(self, nodes: Tensor, target: NodeLoss) -> Tensor:
        """The loss of a batch; ``target`` is :meth:`hard_loss` or :meth:`soft_loss`."""
        return target(self.forward(self.model, self.observed_x[nodes]), nodes)

    def _pass(self, nodes: Tensor, target: NodeLoss, weight: float) -> Tensor:
        """One step per batch of ``nodes``; returns the mean loss."""
        total, count = torch.zeros((), device=nodes.device), 0
        for batch in self._batches(nodes):
            self.optimizer.zero_grad()
            loss = weight * self.batch_loss(batch, target)
            loss.backward()
            self.optimizer.step()
            total, count = total + loss.detach(), count + 1
        return total / count

    def _batches(self, nodes: Tensor) -> Iterator[Tensor]:
        """Shuffled batches of equal size; the remaining nodes are skipped in this epoch."""
        size = min(self.config.batch_size, len(nodes))
        order = nodes[torch.randperm(len(nodes), device=nodes.device)]
        return iter(order[: len(nodes) // size * size].split(size))


def train_glnn(task: DistillationTask) -> TrainedStudent:
    """Train an MLP on features only."""
    config = task.config.glnn
    student = task.new_student(MLPStudent, config)
    trainer = GLNNTrainer(student, task.split, task.teacher_outputs, config)
    return TrainedStudent(student, task.fit("glnn", trainer, config), None)
