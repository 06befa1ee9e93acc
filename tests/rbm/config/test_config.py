"""The configuration tree: types, validation, YAML round trips and presets."""

import re
from importlib import resources

import pytest
import yaml

from rbm.config import PRESETS, Config, RbMConfig, TINEDPlusConfig, parse_assignments
from rbm.config.presets import preset_config
from rbm.config.section import settings_of
from rbm.datasets import DATASETS


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


# Cases in which validation nodes chose another number than the released one.
OUR_EXPERTS = {("cora", "inductive"): 3, ("citeseer", "inductive"): 3, ("amazon-computers", "inductive"): 3}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dataset", [name for name in DATASETS if name != "digits"])
@pytest.mark.parametrize(
    ("setting", "teacher"), [("transductive", "sage"), ("transductive", "gcn"), ("inductive", "sage")]
)
def test_every_released_configuration_loads(preset, dataset, setting, teacher):
    config = preset_config(preset, dataset, setting, teacher)
    released = yaml.safe_load((resources.files("rbm") / "config" / "configs" / "paper" / f"{dataset}.yaml").read_text())
    student = released[setting][teacher]["rbm"]["student"]
    assert config.rbm.load_balance_weight == float(student["load_balance_weight"])
    assert config.rbm.commitment_weight == float(student["commitment_weight"])
    ours = OUR_EXPERTS.get((dataset, setting)) if preset == "clean" else None
    assert config.rbm.num_experts == (ours or student["num_experts"])


@pytest.mark.parametrize(
    ("other", "name"),
    [("photo", "amazon-photo"), ("Coauthor CS", "academic-cs"), ("CORA", "cora"), ("ogbn_arxiv", "ogbn-arxiv")],
)
def test_a_preset_knows_every_name_of_a_dataset(other, name):
    """As ``load_dataset`` does: the default hyperparameters would be used otherwise, without a message."""
    assert preset_config("clean", other) == preset_config("clean", name)
    assert preset_config("paper", other).dataset == name
    assert preset_config("clean", " Digits").dataset == "digits"


def test_settings_of_a_section_in_words():
    found = {name: (values, default) for name, values, default in settings_of(RbMConfig)}
    assert found["lr"] == ("a positive number", 0.01)
    assert found["top_k"] == ("a whole number", 3)
    assert found["dropout"] == ("a number, at least 0 and below 1", 0.3)
    assert found["memory_init"] == ("one of kmeans, classes, teacher", "kmeans")
    assert found["start_as_mlp"] == ("true or false", True)
    of_run = {name: (values, default) for name, values, default in settings_of(Config)}
    assert of_run["root"] == ("text", "")
    assert of_run["rbm"] == ("a section, RbMConfig", "")
    assert of_run.keys() == Config().__dict__.keys()


def test_preset_without_released_hyperparameters():
    for own in ("my-own-graph", "./cora", "paper/cora"):  # not the files of configs/
        assert preset_config("clean", own) == Config(dataset=own)
    with pytest.raises(ValueError, match=r"no hyperparameters for dataset 'digits'.*use the preset clean"):
        preset_config("paper", "digits")
    with pytest.raises(ValueError, match="setting 'inductive', teacher 'gcn'"):
        preset_config("paper", "cora", "inductive", "gcn")


BASELINES = yaml.safe_load((resources.files("rbm") / "config" / "configs" / "baselines.yaml").read_text())


@pytest.mark.parametrize("teacher", ["sage", "gcn"])
@pytest.mark.parametrize("setting", ["transductive", "inductive"])
@pytest.mark.parametrize("method", ["glnn", "krd", "nosmog", "cohop"])
def test_every_entry_of_the_baselines_reaches_its_section(method, setting, teacher):
    for dataset, settings in BASELINES[method].items():
        entry = settings.get("both") or settings[setting]
        entry = entry[teacher] if method == "krd" else entry
        section = getattr(preset_config("clean", dataset, setting, teacher, "cpf"), method)
        for name, value in entry.items():
            found = getattr(section, name)
            if isinstance(value, dict):
                assert {key: getattr(found, key) for key in value} == value, (dataset, name)
            else:
                assert found == value, (dataset, name)


