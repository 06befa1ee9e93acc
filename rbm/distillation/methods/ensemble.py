"""An ensemble of plain students: as many parameters as a mixture, all of them used for every node."""

from dataclasses import asdict

import torch

from rbm.distillation.methods.mlp import mlp_arguments, shaped_like_rbm
from rbm.distillation.task import Learned, Lesson
from rbm.distillation.trainer import StudentTraining, student_inputs
from rbm.nn.students import EnsembleStudent, MLPStudent
from rbm.training.loop import Result, split_accuracies


def learn_ensemble(lesson: Lesson) -> Learned:
    """Train members that differ in their seeds alone; each is selected by its own validation accuracy.

    The whole has no epochs to take a maximum of, so ``test_max`` is its test accuracy.
    """
    config, split = lesson.config, lesson.split
    encodings = lesson.encode(config.encoding)
    member_arguments = mlp_arguments(lesson, shaped_like_rbm(config), encodings)
    arguments = {"members": config.ensemble.members, **member_arguments}
    ensemble, epochs = EnsembleStudent(**arguments).to(split.graph.x.device), 0
    for number in range(config.ensemble.members):
        fresh = lesson.start(MLPStudent, member_arguments, member=number)
        ensemble.members[number] = fresh
        learner = StudentTraining(fresh, split, lesson.teaching, config, encodings)
        epochs += lesson.fit(f"ensemble-{number}", learner, config.mlp)["epochs"]
    ensemble.eval()
    with torch.no_grad():
        logits = ensemble(student_inputs(split, encodings)[1])
    accuracies = split_accuracies(logits[split.observed_nodes], logits, split)
    result = Result(accuracies.val, accuracies.test, accuracies.test, best_epoch=epochs - 1, epochs=epochs)
    return Learned(ensemble, arguments, asdict(result), encodings)
