"""Limits of time: a training that cannot end in time stops early, and says what it needs."""

import time
from contextlib import nullcontext

import pytest
from torch import nn

from rbm.config import EncodingConfig
from rbm.datasets.splits import split_graph
from rbm.distillation import task
from rbm.training import time_limit as module
from rbm.training.loop import fit
from rbm.training.selection import Accuracies, EpochLimits, Result, Selection
from rbm.training.time_limit import OutOfTimeError, TimeLimit, current_limit, time_limit
from rbm.utils.cache import Cache
from rbm.utils.progress import Progress
from rbm.utils.timings import Timings


class Slow:
    """A trainer whose epochs take a hundredth of a second; the first one has the best accuracy."""

    precision = "float32"

    def __init__(self):
        self.model, self.epochs = nn.Linear(1, 1), 0

    def train_epoch(self, epoch):
        time.sleep(0.01)
        self.epochs += 1
        return 1.0

    def evaluate(self):
        return Accuracies(1.0, 1.0 / self.epochs, 0.0)

    def expert_loads(self):
        return None

    def at_best_epoch(self, epoch):
        pass


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = [0.0]
    monkeypatch.setattr(module, "_clock", lambda: now[0])
    return now


def test_a_training_that_cannot_end_in_time_stops_at_its_first_epoch():
    trainer = Slow()
    with pytest.raises(OutOfTimeError, match="phase 'mlp' was cut short") as raised, time_limit(5.0):
        fit("mlp", trainer, EpochLimits(max_epochs=10**6, patience=10**4), progress=Progress(None))
    assert trainer.epochs == 1
    assert raised.value.needed > 100, "ten thousand epochs without a better one must follow"


def test_a_training_that_may_end_in_time_goes_on():
    trainer = Slow()
    with time_limit(60.0):
        result = fit("mlp", trainer, EpochLimits(max_epochs=10**6, patience=5), progress=Progress(None))
    assert result.epochs == 6
    assert current_limit().seconds == float("inf"), "the limit ends with its block"


def test_one_slow_epoch_does_not_end_a_training_that_is_fast_otherwise(clock):
    trainer = Slow()

    def train_epoch(epoch):
        clock[0] += 50.0 if epoch == 1 else 1.0
        trainer.epochs += 1
        return 1.0

    trainer.train_epoch = train_epoch
    with time_limit(100.0):
        assert fit("mlp", trainer, EpochLimits(max_epochs=6, patience=10), progress=Progress(None)).epochs == 6


@pytest.mark.parametrize(
    ("epoch", "best", "options", "left"),
    [
        (0, 0, {}, 10),
        (7, 6, {}, 9),
        (3, 0, {"min_epochs": 30}, 27),
        (3, 0, {"max_epochs": 6}, 2),
        (3, 0, {"warmup": 21}, 27),
        (40, 0, {}, 0),
    ],
)
def test_epochs_that_follow_at_least(epoch, best, options, left):
    limits = EpochLimits(**{"max_epochs": 100, "patience": 10, **options})
    selection = Selection(limits, Result(best_epoch=best, epochs=epoch + 1))
    assert selection.least_left == left
    assert selection.is_over == (left == 0)


def test_work_that_is_repeated_has_to_fit_twice(clock):
    limit = TimeLimit(100.0, repeated=True)
    clock[0] = 20.0
    limit.check("encodings", 30.0, reused=True)  # 50 once
    clock[0] = 50.0
    limit.check("encodings", reused=True)
    assert limit.reused == 50.0
    clock[0] = 60.0
    limit.check("mlp", 15.0)  # 50 once, 25 twice
    with pytest.raises(OutOfTimeError) as raised:
        limit.check("mlp", 15.5)
    assert raised.value.needed == 101.0


def test_work_that_is_not_repeated_has_to_fit_once(clock):
    limit = TimeLimit(100.0)
    clock[0] = 60.0
    limit.check("mlp", 40.0)
    with pytest.raises(OutOfTimeError):
        limit.check("mlp", 40.5)


@pytest.mark.parametrize(("seconds", "stopped_at"), [(5.0, None), (6.0, 16.0)])
def test_the_end_of_the_walks_is_foreseen(clock, small_graph, monkeypatch, seconds, stopped_at):
    """The walks come in ten parts, the first one after ten seconds of other work."""

    def encode(*_, advance, **__):
        clock[0] += 10.0
        for _ in range(10):
            advance(60)
            clock[0] += seconds

    monkeypatch.setattr(task, "encode", encode)
    encoder = task.Encoder(split_graph(small_graph), 3, 0, Cache(), [], Progress(None), Timings())
    expected = nullcontext() if stopped_at is None else pytest.raises(OutOfTimeError, match="encodings")
    with expected, time_limit(60.0):
        encoder(EncodingConfig(epochs=2, walks_per_node=5))
    assert clock[0] == (stopped_at or 60.0)
