"""From pretraining to routing: the function does not change, and validation may select a pretraining epoch."""

import copy
import json

import pytest
import torch
from killed_runs import killed_and_resumed

import rbm
from rbm.config import Config, RbMConfig
from rbm.config.presets import preset_config
from rbm.datasets.splits import split_graph
from rbm.distillation.methods.rbm import RbMTrainer
from rbm.experiments.results import config_fingerprint
from rbm.teachers.outputs import outputs_from_logits

SHAPE = {"hidden_channels": 8, "num_experts": 4, "top_k": 2, "norm": "batch", "pretrain_epochs": 5, "max_epochs": 6}
QUICK = {
    "teacher": {"hidden_channels": 16, "max_epochs": 5},
    "rbm": SHAPE,
    "encoding": {"deepwalk": False},
}


@pytest.fixture
def quick() -> Config:
    return Config().updated(QUICK)


def pretrained(graph, config) -> RbMTrainer:
    split = split_graph(graph)
    student = rbm.RbMStudent.from_config(config.rbm, in_channels=12, out_channels=3)
    trainer = RbMTrainer(student, split, outputs_from_logits(torch.randn(60, 3), split), config)
    for epoch in range(5):
        student.train()
        trainer.train_epoch(epoch)
    student.eval()
    return trainer


def test_switching_the_routing_on_changes_nothing(small_graph, quick):
    trainer = pretrained(small_graph, quick)
    with torch.no_grad():
        before = trainer.model(small_graph.x)
        trainer._begin_routing()
        torch.testing.assert_close(trainer.model(small_graph.x), before, atol=1e-5, rtol=1e-5)
    assert not trainer.model.pretraining


def test_the_released_start_changes_it(small_graph, quick):
    config = quick.updated({"rbm": {"init_scale": 2.0, "init_attention": 1.1}})
    trainer = pretrained(small_graph, config)
    with torch.no_grad():
        before = trainer.model(small_graph.x)
        trainer._begin_routing()
        assert (trainer.model(small_graph.x) - before).abs().max() > 0.1 * before.abs().max()


@pytest.mark.parametrize("scales", [{}, {"init_scale": 2.0, "init_attention": 1.1}, {"input_attention": False}])
def test_an_epoch_of_pretraining_is_the_cloned_expert(small_graph, quick, scales):
    """Also if routing starts from another function, and after routed epochs."""
    config = quick.updated({"rbm": scales})
    trainer = pretrained(small_graph, config)
    state = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    with torch.no_grad():
        before = trainer.model(small_graph.x)
    for epoch in (5, 6):
        trainer.model.train()
        trainer.train_epoch(epoch)
    trainer.model.load_state_dict(state)
    trainer.model.eval()
    trainer.at_best_epoch(4)
    with torch.no_grad():
        torch.testing.assert_close(trainer.model(small_graph.x), before, atol=1e-5, rtol=1e-5)
    placed = copy.deepcopy(trainer.model)
    rbm.initialize_memory(placed, small_graph.x, seed=config.seed)
    for layer, again in zip(trainer.model.layers, placed.layers, strict=True):
        assert torch.equal(layer.weight, layer.weight[:1].expand_as(layer.weight))
        torch.testing.assert_close(layer.memory, again.memory)


def test_the_first_routed_epoch_stays_as_it_was_trained(small_graph, quick):
    trainer = pretrained(small_graph, quick)
    trainer.model.train()
    trainer.train_epoch(5)
    state = {name: tensor.clone() for name, tensor in trainer.model.eval().state_dict().items()}
    trainer.at_best_epoch(5)
    assert all(torch.equal(state[name], tensor) for name, tensor in trainer.model.state_dict().items())


@pytest.fixture
def falling(monkeypatch):
    """Validation accuracies that fall from the student's third epoch on, to zero at the end of routed training."""
    evaluate = RbMTrainer.evaluate

    def script(trainer):
        found = evaluate(trainer)
        return found._replace(val=0.9 if trainer.epoch == 2 else 0.5 - trainer.epoch / 100)

    monkeypatch.setattr(RbMTrainer, "evaluate", script)