def test_baselines_meet_row_normalised_features_with_settings_of_their_own():
    for dataset in ("cora", "citeseer"):
        rows, raw = (preset_config("clean", dataset, protocol=protocol) for protocol in ("rbm", "cpf"))
        assert rows.glnn.weight_decay < raw.glnn.weight_decay
        assert rows.nosmog.adversarial_eps < raw.nosmog.adversarial_eps / 10
        assert (rows.protocol, raw.protocol) == ("rbm", "cpf")


def test_hyperparameters_of_the_baselines():
    glnn = preset_config("clean", "ogbn-products", "inductive").glnn
    assert (glnn.num_layers, glnn.hidden_channels, glnn.norm, glnn.batch_size) == (3, 256, "batch", 4096)
    assert (glnn.lr, glnn.weight_decay, glnn.max_epochs, glnn.patience) == (0.01, 5e-4, 200, 30)
    krd = preset_config("clean", "cora", "inductive", "gcn").krd
    assert (krd.hidden_channels, krd.weight_decay, krd.label_weight, krd.temperature) == (256, 1e-3, 0.0, 0.8)
    assert preset_config("clean", "cora", "inductive", "sage").krd.hidden_channels == 512
    krd = preset_config("clean", "ogbn-arxiv").krd.reliability
    assert (krd.power_momentum, krd.update_every, krd.update_start_epoch) == (0.9, 10, 50)
    assert preset_config("clean", "amazon-computers").krd == Config().krd, "its code has none"
    nosmog = preset_config("clean", "pubmed", "inductive").nosmog
    assert (nosmog.adversarial_eps, nosmog.similarity_weight, nosmog.encoding.walks_per_node) == (0.001, 0.9, 3)
    assert (nosmog.lr, nosmog.weight_decay, nosmog.adversarial_weight) == (0.01, 5e-4, 0.1)
    cohop = preset_config("clean", "amazon-photo").cohop
    assert (cohop.lr, cohop.threshold, cohop.contrast_weight, cohop.smoothing_radius) == (0.01, 0.4, 0.05, 0.1)
    assert (cohop.num_layers, cohop.rounds) == (1, 5)
    assert preset_config("clean", "ogbn-arxiv").cohop.num_layers == 2


def test_the_official_preset_follows_the_code_of_the_baselines():
    clean, official = (preset_config(preset, "cora", "inductive") for preset in ("clean", "official"))
    assert (clean.moe.extra_experts, clean.moe.gates_over, clean.moe.pretrain) == (0, "selected", "first")
    assert (official.moe.extra_experts, official.moe.gates_over, official.moe.pretrain) == (1, "all", "proportional")
    assert [config.glnn.zero_weight_pass for config in (clean, official)] == [False, True]
    assert [config.nosmog.zero_weight_pass for config in (clean, official)] == [False, True]
    assert [config.nosmog.encoding.fill for config in (clean, official)] == ["observed_mean", "all_mean"]


def test_numbers_that_yaml_reads_as_text():
    assert Config().updated({"rbm": {"load_balance_weight": "1e-7"}}).rbm.load_balance_weight == 1e-7
    assert Config().updated({"rbm": {"lr": 1}}).rbm.lr == 1.0


