"""The search loop, with a judge that takes no time: proposals, pruning, and resuming after a kill."""

from statistics import NormalDist, mean

import numpy as np
import pytest
from searches import METHODS, quality, search_of

from rbm.config.presets import preset_config
from rbm.distillation import sentences
from rbm.distillation.auto import search as search_module
from rbm.distillation.auto.folder import new_study
from rbm.distillation.auto.run import outcome_of
from rbm.distillation.auto.search import point_of, rows
from rbm.distillation.auto.space import DEFAULTS, GIVEN, Space
from rbm.distillation.auto.trials import corrected_gain, lead
from rbm.utils.studies import open_trials

Trial = pytest.importorskip("optuna").trial.Trial
pytestmark = pytest.mark.usefixtures("clock")


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


@pytest.mark.parametrize(("won", "lost", "leaves"), [(60, 30, True), (45, 20, True), (45, 40, False), (1, 0, False)])
def test_leaves_what_was_given_for_an_expected_gain(won, lost, leaves):
    """One point classifies some nodes of 200 that all others do not, and the reverse."""

    def judge(point, half):
        right = [node % 2 == 0 for node in range(200)]
        if point["teacher"] == "gcn":
            right = [each != (node // 2 < (lost if each else won)) for node, each in enumerate(right)]
        return "".join("1" if each else "0" for each in right)

    search = search_of(judge, budget=40.0)
    search.run()
    assert (search.choice().number == 0) != leaves, "the first trial has what was given"
    if won > lost:
        assert point_of(search.best())["teacher"] == "gcn"
        found = search.lead(search.best())
        assert found.gain == pytest.approx((won - lost) / 200)
        assert found.error == pytest.approx(((won + lost + 2 - (won - lost) ** 2 / 202) ** 0.5) / 200)
        assert search.corrected_gain() <= found.gain


def test_points_that_were_tried_are_counted_once():
    search = search_of(budget=40.0)
    search.run()
    distinct = {tuple(point_of(trial).items()) for trial in search.trials()[2:]}
    assert search.tried == len(distinct) > 10, "the given settings are not among them"


def answers_of_trials(generator, shares, nodes):
    """Answers of trials that are right on these shares of all nodes, and mostly on the same ones."""
    difficulty = generator.normal(size=nodes)
    found = [0.8 * difficulty + 0.6 * generator.normal(size=nodes) < NormalDist().inv_cdf(each) for each in shares]
    return [["".join("01"[int(right)] for right in each)] for each in found]


@pytest.mark.parametrize("spread", [0.0, 0.03])
def test_the_corrected_gain_is_the_one_on_other_nodes(spread):
    """The best of 30 trials owes points to chance. Over many searches the corrected gain lacks them: trials that
    are all alike (``spread`` 0) gain nothing, others nearly what their accuracies differ by.
    """
    generator = np.random.default_rng(0)
    apparent, corrected, true = [], [], []
    for _ in range(60):
        shares = [0.6, *(0.6 + spread * generator.standard_normal(30))]
        trials = answers_of_trials(generator, shares, nodes=300)
        right = [each[0].count("1") for each in trials]
        best = right.index(max(right))
        apparent.append((right[best] - right[0]) / 300)
        true.append(shares[best] - shares[0])
        corrected.append(corrected_gain(trials, [0]))
    assert mean(apparent) - mean(true) > 0.02
    assert abs(mean(corrected) - mean(true)) < 0.01


def test_the_corrected_gain_of_given_trials_alone_is_none():
    trials = answers_of_trials(np.random.default_rng(0), [0.6, 0.6, 0.6], nodes=50)
    assert corrected_gain(trials, [0, 1, 2]) == 0.0, "the best of them is what it is compared with"
    assert corrected_gain(trials, [0]) == corrected_gain(trials, [0]) != 0.0
    assert corrected_gain(trials, []) == corrected_gain([], []) == corrected_gain([[""], [""]], [0]) == 0.0


def test_the_corrected_gain_counts_a_node_of_several_halves_once():
    first, second = ["1100----", "----1010"], ["0000----", "----1111"]
    other = [["1" if "1" in (a, b) else "0" for a, b in zip(*each, strict=True)] for each in (first, second)]
    joint = [["".join(each)] for each in other]
    assert corrected_gain([first, second], [0]) == corrected_gain(joint, [0])
    assert corrected_gain([[""], ["01" * 50]], [0]) == pytest.approx(0.5, abs=0.02), "what was not trained is wrong"


@pytest.mark.parametrize(
    ("corrected", "told"),
    [
        (
            -0.004,
            "others was ahead by 9.00 points there, and by -0.40 after correction for chance, so the settings stay.",
        ),
        (0.031, "; it is ahead by 9.00 points there, and by 3.10 after correction for chance."),
        (None, "before the search."),
    ],
)
def test_the_verdict_tells_the_corrected_gain(corrected, told):
    search = search_of(budget=12.0)
    search.run()
    sentence = sentences.search_sentence(outcome_of(search) | {"gain": 0.09, "error": 0.025, "corrected": corrected})
    assert sentence.endswith(told)


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
