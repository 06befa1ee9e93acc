"""An ensemble of plain students: as many parameters as a mixture, but every node uses all of them."""

from dataclasses import asdict

import torch
from torch import nn

from rbm.distillation.methods.mlp import shaped_like_rbm
from rbm.distillation.task import DistillationTask, TrainedStudent
from rbm.distillation.trainer import StudentTrainer, student_inputs
from rbm.nn.students import EnsembleStudent, MLPStudent
from rbm.training.selection import Result, split_accuracies


def train_ensemble(task: DistillationTask) -> TrainedStudent:
    """Train members that differ only in their seeds. The epoch of each is selected by its own validation accuracy.

    The ensemble as a whole has no epochs, so ``test_max`` is its test accuracy.
    """
    config, split = task.config, task.split
    encodings = task.encode(config.encoding)
    members, epochs = [], 0
    for number in range(config.ensemble.members):
        members.append(task.new_student(MLPStudent, shaped_like_rbm(config), encodings, member=number))
        trainer = StudentTrainer(members[-1], split, task.teacher_outputs, config, encodings)
        epochs += task.fit(f"ensemble-{number}", trainer, config.mlp)["epochs"]
    ensemble = EnsembleStudent(len(members), **members[0].arguments).to(split.graph.x.device)
    ensemble.members = nn.ModuleList(members)
    ensemble.eval()
    with torch.no_grad():
        logits = ensemble(student_inputs(split, encodings)[1])
    accuracies = split_accuracies(split.of_observed(logits), logits, split)
    result = Result(accuracies.val, accuracies.test, accuracies.test, best_epoch=epochs - 1, epochs=epochs)
    return TrainedStudent(ensemble, asdict(result), encodings)
