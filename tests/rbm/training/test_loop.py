"""The epoch loop: selection by validation, early stopping, checkpoints."""

import itertools
from dataclasses import replace
from time import perf_counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rbm.config import Config
from rbm.training import loop as training
from rbm.training.loop import fit, fit_phase
from rbm.training.run_folder import RunFolder, read_metrics
from rbm.training.selection import Accuracies, EpochLimits
from rbm.utils.progress import Progress


class Script:
    """A trainer with given validation accuracies; its weight counts the epochs."""

    precision = "float32"

    def __init__(self, val, test=None):
        self.model = nn.Linear(1, 1)
        nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.val, self.test, self.epoch, self.resumed, self.restored = val, test or val, -1, None, None

    def train_epoch(self, epoch):
        assert self.model.training
        self.epoch = epoch
        with torch.no_grad():
            self.model.weight += 1
        return 1.0 / (epoch + 1)

    def evaluate(self):
        assert not self.model.training
        return Accuracies(1.0, self.val[self.epoch], self.test[self.epoch])

    def resume_at(self, epoch):
        self.resumed = epoch

    def at_best_epoch(self, epoch):
        self.finished_at = epoch

    def state(self):
        return {"seen": self.epoch}

    def restore(self, state):
        self.restored = state


def run(trainer, folder=None, progress=None, **limits):
    limits = EpochLimits(**{"max_epochs": 6, "patience": 10, **limits})
    return fit("rbm", trainer, limits, folder=folder, progress=progress or Progress(None))


def test_reports_the_test_accuracy_at_the_best_validation_epoch():
    trainer = Script(val=[0.1, 0.5, 0.3, 0.5, 0.2, 0.1], test=[0.9, 0.2, 0.3, 0.4, 0.5, 0.6])
    result = run(trainer)
    # Of the two epochs with validation 0.5, the later one counts, as in the released code; 0.9 is the maximum.
    assert (result.best_epoch, result.val_accuracy, result.test_accuracy) == (3, 0.5, 0.4)
    assert (result.test_max, result.epochs) == (0.9, 6)
    assert trainer.model.weight.item() == 4, "the model is the one of the best epoch"
    assert not trainer.model.training
    assert trainer.finished_at == 3


def test_early_stopping_counts_from_the_best_epoch():
    assert run(Script(val=[0.5, 0.4, 0.4, 0.4, 0.9, 0.9]), patience=3).epochs == 4
    assert run(Script(val=[0.5, 0.4, 0.4, 0.5, 0.4, 0.4]), patience=3).epochs == 6


def test_warmup_is_neither_selected_nor_counted():
    result = run(Script(val=[0.9, 0.9, 0.1, 0.2, 0.1, 0.1]), warmup=2, max_epochs=4, patience=2)
    assert (result.best_epoch, result.val_accuracy, result.epochs) == (3, 0.2, 6)


def test_a_warmup_that_may_be_selected():
    val = [0.8, 0.9, 0.1, 0.2, 0.3, 0.1]
    trainer = Script(val)
    result = run(trainer, warmup=2, select_warmup=True, max_epochs=4, patience=3)
    assert (result.best_epoch, result.val_accuracy) == (1, 0.9)
    assert result.epochs == 5, "stopping counts from the end of the warmup: epochs 2, 3 and 4 were no better"
    assert (trainer.model.weight.item(), trainer.finished_at) == (2, 1)
    assert run(Script(val), warmup=2, select_warmup=True, max_epochs=4, min_epochs=2).best_epoch == 4


def test_min_epochs_are_not_selected():
    val = [0.9, 0.9, 0.3, 0.4, 0.1, 0.1]
    assert run(Script(val), min_epochs=2).best_epoch == 3
    assert run(Script(val), warmup=1, max_epochs=5, min_epochs=3).best_epoch == 5
    assert run(Script([*val[:-1], 0.05]), min_epochs=100).best_epoch == 5, "a short run still selects its last epoch"
    result = run(Script([0.9, 0.8, 0.7, 0.6, 0.5, 0.4]), min_epochs=3, patience=1)
    assert (result.best_epoch, result.epochs) == (3, 5), "patience does not end before the first that may be selected"


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_loss_that_is_not_finite(loss):
    for first in (0, 2):
        trainer = Script(val=[0.1] * 6)
        trainer.train_epoch = lambda epoch, first=first: float(loss) if epoch == first else 1.0
        message = f"loss of phase 'rbm' became {loss} in epoch {first}; a smaller learning rate usually helps"
        with pytest.raises(FloatingPointError, match=message) as caught:
            run(trainer)
        assert ("features of a smaller scale" in str(caught.value)) == (first == 0)


def test_continues_from_a_checkpoint(tmp_path, monkeypatch):
    val = [0.1, 0.5, 0.3, 0.4, 0.2, 0.1]
    whole = run(Script(val))
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", -1.0)
    folder = RunFolder(tmp_path / "run", Config())
    killed = Script(val)
    killed.evaluate = lambda: Accuracies(1.0, val[killed.epoch], val[killed.epoch]) if killed.epoch < 3 else 1 / 0
    with pytest.raises(ZeroDivisionError):
        run(killed, folder=folder)

    again = Script(val)
    result = run(again, folder=RunFolder(folder.path, Config(), resume=True))
    assert (again.resumed, again.restored) == (3, {"seen": 2})
    assert result == whole
    assert again.model.weight.item() == whole.best_epoch + 1
    assert [record["epoch"] for record in read_metrics(folder.path)] == list(range(6))


