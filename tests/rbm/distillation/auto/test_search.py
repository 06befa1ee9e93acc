"""The search loop, with a judge that takes no time: proposals, pruning, and resuming after a kill."""

from contextlib import contextmanager
from statistics import NormalDist

import pytest

from rbm.config import Config
from rbm.config.presets import preset_config
from rbm.distillation import sentences
from rbm.distillation.auto import search as search_module
from rbm.distillation.auto.folder import new_study
from rbm.distillation.auto.run import parse_budget
from rbm.distillation.auto.run import told as told_of
from rbm.distillation.auto.search import Search, lead, point_of, rows
from rbm.distillation.auto.space import DEFAULTS, GIVEN, Space
from rbm.training.loop import OutOfTimeError
from rbm.utils.studies import open_trials

Trial = pytest.importorskip("optuna").trial.Trial
pytestmark = pytest.mark.usefixtures("clock")

METHODS = ("mlp", "rbm")


def answers_of(share, half, nodes=2000):
    """Answers of which this share is right, for the validation nodes that a half holds out."""
    held_out = [node for node in range(nodes) if (node >> half // 2) % 2 == half % 2]
    found = ["-"] * nodes
    for place, node in enumerate(held_out):
        found[node] = "1" if place < round(share * len(held_out)) else "0"
    return "".join(found)


def quality(point, half):
    """How good a point is, as if it were known: the teacher appnp and many labels, a little noise of the half."""
    good = {"teacher": "appnp", "distill.label_weight": 0.8, "encoding": "none", "mlp.dropout": 0.3}
    right = sum(point.get(name) == value for name, value in good.items())
    return answers_of(0.6 + 0.05 * right + 0.001 * ((half + len(point["teacher"])) % 3), half)


def search_of(judge=quality, study=None, budget=100.0, given=None, **options):
    given = given or Config()
    space = Space(given, METHODS, **options)
    return Search(space, judge, study or new_study(), budget=budget, seed=0, note=lambda *_: None)


def test_begins_with_the_given_settings_and_the_defaults():
    search = search_of(given=preset_config("clean", "cora"))
    search.run()
    points = [point_of(trial) for trial in search.trials()]
    assert [(point["start"], point["method"]) for point in points[:4]] == [
        *((GIVEN, method) for method in METHODS),
        *((DEFAULTS, method) for method in METHODS),
    ]
    assert search.space.config(points[0]) == preset_config("clean", "cora")
    assert [trial.state.name for trial in search.trials()[:4]] == ["COMPLETE"] * 4, "they are not given up"
    assert search.best().value >= max(trial.value for trial in search.trials()[:4])
    opened = points[4:12]
    assert {point["teacher"] for point in opened} == {"sage", "gcn", "gat", "appnp", "mlp", "label_propagation"}
    assert {point["encoding"] for point in opened} == {"none", "walks", "labels", "both"}


def test_finds_what_is_better():
    search = search_of()
    search.run()
    assert point_of(search.best())["teacher"] == "appnp"
    assert search.best().value > search.trials()[0].value + 0.05


@pytest.mark.parametrize(("won", "lost", "leaves"), [(60, 30, True), (45, 30, False), (2, 0, False), (12, 0, True)])
def test_leaves_what_was_given_for_more_than_chance(won, lost, leaves):
    """The best trial wins some nodes of 200 and loses others: the difference alone does not decide."""

    def judge(point, half):
        right = [node % 2 == 0 for node in range(200)]
        if point["teacher"] == "gcn":
            right = [each != (node // 2 < (lost if each else won)) for node, each in enumerate(right)]
        return "".join("1" if each else "0" for each in right)

    search = search_of(judge, budget=40.0)
    search.run()
    assert point_of(search.best())["teacher"] == "gcn"
    assert (search.choice().number == 0) != leaves, "the first trial has what was given"
    found = search.lead(search.best())
    assert found.gain == pytest.approx((won - lost) / 200)
    assert found.error == pytest.approx(((won + lost + 2 - (won - lost) ** 2 / 202) ** 0.5) / 200)


def test_one_point_must_be_ahead_by_one_standard_error_and_the_best_of_many_by_more():
    search = search_of(budget=1.0)
    search.run()
    assert search.errors == pytest.approx(1), "the given settings are not among those that were tried"
    search = search_of(budget=40.0)
    search.run()
    distinct = {tuple(point_of(trial).items()) for trial in search.trials()[2:]}
    assert search.tried == len(distinct) > 10
    below = NormalDist().cdf(search.errors)
    assert below**search.tried == pytest.approx(NormalDist().cdf(1))


@pytest.mark.parametrize(("gain", "told"), [(0.02, "ahead by 2.00 points (standard error 2.50), which"), (0.09, "")])
def test_the_verdict_says_why_the_settings_stayed(gain, told):
    search = search_of(budget=12.0)
    search.run()
    sentence = sentences._search(told_of(search) | {"gain": gain, "error": 0.025})
    assert ("may be chance" in sentence) == bool(told)
    assert told in sentence


def test_a_node_that_is_asked_twice_counts_once():
    once = lead(["1100"], ["0010"])
    assert lead(["1100", "1100"], ["0010", "0010"]) == pytest.approx(once)
    assert lead(["11--", "--00"], ["00--", "--10"]).gain == once.gain == 0.25
    assert lead([""], ["01"]).gain == -0.5, "what could not be trained is wrong everywhere"
    assert lead([""], [""]).gain == 0


def test_the_worse_half_is_given_up_early():
    judged = []
    search = search_of(lambda point, half: judged.append(half) or quality(point, half))
    search.run()
    assert search.halves == 4
    told = rows(search)
    pruned = [row for row in told if row["state"] == "given up"]
    assert len(pruned) > len(told) / 3
    assert all(row["half 3"] == "" for row in pruned)
    assert all(row["half 3"] for row in told if row["state"] == "complete")
    assert len(judged) < 4 * len(told)


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


def test_a_larger_budget_goes_on_with_the_same_trials():
    study = new_study()
    search_of(study=study, budget=12).run()
    first = search_of(study=study, budget=12)
    before = rows(first)
    assert first.spent() <= 12
    first.run()
    assert rows(first) == before, "nothing more fits"
    longer = search_of(study=study, budget=40)
    longer.run()
    assert longer.spent() > 20
    kept = len(before) - 1  # the last may have been cut short
    assert rows(longer)[:kept] == before[:kept]


@pytest.mark.parametrize("at", [0, 9])
def test_killed_and_resumed_ends_with_the_same_trials(at, tmp_path):
    whole = search_of(budget=16)
    whole.run()
    judged = []

    def dies(point, half):
        judged.append(point)
        if len(judged) == at + 1:
            raise KeyboardInterrupt
        return quality(point, half)

    with open_trials(tmp_path / "auto.db", "") as storage, pytest.raises(KeyboardInterrupt):
        search_of(dies, new_study(storage), budget=16).run()
    judged.clear()
    with open_trials(tmp_path / "auto.db", "") as storage:
        resumed = search_of(lambda *what: judged.append(what) or quality(*what), new_study(storage), budget=16)
        resumed.run()
        assert rows(resumed) == rows(whole)
        assert resumed.best().number == whole.best().number
    assert len(judged) == whole.spent() - at, "no training is repeated"


def test_killed_while_a_trial_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(search_module, "MOST_HALVES", 1)  # more trials in less time
    whole = search_of(budget=18)
    whole.run()
    assert len(whole.trials()) > 13, "the first ten are drawn at random"
    real = Trial.suggest_categorical

    def cut(self, *arguments):
        if self.number == 12 and len(self.params) == 3:
            raise KeyboardInterrupt
        return real(self, *arguments)

    with open_trials(tmp_path / "auto.db", "") as storage:
        dying = search_of(study=new_study(storage), budget=18)
        with monkeypatch.context() as patched:
            patched.setattr(Trial, "suggest_categorical", cut)
            with pytest.raises(KeyboardInterrupt):
                dying.run()
        resumed = search_of(study=new_study(storage), budget=18)
        last = resumed.trials()[-1]
        assert len(last.params) == 3
        assert not point_of(last), "it is not drawn to its end"
        resumed.run()
        assert rows(resumed) == rows(whole)


def test_a_slow_teacher_does_not_have_the_whole_budget(monkeypatch):
    limits = []

    @contextmanager
    def limited(seconds):
        limits.append(seconds)
        yield

    def judge(point, half):
        if point["teacher"] == "gat":
            raise OutOfTimeError
        return quality(point, half)

    monkeypatch.setattr(search_module, "time_limit", limited)
    search = search_of(judge, budget=80)
    search.run()
    assert limits[:2] == [80, 77], "the starts may take what there is, but for the run itself"
    assert limits[10] == 10
    assert {row["accuracy"] for row in rows(search) if row["teacher"] == "gat"} == {"0.00000"}
    assert len(rows(search)) > 10, "it goes on"


def test_a_larger_budget_is_used():
    search = search_of(budget=130.0)
    search.run()
    assert search.spent() > 120, "it does not end because TPE proposes one point again and again"


def test_ends_when_nothing_new_is_proposed(monkeypatch):
    monkeypatch.setattr(Space, "settings", {method: {} for method in METHODS})
    judged = set()

    def judge(point, half):
        assert (*point.items(), half) not in judged, "what was judged is known"
        judged.add((*point.items(), half))
        return quality(point, half)

    search = search_of(judge, budget=1e6, teacher="sage")
    search.run()
    assert {point_of(trial)["encoding"] for trial in search.trials()} == {"none", "walks", "labels", "both"}
    assert search.spent() <= 4 * 8


@pytest.mark.parametrize(("given", "seconds"), [("90", 90), (90, 90), ("90s", 90), ("1.5h", 5400), (" 2 m ", 120)])
def test_budgets(given, seconds):
    assert parse_budget(given) == seconds