@pytest.mark.usefixtures("falling")
def test_validation_selects_pretraining_where_it_may(small_graph, quick):
    chosen, routed = (
        rbm.distill(
            small_graph,
            config=quick.updated({"rbm": {"select_pretraining": select}}),
            methods=["rbm"],
            measure_latency=False,
        )
        for select in (True, False)
    )
    assert (chosen.summary["rbm"]["best_epoch"], routed.summary["rbm"]["best_epoch"]) == (2, 5)
    assert chosen.summary["rbm"]["epochs"] == routed.summary["rbm"]["epochs"] == 11
    with torch.no_grad():
        logits = chosen.student(small_graph.x)
    right = (logits.argmax(-1) == small_graph.y)[small_graph.test_mask].float().mean().item()
    assert right == pytest.approx(chosen.summary["rbm"]["test_accuracy"]), "the student is the one reported"


@pytest.mark.usefixtures("falling")
@pytest.mark.parametrize("epoch", [1, 4, 8])
def test_a_kill_changes_nothing(small_graph, quick, tmp_path, epoch):
    options = {"config": quick, "methods": ["rbm"], "measure_latency": False, "cache": tmp_path / "cache"}
    whole = rbm.distill(small_graph, folder=tmp_path / "whole", **options)
    resumed = killed_and_resumed(small_graph, tmp_path / "killed", "rbm", epoch, **options)
    assert resumed.summary == whole.summary
    assert (tmp_path / "killed" / "rbm.safetensors").read_bytes() == (
        tmp_path / "whole" / "rbm.safetensors"
    ).read_bytes()
    loaded = rbm.load(tmp_path / "killed")
    assert torch.equal(loaded(small_graph.x), whole.student(small_graph.x))


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_pretraining_is_the_training_of_the_mlp(small_graph, quick, tmp_path, setting):
    """To the bit, if both have the same dropout; later settings of one or the other end this."""
    config = quick.updated({"setting": setting, "rbm": {"dropout_first_layer": False}, "mlp": {"max_epochs": 11}})

    def epochs(changes: dict) -> list[list]:
        options = {"methods": ["mlp", "rbm"], "measure_latency": False, "folder": tmp_path / "run", "overwrite": True}
        rbm.distill(small_graph, config=config.updated({"rbm": changes}), **options)
        records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        figures = ("loss", "train_accuracy", "val_accuracy", "test_accuracy")
        return [[[r[f] for f in figures] for r in records if r["phase"] == phase] for phase in ("mlp", "rbm")]

    mlp, student = epochs({})
    assert student[:5] == mlp[:5]
    assert student[5] != mlp[5], "routing has begun"
    mlp, student = epochs({"start_as_mlp": False})
    assert student[0] != mlp[0]


def test_who_starts_how():
    ours = {"select_pretraining": True, "init_scale": 1.0, "init_attention": 1.0}
    released = {"select_pretraining": False, "init_scale": 2.0, "init_attention": 1.1}
    assert [preset_config("clean", name).rbm.start_as_mlp for name in ("mine.npz", "digits", "cora")] == [
        True,
        False,
        False,
    ]

    def start(config: Config) -> dict:
        return {name: getattr(config.rbm, name) for name in ours}

    assert (
        start(Config()) == start(preset_config("clean", "digits")) == start(preset_config("clean", "mine.npz")) == ours
    )
    for preset in ("paper", "official"):
        assert start(preset_config(preset, "cora")) == released
    assert start(preset_config("clean", "cora")) == released, "tuned with it; its rows are of this start"


def test_rows_of_before_keep_their_fingerprints():
    """Fingerprints in results/ for seen nodes of Cora, seed 0; settings added later count only if they differ."""
    config = preset_config("clean", "cora", "transductive")
    assert config_fingerprint(config, "mlp") == "d0696db1c3cd83c1"
    assert config_fingerprint(config, "vqgraph") == "d07e1fc06571d82d"
    changed = config.updated({"rbm": {"select_pretraining": True}})
    assert config_fingerprint(changed, "rbm") != config_fingerprint(config, "rbm")
    former = config.updated({"vqgraph": {"tokenizer": {"code_start": "random"}}})
    assert config_fingerprint(former, "vqgraph") != "d07e1fc06571d82d"


def test_a_configuration_without_the_setting_is_of_an_earlier_run(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("\n".join(line for line in Config().to_yaml().splitlines() if "select_pretraining" not in line))
    assert Config.from_yaml(path).rbm == RbMConfig(select_pretraining=False)
    path.write_text(Config().to_yaml())
    assert Config.from_yaml(path) == Config()