def test_checkpoints_are_ten_seconds_apart(tmp_path, monkeypatch):
    ticks, saved = itertools.count(step=4), []
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: next(ticks), perf_counter=perf_counter))
    folder = RunFolder(tmp_path / "run", Config())
    monkeypatch.setattr(folder, "save_checkpoint", lambda snapshot: saved.append(snapshot["epoch"]))
    run(Script(val=[0.1] * 6), folder=folder)
    assert saved == [3, 6]


def test_a_training_that_was_over_is_not_continued(tmp_path, monkeypatch):
    val = [0.5, 0.4, 0.4, 0.4, 0.9, 0.9]
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", -1.0)
    folder = RunFolder(tmp_path / "run", Config())
    killed = Script(val)
    killed.at_best_epoch = lambda epoch: 1 / 0  # after the last checkpoint, before the phase is saved
    with pytest.raises(ZeroDivisionError):
        run(killed, folder=folder, patience=3)

    again = Script(val)
    result = run(again, folder=RunFolder(folder.path, Config(), resume=True), patience=3)
    assert (again.resumed, again.epoch, again.model.training) == (4, -1, False), "no further epoch"
    assert result == run(Script(val), patience=3)
    assert again.model.weight.item() == result.best_epoch + 1


def test_a_finished_phase_is_loaded_as_its_training_left_it(tmp_path):
    folder, network = RunFolder(tmp_path / "run", Config()), replace(Config().mlp, max_epochs=4, patience=10)

    def trained(trainer):
        result = fit_phase("rbm", trainer, network, folder, Progress(None), warmup=2, select_warmup=True)
        assert result["best_epoch"] == 1
        assert (trainer.model.weight.item(), trainer.model.training, trainer.precision) == (2, False, "float32")
        return result

    first, again = (Script(val=[0.1, 0.5, 0.3, 0.4, 0.2, 0.1]) for _ in range(2))
    again.precision = "bfloat16"
    assert trained(first) == trained(again)
    assert (first.resumed, again.resumed, again.epoch) == (None, 3, -1), "after the first epoch past the warmup"


def test_checkpoint_of_another_phase_is_not_taken(tmp_path):
    folder = RunFolder(tmp_path / "run", Config())
    folder.save_checkpoint({"phase": "teacher", "epoch": 4})
    trainer = Script(val=[0.1] * 6)
    run(trainer, folder=folder)
    assert trainer.resumed is None


def test_metrics_have_one_line_an_epoch(tmp_path):
    folder = RunFolder(tmp_path / "run", Config())
    val, test = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0.9, 0.8, 0.7, 0.6, 0.5, 0.4]
    run(Script(val, test), folder=folder)
    records = read_metrics(folder.path)
    assert [record["epoch"] for record in records] == list(range(6))
    accuracies = [tuple(record[f"{name}_accuracy"] for name in ("train", "val", "test")) for record in records]
    assert accuracies == list(zip([1.0] * 6, val, test, strict=True))
    assert set(records[0]) == {
        "phase", "epoch", "loss", "train_accuracy", "val_accuracy", "test_accuracy", "seconds",
    }  # fmt: skip
    assert all(a["loss"] > b["loss"] for a, b in itertools.pairwise(records))


class Line(training.Trainer):
    """A weight that starts at zero, without a loss."""

    def __init__(self):
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)

    def build_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=1.0)

    def evaluate(self):
        return Accuracies(1.0, 1.0, 1.0)


def test_by_default_an_epoch_is_one_step_on_its_loss():
    class Epochs(Line):
        def epoch_loss(self, epoch):
            return (epoch + 2) * self.model.weight.sum()

    trainer = Epochs()
    assert [trainer.train_epoch(epoch) for epoch in (0, 1)] == [0.0, -6.0]
    assert trainer.model.weight.item() == -5.0, "gradients of the first epoch do not remain"


def test_a_trainer_without_a_loss_is_named():
    with pytest.raises(NotImplementedError, match="Line defines neither train_epoch nor epoch_loss; define one"):
        Line().train_epoch(0)


def test_mixed_precision_ends_with_the_accuracies_of_the_float32_model():
    class Mixed(Script):
        precision = "bfloat16"

        def evaluate(self):
            return Accuracies(1.0, 0.4, 0.3) if self.precision == "float32" else super().evaluate()

    result = run(trainer := Mixed(val=[0.1, 0.5, 0.3, 0.2, 0.2, 0.1], test=[0.2] * 6))
    assert (result.best_epoch, result.val_accuracy, result.test_accuracy, result.test_max) == (1, 0.4, 0.3, 0.3)
    assert trainer.precision == "float32"


def test_numbers_below_the_normal_range_do_not_slow_an_epoch():
    """They count as zeros, because processors multiply them slowly; not afterwards."""

    class Small(Script):
        def train_epoch(self, epoch):
            self.products = torch.full((3,), 1e-38) * 0.01
            return super().train_epoch(epoch)

    run(trainer := Small(val=[0.5], test=[0.5]), max_epochs=1)
    assert (trainer.products == 0).all()
    assert (torch.full((3,), 1e-38) * 0.01 > 0).all()