def test_assignments():
    assert parse_assignments(["rbm.lr=0.005", "rbm.norm=batch", "seed=3"]) == {
        "rbm": {"lr": 0.005, "norm": "batch"},
        "seed": 3,
    }
    both = {"rbm": {"lr": 0.005, "top_k": 2}}
    assert parse_assignments(["rbm.lr=0.005", "rbm={top_k: 2}"]) == both
    assert parse_assignments(["rbm={top_k: 2}", "rbm.lr=0.005"]) == both
    with pytest.raises(ValueError, match=r"'rbm.lr' is no assignment, expected SECTION.KEY=VALUE"):
        parse_assignments(["rbm.lr"])
    with pytest.raises(ValueError, match=r"'=3' is no assignment, expected SECTION.KEY=VALUE"):
        parse_assignments(["=3"])
    with pytest.raises(ValueError, match=r"'seed=9{194}... has a value .* a whole number of thousands of digits$"):
        parse_assignments(["seed=" + "9" * 5000])
    with pytest.raises(ValueError, match=r"^seed is a number of thousands of digits, expected between 0 and"):
        Config().updated(parse_assignments(["seed=0x" + "f" * 5000]))
    with pytest.raises(ValueError, match=r"'rbm.lr=\[' has a value that is not valid YAML"):
        parse_assignments(["rbm.lr=["])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rbm": {"top_k": 9}}, "rbm.top_k is 9, expected between 1 and num_experts=8"),
        ({"rbm": {"dropout": 1.0}}, "rbm.dropout is 1.0, expected at least 0 and below 1"),
        ({"rbm": {"gate_temperature": 1e-50}}, "rbm.gate_temperature is 1e-50, expected between 1.2e-38 and 3.4e+38"),
        ({"rbm": {"lr": "fast"}}, "rbm.lr is 'fast' (str), expected float"),
        ({"rbm": {"num_layers": 2.5}}, "rbm.num_layers is 2.5 (float), expected int"),
        ({"rbm": {"input_attention": 1}}, "rbm.input_attention is 1 (int), expected bool"),
        ({"rbm": {"width": 3}}, "unknown setting rbm.width; known here: "),
        ({"teacher": {"norm": "group"}}, "teacher.norm is 'group', expected one of none, batch, layer"),
        ({"mlp": {"norm": "group"}}, "mlp.norm is 'group', expected one of none, batch, layer, or same"),
        ({"mlp": {"hidden_channels": -1}}, "mlp.hidden_channels is -1, expected at least 1, or 0"),
        ({"mlp": {"patience": 0}}, "mlp.patience is 0, expected at least 1"),
        ({"distill": {"label_weight": 1.5}}, "distill.label_weight is 1.5, expected between 0 and 1"),
        ({"distill": {"temperature": 0}}, "distill.temperature is 0, expected a positive number"),
        ({"distill": {"temperature_mode": "x"}}, "distill.temperature_mode is 'x', expected one of softmax"),
        ({"setting": "both"}, "setting is 'both', expected one of transductive, inductive"),
        ({"preset": "best"}, "preset is 'best', expected one of clean, paper"),
        ({"seed": -1}, "seed is -1, expected between 0"),
        ({"distill": 3}, "distill is 3, expected a section"),
        ({"rbm": {"num_layers": 10**7}}, "rbm.num_layers is 10000000, expected between 1 and 1000"),
        (
            {"mlp": {"num_layers": 10**7}},
            "mlp.num_layers is 10000000, expected at least 1, or 0 (section rbm's), and at",
        ),
        ({"teacher": {"hidden_channels": 10**12}}, "teacher.hidden_channels is 1000000000000, expected between 1 and"),
        ({"moe": {"num_experts": 10**12}}, "moe.num_experts is 1000000000000, expected between 1 and 65536"),
        ({"ensemble": {"members": 10**9}}, "ensemble.members is 1000000000, expected between 1 and 1000"),
        ({"attention": {"heads": 10**9}}, "attention.heads is 1000000000, expected between 1 and 1000"),
        ({"inflate": 10**9}, "inflate is 1000000000, expected at least 1 and at most 1024"),
        ({"inflate": 0}, "inflate is 0, expected at least 1"),
        (
            {"moe": {"top_k": 7, "extra_experts": 2}},
            "moe.extra_experts is 2, expected between 0 and num_experts - top_k=1",
        ),
        ({"glnn": {"batch_size": 0}}, "glnn.batch_size is 0, expected at least 1"),
        ({"krd": {"draw": "all"}}, "krd.draw is 'all', expected one of expectation, sample"),
        ({"nosmog": {"adversarial_eps": 0}}, "nosmog.adversarial_eps is 0, expected a positive number"),
        ({"nosmog": {"encoding": {"fill": "x"}}}, "nosmog.encoding.fill is 'x', expected one of observed_mean, all"),
        ({"encoding": {"walk_length": 1}}, "encoding.walk_length is 1, expected between 2 and 10000"),
        ({"vqgraph": {"tokenizer": {"codebook_size": 0}}}, "vqgraph.tokenizer.codebook_size is 0, expected between 1"),
        (
            {"tined_plus": {"encoding": {"hierarchical_softmax": False, "negative": 0}}},
            "tined_plus.encoding.hierarchical_softmax is False, expected true where negative is 0",
        ),
        ({"tined_plus": {"adversarial_steps": 0}}, "tined_plus.adversarial_steps is 0, expected at least 1"),
        (
            {"tined": {"energy_weight": float("inf")}},
            "tined.energy_weight is inf, expected a finite number, at least 0",
        ),
        ({"simmlp": {"power": float("nan")}}, "simmlp.power is nan, expected a positive number"),
        ({"cohop": {"num_layers": 3}}, "cohop.num_layers is 3, expected 1 (linear) or 2"),
        # Regression tests: these had no effect.
        ({"cohop": {"norm": "layer"}}, "cohop.norm is 'layer', expected none (with two layers, it always has"),
        ({"vqgraph": {"tokenizer": {"norm": "batch"}}}, "vqgraph.tokenizer.norm is 'batch', expected none"),
        ({"vqgraph": {"tokenizer": {"num_layers": 3}}}, "vqgraph.tokenizer.num_layers is 3, expected 2 (its conv"),
        ({"cohop": {"histogram": "x"}}, "cohop.histogram is 'x', expected one of auto, exact, propagation, none"),
    ],
)
def test_bad_values(changes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Config().updated(changes)


def test_bad_value_of_a_section_of_its_own():
    with pytest.raises(ValueError, match=r"^tined_plus\.adversarial_steps is 0, expected at least 1$"):
        TINEDPlusConfig(adversarial_steps=0)


def test_broken_file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("rbm: [")
    with pytest.raises(ValueError, match="is not valid YAML"):
        Config.from_yaml(path)
    path.write_text("teacher: gcn")
    with pytest.raises(ValueError, match=r"config\.yaml: teacher is 'gcn', expected a section"):
        Config.from_yaml(path)
    path.write_text("- 1")
    with pytest.raises(ValueError, match="holds list, expected the sections"):
        Config.from_yaml(path)


@pytest.mark.parametrize(("setting", "teacher"), [("transductive", "revgat"), ("inductive", "gcn")])
def test_students_of_a_teacher_that_the_paper_does_not_tune_are_those_of_graphsage(setting, teacher):
    theirs, of_sage = (preset_config("clean", "cora", setting, name) for name in (teacher, "sage"))
    own = {"gcn": {"krd"}}.get(teacher, set())  # KRD's code has settings for a GCN in both settings
    for section in {"rbm", "mlp", "moe", "krd", "glnn", "distill", "encoding"} - own:
        assert getattr(theirs, section) == getattr(of_sage, section)
    assert theirs.teacher.name == teacher
    assert theirs.teacher.hidden_channels != of_sage.teacher.hidden_channels
    with pytest.raises(ValueError, match="the paper has no hyperparameters for"):
        preset_config("paper", "cora", setting, teacher)


def test_a_message_shows_the_beginning_of_a_long_value():
    for changes in ({"setting": "x" * 10_000}, {"rbm": ["x"] * 10_000}, {"y" * 10_000: 3}, {"seed": [3] * 10_000}):
        with pytest.raises(ValueError, match=r"setting|rbm|seed") as stop:
            Config().updated(changes)
        assert len(str(stop.value)) < 1000


def test_memory_vectors_need_as_many_rows():
    """K-means would fail after the teacher and the pretraining."""
    with pytest.raises(ValueError, match=r"kmeans_max_rows is 7, expected 0 \(all rows\) or at least num_experts=8"):
        Config().updated({"rbm": {"kmeans_max_rows": 7}})
    Config().updated({"rbm": {"kmeans_max_rows": 7, "memory_init": "classes"}})
