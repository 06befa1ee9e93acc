"""The MLP on labels alone: test nodes are evaluated only when an epoch may be selected; the selection is the same."""

from dataclasses import replace

import pytest
import torch

from rbm.config import Config
from rbm.datasets.splits import split_graph
from rbm.distillation.methods import labels
from rbm.distillation.methods.labels import LabelsTrainer
from rbm.distillation.task import DistillationTask
from rbm.distillation.trainer import NodeTrainer
from rbm.nn.students import MLPStudent
from rbm.training.loop import fit
from rbm.training.selection import Accuracies, EpochLimits
from rbm.utils.cache import Cache
from rbm.utils.progress import Progress


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_selects_what_all_accuracies_select(small_graph, monkeypatch, setting):
    # Random classes: validation accuracy fluctuates.
    small_graph.y = torch.randint(0, 3, (small_graph.num_nodes,), generator=torch.Generator().manual_seed(0))
    network = replace(Config().teacher, hidden_channels=16, lr=0.02, min_epochs=0)
    asked = []
    every = NodeTrainer.evaluate

    def train():
        torch.manual_seed(0)
        split = split_graph(small_graph, setting, unseen_fraction=0.4)
        trainer = LabelsTrainer(MLPStudent(small_graph.num_features, 16, 3, dropout=0.5), split, network)
        result = fit("labels", trainer, EpochLimits(max_epochs=60, patience=20), progress=Progress(None))
        return result, trainer

    monkeypatch.setattr(NodeTrainer, "evaluate", lambda trainer: asked.append(trainer) or every(trainer))
    found, trainer = train()
    assert 0 < len(asked) < found.epochs / 2
    monkeypatch.setattr(LabelsTrainer, "evaluate", every)
    expected, plain = train()
    assert replace(found, test_max=0.0) == replace(expected, test_max=0.0)
    assert found.test_accuracy <= found.test_max <= expected.test_max
    assert all(map(torch.equal, trainer.model.parameters(), plain.model.parameters()))
    resumed = LabelsTrainer(trainer.model, trainer.split, network)
    resumed.restore(trainer.state())
    assert resumed.best == trainer.best == (found.val_accuracy, found.test_accuracy)


def test_of_equal_epochs_the_later_one_is_evaluated_too(small_graph, monkeypatch):
    trainer = LabelsTrainer(MLPStudent(small_graph.num_features, 8, 3), split_graph(small_graph), Config().teacher)
    accuracies = iter([0.1, 0.2])
    monkeypatch.setattr(NodeTrainer, "evaluate", lambda trainer: Accuracies(0.0, 0.0, next(accuracies)))
    monkeypatch.setattr(labels, "accuracy", lambda logits, classes: 0.5)
    assert [trainer.evaluate().test for _ in range(2)] == [0.1, 0.2]


def test_the_cache_knows_the_nodes_of_each_set(small_graph, tmp_path):
    phases = []

    def trainings(data, **changes) -> int:
        config = Config().updated(changes)
        task = DistillationTask(split_graph(data), None, config, 3, None, None, Progress(None), Cache(tmp_path))
        task.fit = lambda phase, _, network: phases.append((phase, network.min_epochs)) or {"val_accuracy": 0.5}
        labels.train_labels(task)
        return len(phases)

    assert trainings(small_graph) == trainings(small_graph.clone()) == 1
    for count, name in enumerate(("x", "y", "train_mask", "val_mask", "test_mask"), start=2):
        other = small_graph.clone()
        other[name] = other[name].roll(1, 0)
        assert trainings(other) == count, name
    assert trainings(small_graph, seed=1) == 7
    assert trainings(small_graph, teacher={"lr": 0.02}) == 8
    assert trainings(small_graph, precision="bfloat16") == 9
    assert set(phases) == {("labels", 0)}, "a teacher's least number of epochs is for its soft labels"


def test_the_float32_model_of_a_mixed_precision_training_is_evaluated_anew(small_graph):
    trainer = LabelsTrainer(MLPStudent(small_graph.num_features, 8, 3), split_graph(small_graph), Config().teacher)
    trainer.model.eval()
    trainer.precision, trainer.best = "bfloat16", (1.0, 0.123)
    trainer.at_best_epoch(0)
    trainer.precision = "float32"
    assert trainer.evaluate() == NodeTrainer.evaluate(trainer)
    trainer.best = (1.0, 0.123)
    trainer.at_best_epoch(0)
    assert trainer.best == (1.0, 0.123), "nothing changed in float32"
