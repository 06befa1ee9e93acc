"""An MLP that learns the true labels alone: what features tell without the graph, and without a teacher.

It has the teacher's shape and settings. A teacher that is not ahead of it has nothing to teach.
"""

from dataclasses import replace

from rbm.distillation.task import DistillationTask, TrainedStudent
from rbm.distillation.trainer import NodeTrainer
from rbm.nn import losses
from rbm.nn.students import MLPStudent


class LabelsTrainer(NodeTrainer):
    """One step an epoch on the labelled nodes."""

    def train_epoch(self, epoch: int) -> float:
        self.optimizer.zero_grad()
        logits = self.model(self.observed_x[self.train_nodes])
        loss = losses.hard_label_loss(logits, self.split.observed.y[self.train_nodes])
        loss.backward()
        self.optimizer.step()
        return loss.item()


def train_labels(task: DistillationTask) -> TrainedStudent:
    """Train an MLP on the features of the labelled nodes."""
    network = replace(task.config.teacher, min_epochs=0)  # these are for soft labels, which nobody takes from it
    student = task.new_student(MLPStudent, network, hidden_channels=network.hidden_channels)
    return TrainedStudent(student, task.fit("labels", LabelsTrainer(student, task.split, network, None), network), None)
