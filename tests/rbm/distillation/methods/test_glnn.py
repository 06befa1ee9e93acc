"""GLNN's two passes: an epoch equals a few plain lines, with the expected number of steps."""

import pytest
import torch
from torch.nn import functional as F

from rbm.config import GLNNConfig
from rbm.datasets.splits import split_graph
from rbm.distillation.methods.glnn import GLNNTrainer
from rbm.nn.students import MLPStudent
from rbm.teachers.outputs import outputs_from_logits


@pytest.fixture
def trainer(split, teacher_outputs):
    def make(**options) -> GLNNTrainer:
        config = GLNNConfig(hidden_channels=8, dropout=0.0, **options)
        return GLNNTrainer(MLPStudent(6, 8, 4), split, teacher_outputs, config)

    return make


def test_an_epoch_is_a_pass_over_labels_and_one_over_soft_labels(trainer, twin, split, teacher_outputs):
    ours = trainer(batch_size=6, label_weight=0.3, lr=0.03)
    model, optimizer = twin(ours.model, ours.config)
    x, y = split.observed.x, split.observed.y
    teacher = teacher_outputs.logits[split.observed_nodes].softmax(-1)
    for epoch in range(3):
        torch.manual_seed(epoch)
        loss = ours.train_epoch(epoch)
        torch.manual_seed(epoch)
        sums = []
        for nodes, soft in ((split.observed.train_mask.nonzero().flatten(), False), (torch.arange(len(x)), True)):
            order = nodes[torch.randperm(len(nodes))]
            losses = []
            for batch in order.split(6)[: len(nodes) // 6]:
                q = model(x[batch]).log_softmax(-1)
                if soft:
                    value = 0.7 * (teacher[batch] * (teacher[batch].log() - q)).sum() / 6
                else:
                    value = 0.3 * F.nll_loss(q, y[batch])
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
                losses.append(value.item())
            sums.append(sum(losses) / len(losses))
        assert loss == pytest.approx(sum(sums), rel=1e-5)
    for mine, plain in zip(ours.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, plain)


@pytest.mark.parametrize(
    ("label_weight", "zero_weight_pass", "batch_size", "steps"),
    [
        (0.0, False, 7, 8),  # 60 nodes
        (0.0, True, 7, 8 + 2),  # and 15 labelled ones
        (0.5, False, 7, 8 + 2),
        (1.0, False, 7, 2),
        (1.0, True, 7, 8 + 2),
        (0.0, False, 100, 1),
        (0.0, True, 100, 1 + 1),
        (0.0, True, 16, 3 + 1),
        (0.0, False, 60, 1),
    ],
)
def test_steps_of_an_epoch(small_graph, label_weight, zero_weight_pass, batch_size, steps):
    split = split_graph(small_graph)
    config = GLNNConfig(label_weight=label_weight, zero_weight_pass=zero_weight_pass, batch_size=batch_size)
    trainer = GLNNTrainer(MLPStudent(12, 8, 3), split, outputs_from_logits(torch.randn(60, 3), split), config)
    trainer.train_epoch(0)
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {steps}


def test_left_over_rows_wait_for_another_epoch(trainer, split, monkeypatch):
    ours, seen = trainer(batch_size=7), []
    monkeypatch.setattr(ours, "soft_loss", lambda logits, nodes: seen.append(nodes) or logits.sum())
    count = split.observed.num_nodes
    epochs = []
    for epoch in range(12):
        seen.clear()
        ours.train_epoch(epoch)
        assert all(len(batch) == 7 for batch in seen)
        assert len(torch.cat(seen).unique()) == count // 7 * 7 < count
        epochs.append(torch.cat(seen))
    assert len(torch.cat(epochs).unique()) == count
    assert not torch.equal(epochs[0], epochs[1]), "shuffled anew"


def test_the_pass_of_weight_zero_decays_and_reads_no_label(trainer, split):
    def weights_after_an_epoch(zero_weight_pass: bool, shift: int) -> torch.Tensor:
        torch.manual_seed(0)
        ours = trainer(batch_size=100, zero_weight_pass=zero_weight_pass, weight_decay=0.1)
        split.observed.y += shift
        ours.train_epoch(0)
        split.observed.y -= shift
        return ours.model.layers[0].weight.detach()

    split.observed.y %= 3
    kept = weights_after_an_epoch(True, 0)
    assert torch.equal(kept, weights_after_an_epoch(True, 1))
    assert not torch.allclose(kept, weights_after_an_epoch(False, 0), atol=1e-4)
