"""The space of a search, and settings that are rejected before anything runs."""

import pytest
from torch_geometric import typing

from rbm.config import Config, flat, nested
from rbm.config.presets import preset_config
from rbm.distillation.registry import METHODS
from rbm.experiments.tuning.space import build_space, default_space, read_space, with_values

distributions = pytest.importorskip("optuna").distributions
START = Config()


def test_default_is_the_papers_space():
    start = preset_config("clean", "cora")
    space = build_space(default_space("rbm"), start, "rbm")
    assert set(space["rbm.dropout"].choices) == {0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6}
    assert set(space["rbm.num_experts"].choices) == {4, 5, 6, 7, 8}
    assert set(space["rbm.lr"].choices) == {0.01, 0.005, 0.001}
    ranges = {name: (space[name].low, space[name].high) for name in space if name.endswith("weight")}
    assert ranges == {
        "rbm.commitment_weight": (0.0, 0.1),
        "rbm.load_balance_weight": (0.0, 0.05),
        "rbm.self_similarity_weight": (0.0, 0.05),
    }


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_space(method):
    assert build_space(default_space(method), START, method)


def test_a_method_of_ones_own_has_none():
    with pytest.raises(ValueError, match=r"method .copycat. has no search space of its own.*--space"):
        default_space("copycat")


def test_kinds():
    lines = {
        "rbm.num_experts": {"low": 3, "high": 8},
        "rbm.lr": {"low": 0.001, "high": "1e-1", "log": True},
        "rbm.input_attention": [True, False],
        "rbm.norm": ["none", "batch", "none"],
    }
    assert build_space(lines, START, "rbm") == {
        "rbm.num_experts": distributions.IntDistribution(3, 8),
        "rbm.lr": distributions.FloatDistribution(0.001, 0.1, log=True),
        "rbm.input_attention": distributions.CategoricalDistribution((True, False)),
        "rbm.norm": distributions.CategoricalDistribution(("none", "batch")),
    }


def test_the_starting_point_belongs_to_the_space():
    start = START.updated({"rbm": {"lr": 0.003, "num_experts": 11, "dropout": 0.7}})
    lines = {
        "rbm.lr": [0.01, 0.001],
        "rbm.num_experts": {"low": 4, "high": 8},
        "rbm.dropout": {"low": 0.0, "high": 0.6},
    }
    space = build_space(lines, start, "rbm")
    assert space["rbm.lr"].choices == (0.01, 0.001, 0.003)
    assert (space["rbm.num_experts"].low, space["rbm.num_experts"].high) == (4, 11)
    assert (space["rbm.dropout"].low, space["rbm.dropout"].high) == (0.0, 0.7)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ({}, "got no setting at all"),
        ({"rbm.lrr": [0.1]}, "unknown setting 'rbm.lrr', expected a name such as rbm.lr"),
        ({"rbm": {"lr": [0.1]}}, "rbm is a section, expected one of its settings"),
        ({"rbm.section": ["a"]}, "unknown setting 'rbm.section'"),
        ({"mlp.lr": [0.1]}, "mlp.lr does not change what the method rbm learns; expected settings of inflate, teacher"),
        ({"teacher.name": ["sage", "gin"]}, "teacher: got 'gin', expected one of sage"),
        ({"sampling.fan_out": ["5", "10"]}, "sampling.fan_out does not change what"),
        ({"rbm.top_k": [3, 64], "rbm.num_experts": [4, 32]}, "rbm.top_k is 64, expected between 1 and num_experts=8"),
        ({"seed": [1, 2]}, "seed does not change what"),
        ({"evaluate_on": ["test"]}, "evaluate_on does not change what"),
        ({"rbm.lr": 0.1}, "rbm.lr is 0.1, expected a list of values, or low, high and perhaps log: true"),
        ({"rbm.lr": []}, r"rbm.lr is \[\], expected a list"),
        ({"rbm.lr": {"low": 0.1}}, "expected a list of values, or low, high"),
        ({"rbm.lr": {"low": 0.1, "high": 0.2, "step": 1}}, "expected a list of values, or low, high"),
        ({"rbm.lr": {"low": 0.2, "high": 0.1}}, "expected low not above high"),
        ({"rbm.lr": {"low": 0.1, "high": 0.2, "log": "yes"}}, "log true or false"),
        ({"rbm.lr": {"low": -1, "high": 0.2}}, "rbm.lr is -1, expected a positive number"),
        ({"rbm.lr": [0.1, "fast"]}, r"rbm.lr is 'fast' \(str\), expected float"),
        ({"rbm.num_experts": [4.5]}, "rbm.num_experts is 4.5"),
        ({"rbm.norm": {"low": 0, "high": 1}}, "rbm.norm holds str, expected a list of values, not a range"),
        ({"rbm.input_attention": {"low": 0, "high": 1}}, "rbm.input_attention holds bool, expected a list"),
        ({"rbm.commitment_weight": {"low": 0, "high": 0.1, "log": True}}, "reaches from 0.0 .*expected positive"),
    ],
)
def test_what_is_refused(lines, message):
    with pytest.raises(ValueError, match=message):
        build_space(lines, START, "rbm")


