"""The configuration tree: typed, validated, written to YAML and back, filled by presets."""

import re
from importlib import resources

import pytest
import yaml

from rbm.config import PRESETS, Config, parse_assignments
from rbm.datasets import DATASETS
from rbm.presets import preset_config


def test_yaml_round_trip(tmp_path):
    config = preset_config("paper", "cora").updated({"seed": 7, "rbm": {"lr": 0.003}})
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    assert Config.from_yaml(path) == config


def test_paper_hyperparameters_of_cora():
    config = preset_config("paper", "cora", "transductive", "sage")
    assert (config.rbm.num_layers, config.rbm.hidden_channels, config.rbm.num_experts) == (3, 512, 4)
    assert config.rbm.decay == 0.9
    assert config.rbm.anneal_delta == 0.05
    assert not config.rbm.dropout_first_layer
    assert config.distill.label_weight == 0.2
    assert config.distill.temperature == 1.29
    assert config.mlp.dropout == 0.6
    assert config.preset == "paper"
    assert preset_config("clean", "cora").rbm.hidden_channels == 512
    assert preset_config("clean", "cora").rbm.anneal_delta == 0.0


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dataset", [name for name in DATASETS if name != "digits"])
@pytest.mark.parametrize(
    ("setting", "teacher"), [("transductive", "sage"), ("transductive", "gcn"), ("inductive", "sage")]
)
def test_every_released_configuration_loads(preset, dataset, setting, teacher):
    config = preset_config(preset, dataset, setting, teacher)
    released = yaml.safe_load((resources.files("rbm") / "configs" / "paper" / f"{dataset}.yaml").read_text())
    student = released[setting][teacher]["rbm"]["student"]
    assert config.rbm.load_balance_weight == float(student["load_balance_weight"])
    assert config.rbm.num_experts == student["num_experts"]


def test_preset_without_released_hyperparameters():
    assert preset_config("clean", "my-own-graph") == Config(dataset="my-own-graph")
    with pytest.raises(ValueError, match=r"no hyperparameters for dataset 'digits'.*use the preset clean"):
        preset_config("paper", "digits")
    with pytest.raises(ValueError, match="setting 'inductive', teacher 'gcn'"):
        preset_config("paper", "cora", "inductive", "gcn")


def test_numbers_that_yaml_reads_as_text():
    assert Config().updated({"rbm": {"load_balance_weight": "1e-7"}}).rbm.load_balance_weight == 1e-7
    assert Config().updated({"rbm": {"lr": 1}}).rbm.lr == 1.0


def test_assignments():
    assert parse_assignments(["rbm.lr=0.005", "student.norm=batch", "seed=3"]) == {
        "rbm": {"lr": 0.005, "norm": "batch"},
        "seed": 3,
    }
    with pytest.raises(ValueError, match=r"'rbm.lr' is no assignment, expected SECTION.KEY=VALUE"):
        parse_assignments(["rbm.lr"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rbm": {"top_k": 9}}, "rbm.top_k is 9, expected between 1 and num_experts=8"),
        ({"rbm": {"dropout": 1.0}}, "rbm.dropout is 1.0, expected at least 0 and below 1"),
        ({"rbm": {"lr": "fast"}}, "rbm.lr is 'fast' (str), expected float"),
        ({"rbm": {"num_layers": 2.5}}, "rbm.num_layers is 2.5 (float), expected int"),
        ({"rbm": {"input_attention": 1}}, "rbm.input_attention is 1 (int), expected bool"),
        ({"rbm": {"width": 3}}, "unknown setting rbm.width; known here: "),
        ({"teacher": {"norm": "group"}}, "teacher.norm is 'group', expected one of none, batch, layer"),
        ({"mlp": {"patience": 0}}, "mlp.patience is 0, expected at least 1"),
        ({"distill": {"label_weight": 1.5}}, "distill.label_weight is 1.5, expected between 0 and 1"),
        ({"distill": {"temperature": 0}}, "distill.temperature is 0.0, expected a positive number"),
        ({"distill": {"temperature_mode": "x"}}, "distill.temperature_mode is 'x', expected one of softmax"),
        ({"setting": "both"}, "setting is 'both', expected one of transductive, inductive"),
        ({"preset": "best"}, "preset is 'best', expected one of clean, paper"),
        ({"seed": -1}, "seed is -1, expected between 0"),
        ({"distill": 3}, "distill is 3, expected a section"),
    ],
)
def test_bad_values(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Config().updated(changes)


def test_broken_file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("rbm: [")
    with pytest.raises(ValueError, match="is not valid YAML"):
        Config.from_yaml(path)
    path.write_text("teacher: gcn")
    with pytest.raises(ValueError, match="teacher is 'gcn', expected a section"):
        Config.from_yaml(path)
    path.write_text("- 1")
    with pytest.raises(ValueError, match="holds list, expected the sections"):
        Config.from_yaml(path)
