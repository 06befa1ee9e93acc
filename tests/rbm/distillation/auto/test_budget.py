"""The budget of a search: what fits into it, and what is reserved for the run, with a judge that takes no time."""

from contextlib import contextmanager

import pytest
from searches import quality, search_of

from rbm.config.presets import preset_config
from rbm.distillation import sentences
from rbm.distillation.auto import search as search_module
from rbm.distillation.auto.run import outcome_of, parse_budget
from rbm.distillation.auto.search import point_of, rows
from rbm.distillation.auto.trials import accuracies
from rbm.training.time_limit import OutOfTimeError, TimeLimit

pytest.importorskip("optuna")
pytestmark = pytest.mark.usefixtures("clock")


@pytest.mark.parametrize(("budget", "halves"), [(3, 1), (8, 2), (100, 4)])
def test_halves_follow_the_budget(budget, halves):
    search = search_of(budget=budget)
    search.run()
    assert search.halves == halves
    assert search.spent() <= budget


def test_a_budget_below_one_training():
    search = search_of(budget=0.1)
    search.run()
    assert len(rows(search)) == 1
    assert search.best() is None


def timed(seconds, monkeypatch):
    """A judge whose trainings take these seconds for each method, and the limits of its trainings. A training beyond
    its limit is stopped at once.
    """
    now, limits = [0.0], []

    @contextmanager
    def limited(limit, *, repeated):
        limits.append((limit, repeated))
        yield TimeLimit()

    def judge(point, half):
        (limit, repeated), taken = limits[-1], seconds[point["method"]]
        needed = 2 * taken if repeated else taken
        if needed > limit:
            now[0] += 0.25
            raise OutOfTimeError("teacher", needed, limit)
        now[0] += taken
        return quality(point, half)

    monkeypatch.setattr(search_module, "_clock", lambda: now[0])
    monkeypatch.setattr(search_module, "time_limit", limited)
    return judge


@pytest.mark.parametrize(
    ("seconds", "needed", "trials"),
    [
        ({"mlp": 31.0, "rbm": 5.0}, 62.0, 0),
        ({"mlp": 5.0, "rbm": 30.0}, 5.0 + 5.0 + 60.0, 1),
        ({"mlp": 29.0, "rbm": 5.0}, 29.0 + 29.0 + 10.0, 1),
    ],
)
def test_a_budget_below_the_starting_points_and_the_run_is_told_at_once(seconds, needed, trials, monkeypatch):
    search = search_of(timed(seconds, monkeypatch), budget=60.0)
    search.run()
    assert len(rows(search)) == trials
    assert search.choice() is None
    assert search.needed == needed
    assert search.stopped == 0.25
    sentence = sentences.search_sentence(outcome_of(search))
    assert "the budget of 60 s is too small for this graph" in sentence
    assert f"need at least {needed:g} s, judging by the epochs so far; the run uses the settings that" in sentence


def test_a_budget_that_ends_early_counts_the_halves_that_all_starting_points_have(monkeypatch):
    now = [0.0]

    def judge(point, half):
        now[0] += 3.0 if half == 0 else 30.0  # slower than the first halves promised
        return quality(point, half)

    monkeypatch.setattr(search_module, "_clock", lambda: now[0])
    search = search_of(judge, budget=60.0, given=preset_config("clean", "cora"))
    search.run()
    assert search.halves == 1
    known = [accuracies(trial) for trial in search.complete()]
    assert len(known) == len(search.starts) == 4
    assert max(map(len, known)) > 1, "the first trial had been judged on a further half, which does not count"
    assert [search.accuracy(trial) for trial in search.complete()] == [halves[0] for halves in known]
    assert search.choice() is not None
    assert search.needed is None
    assert [row["state"] for row in rows(search)] == ["complete"] * 4
    assert "half 1" not in rows(search)[0]


@pytest.mark.parametrize("budget", [40.0, 60.0, 120.0, 300.0])
@pytest.mark.parametrize("reserve", [0.0, 6.0])
def test_search_and_run_fit_into_the_budget(budget, reserve, monkeypatch):
    seconds = {"mlp": 5.0, "rbm": 8.0}
    search = search_of(timed(seconds, monkeypatch), budget=budget)
    search._reserve = reserve
    search.run()
    assert search.needed is None
    assert search.choice() is not None
    whole = search.spent() + search.stopped + sum(seconds.values()) + reserve
    assert budget - 10.0 < whole <= budget + 0.5


def test_the_time_of_the_run_includes_the_teacher_of_the_best_trial_and_methods_that_are_not_searched():
    seconds = {"sage": 1.0, "appnp": 20.0}
    search = search_of(budget=1000.0)
    search._methods = ("mlp", "rbm", "glnn")
    for number, teacher in enumerate(("sage", "sage", "appnp")):
        trial = search._ask()
        point = search.space.starts()[number % 2] | {"teacher": teacher}
        trial.set_user_attr("point", point)
        answers = quality(point, 0)
        trial.set_user_attr("half 0", [answers, 3.0 + seconds[teacher], 2.0])
        search.study.tell(trial, answers.count("1") / 1000)
        search._known = None
    usual = {"mlp": 11.5, "rbm": 2.0}
    assert search._usual() == usual, "two seconds are for encodings, which the run reuses"
    assert point_of(search.best())["teacher"] == "appnp"
    assert search._of_run() == 11.5 + 2.0 + (11.5 + 2.0) / 2 + (21.0 - 11.5)


def test_a_slow_teacher_does_not_have_the_whole_budget(monkeypatch):
    limits = []

    @contextmanager
    def limited(seconds, *, repeated):
        limits.append((seconds, repeated))
        yield TimeLimit()

    def judge(point, half):
        if point["teacher"] == "gat":
            raise OutOfTimeError("teacher", 99.0, 10.0)
        return quality(point, half)

    monkeypatch.setattr(search_module, "time_limit", limited)
    search = search_of(judge, budget=80)
    search.run()
    assert limits[:2] == [(80, True), (78, True)], "the run takes as long again as the first training of each method"
    assert limits[2] == (76, False), "both methods are known"
    assert limits[10] == (10, False)
    assert {row["accuracy"] for row in rows(search) if row["teacher"] == "gat"} == {"0.00000"}
    assert len(rows(search)) > 10, "it goes on"


@pytest.mark.parametrize(("given", "seconds"), [("90", 90), (90, 90), ("90s", 90), ("1.5h", 5400), (" 2 m ", 120)])
def test_budgets(given, seconds):
    assert parse_budget(given) == seconds