def test_settings_of_attention_teachers_count_where_there_is_one():
    lines = {"attention.heads": [1, 2]}
    assert build_space(lines, START.updated({"teacher": {"name": "revgat"}}), "rbm")
    with pytest.raises(ValueError, match=r"attention\.heads does not change"):
        build_space(lines, START, "rbm")


def test_settings_of_sampled_training_count_where_a_teacher_is_trained(monkeypatch):
    """Regression test: they were refused, although the teacher depends on them."""
    monkeypatch.setattr(typing, "WITH_PYG_LIB", False)
    monkeypatch.setattr(typing, "WITH_TORCH_SPARSE", False)
    lines = {"sampling.batch_size": [0, 512], "sampling.fan_out": ["5", "10"]}
    for refused in (lines, {"sampling.batch_size": {"low": 0, "high": 512}}):
        with pytest.raises(ValueError, match=r"^sampling\.batch_size is 512, but PyTorch Geometric's sampler"):
            build_space(refused, START, "rbm")
    monkeypatch.setattr(typing, "WITH_PYG_LIB", True)
    assert build_space(lines, START, "rbm")
    assert build_space({"sampling.fan_out": ["5"]}, START.updated({"sampling": {"batch_size": 64}}), "rbm")
    with pytest.raises(ValueError, match=r"sampling\.batch_size does not change what the method cohop"):
        build_space(lines, START, "cohop")


def test_a_searched_teacher_and_its_settings():
    assert build_space({"teacher.name": ["sage", "revgat"], "attention.heads": [1, 2]}, START, "rbm")


def test_the_source_of_soft_labels_counts_where_a_student_learns_them():
    assert build_space({"distill.source": ["teacher", "auto"]}, START, "glnn")
    with pytest.raises(ValueError, match=r"distill\.source does not change"):
        build_space({"distill.source": ["teacher", "auto"]}, START, "cohop")


def test_values_may_contradict_the_start_if_they_fit_others_of_the_space():
    """Regression test: ``top_k`` was compared with the experts of the starting point alone."""
    lines = {"rbm.top_k": {"low": 2, "high": 16}, "rbm.num_experts": {"low": 4, "high": 32}}
    space = build_space(lines, START, "rbm")
    assert (space["rbm.top_k"].low, space["rbm.top_k"].high) == (2, 16)


@pytest.mark.parametrize(
    ("text", "message"), [("- rbm.lr", "holds list, expected a line a setting"), ("a: [", "is not valid YAML")]
)
def test_files_that_are_no_space(tmp_path, text, message):
    (tmp_path / "space.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_space(tmp_path / "space.yaml")


def test_names_and_trees():
    tree = {"rbm": {"lr": 0.5, "dropout": 0.0}, "nosmog": {"encoding": {"epochs": 2}}, "inflate": 3}
    names = {"rbm.lr": 0.5, "rbm.dropout": 0.0, "nosmog.encoding.epochs": 2, "inflate": 3}
    assert flat(tree) == names
    assert nested(names) == tree
    assert with_values(START, names).nosmog.encoding.epochs == 2
