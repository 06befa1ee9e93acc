"""Phases of a run: time measured in nested phases is counted once."""

from types import SimpleNamespace

import pytest

from rbm.utils import timings as module
from rbm.utils.timings import Timings, part_of_phase, time_sentence


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """A clock that is set by ``now``."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def test_phases_do_not_overlap(clock):
    timings = Timings()
    with timings.measured("rbm"):
        clock.now += 1
        with timings.measured("encodings"):
            clock.now += 4
        with part_of_phase("evaluation"):
            clock.now += 2
    with timings.measured("encodings"):
        clock.now += 0.5
    clock.now += 0.25
    timings.end()
    assert timings == {
        "encodings": {"seconds": 4.5},
        "rbm": {"evaluation_seconds": 2.0, "seconds": 3.0},
        "total": {"seconds": 7.75},
    }
    assert time_sentence(timings) == (
        "Time: 7.8 s (encodings 4.5, rbm 3.0, other 0.2); 2.0 s of it evaluated models after their epochs."
    )


def test_another_run_inside_counts_for_itself(clock):
    outer, inner = Timings(), Timings()
    with outer.measured("search"), inner.measured("teacher"), part_of_phase("evaluation"):
        clock.now += 3
    assert outer == {"search": {"seconds": 3.0}}
    assert inner == {"teacher": {"evaluation_seconds": 3.0, "seconds": 3.0}}
    with part_of_phase("evaluation"):
        clock.now += 1  # outside all phases
