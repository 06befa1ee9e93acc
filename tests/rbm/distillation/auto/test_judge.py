"""The judge of trials: what a trial trains, on which nodes, and what trials share."""

from dataclasses import replace

import pytest
from torch import nn

import rbm
from rbm.distillation.auto import run, search
from rbm.distillation.auto.space import MODULE, Space
from rbm.distillation.methods import labels

pytest.importorskip("optuna")


@pytest.mark.parametrize(
    ("source", "teacher", "asked"), [("auto", None, True), ("teacher", None, False), ("auto", nn.Identity(), False)]
)
def test_a_trial_learns_from_whom_its_run_would(small_graph, start, source, teacher, asked, monkeypatch):
    """Under ``auto`` the MLP on labels is trained, which may teach; a trained module stays the teacher."""
    told = []

    def train(graph, teacher, *, config, labels_alone, methods, **options):
        told.append((config.distill.source, labels_alone))
        return methods[0]

    monkeypatch.setattr(run.Judge, "_answers", lambda self, result, method: f"answers of {result}")
    space = Space(start.updated({"distill": {"source": source}}), ("mlp",), None if teacher is None else MODULE)
    judge = run.Judge(train, small_graph, 3, space, teacher)
    assert judge(space.starts()[0], 0) == "answers of mlp"
    assert told == [(source, asked)]


@pytest.mark.parametrize(("name", "trained"), [("sage", search.MOST_HALVES), ("label_propagation", 1)])
def test_one_training_gives_the_teachers_of_all_halves(name, trained, small_graph, start, tmp_path):
    start = start.updated({"teacher": {"name": name}})
    judge = run.Judge(rbm.distill, run._observed(small_graph, start, None), 3, run.Space(start, ("mlp",)), None)
    point = judge.space.starts()[0]
    assert replace(judge, cache=tmp_path)(point, 2) == judge(point, 2)
    assert len(list(tmp_path.glob("teacher-*"))) == trained


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_two_halves_judge_every_validation_node_once(setting, small_graph, start):
    start = replace(start, setting=setting)
    judge = run.Judge(rbm.distill, run._observed(small_graph, start, None), 3, run.Space(start, ("mlp",)), None)
    point, nodes = judge.space.starts()[0], int(small_graph.val_mask.sum())
    first, second, third = (judge(point, half) for half in range(3))
    assert len(first) == len(second) == nodes
    assert all((one == "-") != (other == "-") for one, other in zip(first, second, strict=True))
    assert [each == "-" for each in third] not in ([each == "-" for each in half] for half in (first, second))


def test_the_mlp_on_labels_is_trained_once_a_half(small_graph, start, tmp_path, monkeypatch):
    trained, real = [], labels.LabelsTrainer
    monkeypatch.setattr(labels, "LabelsTrainer", lambda *arguments: trained.append(None) or real(*arguments))
    observed = run._observed(small_graph, start, None)
    judge = run.Judge(rbm.distill, observed, 3, run.Space(start, ("mlp", "rbm")), None)
    points = [*judge.space.starts(), judge.space.starts()[0] | {"teacher": "label_propagation"}]
    alone = [judge(point, half) for half in (0, 1) for point in points]
    assert len(trained) == 2 * len(points)
    trained.clear()
    cached = replace(judge, cache=tmp_path)
    assert [cached(point, half) for half in (0, 1) for point in points] == alone
    assert len(trained) == 2
    cached = replace(cached, space=run.Space(start.updated({"teacher": {"lr": 0.02}}), ("mlp",)))
    cached(cached.space.starts()[0], 0)
    assert len(trained) == 3, "one of other settings"


def test_halves_of_unseen_nodes_have_teachers_of_their_own(small_graph, start, tmp_path):
    start = replace(start, setting="inductive")
    judge = run.Judge(
        rbm.distill, run._observed(small_graph, start, None), 3, run.Space(start, ("mlp",)), None, tmp_path
    )
    judge(judge.space.starts()[0], 1)
    assert len(list(tmp_path.glob("teacher-*"))) == 1


def test_values_that_do_not_go_together_are_bad_not_fatal(small_graph, start, monkeypatch):
    space = run.Space(start.updated({"rbm": {"top_k": 4, "num_experts": 8}}), ("rbm",))
    judge = run.Judge(rbm.distill, run._observed(small_graph, start, None), 3, space, None)
    good = space.starts()[0]
    assert "1" in judge(good, 0)
    monkeypatch.setattr(run.Space, "config", lambda *_: start.updated({"rbm": {"top_k": 9}}))
    assert judge(good, 0) == ""

    def diverges(*_, **__):
        raise FloatingPointError("the loss became nan")

    monkeypatch.undo()
    assert replace(judge, train=diverges)(good, 0) == ""
