"""An MLP that learns only the true labels: the baseline without a graph and without a teacher.

It has the teacher's shape and settings. A teacher that does not outperform it has nothing to teach.
"""

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from rbm.config import Network
from rbm.datasets.splits import GraphSplit
from rbm.distillation.task import DistillationTask, TrainedStudent
from rbm.distillation.trainer import NodeTrainer
from rbm.nn import losses
from rbm.nn.students import MLPStudent
from rbm.training.cached import cached_phase
from rbm.training.metrics import accuracy
from rbm.training.selection import Accuracies


class LabelsTrainer(NodeTrainer):
    """One step per epoch on the labelled nodes.

    On Amazon Photo these are 2 % of all rows, and predictions for test nodes would take nearly all of the time. They
    are computed only if the validation accuracy is at least the best so far, because only such an epoch can be
    selected. Other epochs report the test accuracy of the best one so far, and ``test_max`` is the maximum over these.
    """

    def __init__(self, model: nn.Module, split: GraphSplit, network: Network) -> None:
        super().__init__(model, split, network, None)
        observed = split.observed
        self.train_x, self.val_x = (
            self.observed_x[mask.nonzero().flatten()] for mask in (observed.train_mask, observed.val_mask)
        )
        self.train_y, self.val_y = observed.y[observed.train_mask], observed.y[observed.val_mask]
        self.best: tuple[float, float] | None = None  # validation and test accuracy of the same epoch

    def epoch_loss(self, epoch: int) -> Tensor:
        return losses.hard_label_loss(self.forward(self.model, self.train_x), self.train_y)

    @torch.no_grad()
    def evaluate(self) -> Accuracies:
        train, val = (
            accuracy(self.forward(self.model, x), y)
            for x, y in ((self.train_x, self.train_y), (self.val_x, self.val_y))
        )
        if self.best is None or val >= self.best[0]:
            self.best = val, super().evaluate().test
        return Accuracies(train, val, self.best[1])

    def at_best_epoch(self, epoch: int) -> None:
        if self.precision != "float32":
            self.best = None  # these weights are evaluated once more, in float32

    def state(self) -> dict[str, Any]:
        return {"best": self.best}

    def restore(self, state: dict[str, Any]) -> None:
        self.best = state.get("best")  # absent in checkpoints of earlier versions


def train_labels(task: DistillationTask) -> TrainedStudent:
    """Train an MLP on the features of the labelled nodes."""
    network = replace(task.config.teacher, min_epochs=0)  # min_epochs is for the soft labels of a teacher
    student = task.new_student(MLPStudent, network, hidden_channels=network.hidden_channels)

    def fit() -> dict[str, Any]:
        return task.fit("labels", LabelsTrainer(student, task.split, network), network)

    if task.folder is not None:  # the run folder has the metrics of every epoch, which the cache lacks
        return TrainedStudent(student, fit(), None)
    settings, inputs = _made_from(task, network)
    return TrainedStudent(
        student, cached_phase("labels", student, settings, inputs, fit, task.cache, task.progress), None
    )


def _made_from(task: DistillationTask, network: Network) -> tuple[dict[str, Any], list[Tensor]]:
    """Everything that the MLP depends on: not the teacher's name and edges, so trials of many teachers share it."""
    settings = {item.name: getattr(network, item.name) for item in fields(Network)}
    if task.config.precision != "float32":  # the default, so that it leaves the names of existing files
        settings["precision"] = task.config.precision
    graph, observed = task.split.graph, task.split.observed
    inputs = [graph.x, graph.y, task.split.observed_nodes, task.split.unseen_nodes]
    inputs += [observed.train_mask, observed.val_mask, observed.test_mask]
    return settings | {"classes": task.classes, "seed": task.config.seed}, inputs
