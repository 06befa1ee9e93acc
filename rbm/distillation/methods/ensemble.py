"""An ensemble of plain students: as many parameters as a mixture, all of them used for every node."""

from dataclasses import asdict

import torch

from rbm.distillation.methods.mlp import mlp_arguments, shaped_like_rbm
from rbm.distillation.task import DistillationTask, TrainedStudent
from rbm.distillation.trainer import StudentTrainer, student_inputs
from rbm.nn.students import EnsembleStudent, MLPStudent
from rbm.training.loop import Result, split_accuracies


def train_ensemble(task: DistillationTask) -> TrainedStudent:
    """Train members that differ in their seeds alone; each is selected by its own validation accuracy.

    The whole has no epochs to take a maximum of, so ``test_max`` is its test accuracy.
    """
    config, split = task.config, task.split
    encodings = task.encode(config.encoding)
    member_arguments = mlp_arguments(task, shaped_like_rbm(config), encodings)
    arguments = {"members": config.ensemble.members, **member_arguments}
    ensemble, epochs = EnsembleStudent(**arguments).to(split.graph.x.device), 0
    for number in range(config.ensemble.members):
        fresh = task.start(MLPStudent, member_arguments, member=number)
        ensemble.members[number] = fresh
        trainer = StudentTrainer(fresh, split, task.teacher_outputs, config, encodings)
        epochs += task.fit(f"ensemble-{number}", trainer, config.mlp)["epochs"]
    ensemble.eval()
    with torch.no_grad():
        logits = ensemble(student_inputs(split, encodings)[1])
    accuracies = split_accuracies(logits[split.observed_nodes], logits, split)
    result = Result(accuracies.val, accuracies.test, accuracies.test, best_epoch=epochs - 1, epochs=epochs)
    return TrainedStudent(ensemble, arguments, asdict(result), encodings)
