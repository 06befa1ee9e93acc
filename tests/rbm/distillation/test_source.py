"""Students learn from the MLP on labels if it beats the teacher on validation nodes by more than chance."""

from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from block_graphs import block_graph
from torch.nn import functional as F

import rbm
from rbm.config import Config
from rbm.config.presets import preset_config
from rbm.datasets.splits import split_graph
from rbm.distillation import source
from rbm.distillation.source import outputs_of_labels
from rbm.experiments.runner import Experiment, run_experiment
from rbm.nn.students import predict
from rbm.utils.precision import fast_float32

QUICK = Config().updated(
    {
        "teacher": {"hidden_channels": 16, "max_epochs": 30, "lr": 0.02},
        "mlp": {"max_epochs": 5},
        "encoding": {"deepwalk": False},
    }
)
OF_TEACHER = QUICK.updated({"distill": {"source": "teacher"}})


def distilled(data, config=QUICK, **options):
    return rbm.distill(data, config=config, **{"methods": ["mlp"], "measure_latency": False} | options)


def same(first, second):
    states = [each.students["mlp"].state_dict() for each in (first, second)]
    return all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_a_misled_teacher_is_not_learned_from(setting):
    data, settings = block_graph(0.1, nodes=300, degree=5), {"setting": setting}
    found = distilled(data, QUICK.updated(settings))
    assert found.summary["verdict"]["source"] == "labels"
    assert found.verdict[1].endswith(
        "; its soft labels are misleading, so students learn those of the MLP instead (distill.source)."
    )
    # The run hooks the last layer, so layers run one by one; the single operator rounds sums differently.
    found.students["labels"].layers[-1].register_forward_pre_hook(lambda *_: None)
    with torch.no_grad(), fast_float32("cpu"):
        logits = predict(found.students["labels"], found.split.full_rows)
    assert same(found, distilled(data, teacher=logits, config=QUICK.updated(settings)))
    asked = distilled(data, OF_TEACHER.updated(settings))
    assert asked.summary["verdict"]["source"] == "teacher"
    assert "--teacher mlp" in asked.verdict[1]
    assert not same(found, asked)
    assert list(found.students) == ["mlp", "labels"]
    assert found.summary["teacher"] == asked.summary["teacher"], "the graph network is still told of"


def test_methods_that_ask_for_a_hidden_layer_get_that_mlps():
    data = block_graph(0.1, nodes=300, degree=5)
    config = QUICK.updated({"nosmog": {"max_epochs": 2, "similarity_weight": 0.1}})
    found = distilled(data, config, methods=["nosmog"])
    assert found.summary["verdict"]["source"] == "labels"
    outputs = outputs_of_labels(found.split, SimpleNamespace(student=found.students["labels"]))
    assert outputs.embedding("nosmog.similarity_weight is set").shape == (
        300,
        found.students["labels"].layers[-1].in_features,
    )


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_its_outputs_are_those_of_the_observed_nodes(setting):
    split = split_graph(block_graph(0.5, nodes=300, degree=5), setting, unseen_fraction=0.4)
    x, student = split.graph.x, rbm.MLPStudent(split.graph.num_features, 8, 3).eval()
    outputs = outputs_of_labels(split, SimpleNamespace(student=student))
    with torch.no_grad():
        hidden = student.layers[0](x).relu()
        logits = student.layers[1](hidden)
    torch.testing.assert_close(outputs.logits, logits)
    torch.testing.assert_close(outputs.soft_labels, logits[split.observed_nodes])
    torch.testing.assert_close(outputs.hidden, hidden[split.observed_nodes])


def test_methods_that_copy_the_teacher_keep_it():
    data = block_graph(0.1, nodes=300, degree=5)
    few = {"max_epochs": 3, "encoding": {"deepwalk": False}}
    short = {"tined": {"max_epochs": 3}, "tined_plus": few}
    methods = ["mlp", "tined", "tined_plus"]
    found = distilled(data, QUICK.updated(short), methods=methods)
    assert found.summary["verdict"]["source"] == "labels"
    asked = distilled(data, OF_TEACHER.updated(short), methods=methods)
    for method in methods:
        states = [each.students[method].state_dict() for each in (found, asked)]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0]) == (method != "mlp")
    alone = distilled(data, QUICK.updated(short), methods=["tined"])
    assert alone.summary["verdict"]["source"] == "teacher", "no student learns from the MLP"


def test_a_good_teacher_is_learned_from():
    data = block_graph(0.9, nodes=300, degree=10)
    found = distilled(data)
    assert found.summary["verdict"]["source"] == "teacher"
    assert same(found, distilled(data, OF_TEACHER))


def test_a_lead_that_may_be_chance_changes_nothing(monkeypatch):
    split = split_graph(block_graph(0.5, nodes=300, degree=5))
    labels = split.observed.y
    teacher = SimpleNamespace(soft_labels=F.one_hot((labels + 1) % (labels.max() + 1)).float())  # it is always wrong
    ahead = {}
    for count in (1, 20):
        right = torch.arange(int(split.observed.val_mask.sum())) < count
        monkeypatch.setattr(source, "student_right", lambda *_, right=right: right)
        ahead[count] = source.is_ahead_of_teacher(split, teacher, None)
    assert ahead == {1: False, 20: True}


def test_test_labels_have_no_say():
    data = block_graph(0.1, nodes=300, degree=5)
    before = distilled(data)
    data.y = torch.where(data.test_mask, (data.y + 1) % int(data.y.max() + 1), data.y)
    assert same(before, distilled(data))


def test_a_teacher_that_is_given_teaches():
    data = block_graph(0.1, nodes=300, degree=5)
    teacher = distilled(data).teacher
    assert distilled(data, teacher=teacher).summary["verdict"]["source"] == "teacher"


def test_without_the_mlp_there_is_no_choice():
    data = block_graph(0.1, nodes=300, degree=5)
    assert same(distilled(data, labels_alone=False), distilled(data, OF_TEACHER))


def test_rows_of_an_experiment_learn_from_the_same(tmp_path):
    data = block_graph(0.1, nodes=300, degree=5)
    torch.save(data, tmp_path / "graph.pt")
    sections = {name: asdict(QUICK)[name] for name in ("teacher", "mlp", "encoding")}
    experiment = Experiment(datasets=(str(tmp_path / "graph.pt"),), methods=("mlp",), changes=sections)
    *_, row = run_experiment(experiment, tmp_path / "rows.csv")
    expected = distilled(data).summary["mlp"]
    assert float(row["test_at_best_val"]) == pytest.approx(expected["test_accuracy"], abs=1e-5)
    assert expected["test_accuracy"] != distilled(data, OF_TEACHER).summary["mlp"]["test_accuracy"]


def test_a_resumed_run_learns_from_the_same(tmp_path):
    data = block_graph(0.1, nodes=300, degree=5)
    whole = distilled(data, folder=tmp_path)
    again = distilled(data, folder=tmp_path, resume=True, keep="mlp")
    assert again.summary["verdict"]["source"] == "labels"
    assert same(whole, again)


@pytest.mark.parametrize("preset", ["clean", "paper", "official"])
def test_the_graphs_of_the_paper_have_its_teachers(preset):
    assert preset_config(preset, "cora").distill.source == "teacher"
    assert preset_config("clean", "digits").distill.source == "teacher"
    assert preset_config("clean", "mine.npz").distill.source == "auto"
