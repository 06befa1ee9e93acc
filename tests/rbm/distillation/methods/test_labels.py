"""The MLP on labels alone: test nodes are evaluated only when an epoch may be selected; the selection is the same."""

from dataclasses import replace

import pytest
import torch

from rbm.config import Config
from rbm.datasets.splits import split_graph
from rbm.distillation.methods.labels import LabelsTrainer
from rbm.distillation.trainer import NodeTrainer
from rbm.nn.students import MLPStudent
from rbm.training.loop import fit
from rbm.training.selection import EpochLimits
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
