"""How far experts move apart: each setting at its extremes, against its definition, and across a kill."""

import pytest
import torch
from killed_runs import killed_and_resumed
from trained_rbm import trained

import rbm
from rbm.config import Config
from rbm.config.presets import preset_config
from rbm.distillation.experts import SharedExpert, expert_parameters, mean_expert, pull_together
from rbm.distillation.trainer import StudentTrainer
from rbm.experiments.results import config_fingerprint

SHAPE = {"hidden_channels": 8, "num_experts": 4, "top_k": 2, "pretrain_epochs": 4, "max_epochs": 6, "dropout": 0.2}
QUICK = {"teacher": {"hidden_channels": 16, "max_epochs": 5}, "rbm": SHAPE, "encoding": {"deepwalk": False}}


@pytest.fixture
def quick() -> Config:
    return Config().updated(QUICK)


def spread(trainer) -> float:
    """The largest distance of an expert from the first one."""
    return max((each - each[0]).abs().max().item() for each in expert_parameters(trainer.model.layers))


def test_a_pull_moves_by_its_share():
    experts = torch.nn.Parameter(torch.tensor([[0.0], [1.0], [5.0]]))
    pull_together([experts], 0.25)
    torch.testing.assert_close(experts.detach(), torch.tensor([[0.5], [1.25], [4.25]]))
    before = experts.detach().clone()
    pull_together([experts], 0.0)
    assert torch.equal(experts, before)
    pull_together([experts], 1.0)
    assert torch.equal(experts, torch.full((3, 1), 2.0))


def test_the_mean_of_equal_experts_is_one_of_them():
    equal = torch.randn(1, 5, 7).expand(3, 5, 7)
    assert torch.equal(mean_expert(equal), equal[0])
    different = torch.randn(3, 5)
    torch.testing.assert_close(mean_expert(different), different.mean(0))


def test_a_full_pull_leaves_one_expert(small_graph, quick):
    """All experts are equal after routed epochs, so routing has no effect."""
    free, pulled = (trained(small_graph, quick.updated({"rbm": {"expert_pull": share}}), 7) for share in (0.0, 1.0))
    assert spread(free) > 1e-3
    assert spread(pulled) == 0
    with torch.no_grad():
        before = pulled.model(small_graph.x)
        for memory in pulled.model.memories():
            memory.copy_(torch.randn_like(memory))
        torch.testing.assert_close(pulled.model(small_graph.x), before)


def test_pretraining_knows_no_pull(small_graph, quick):
    free, pulled = (trained(small_graph, quick.updated({"rbm": {"expert_pull": share}}), 4) for share in (0.0, 1.0))
    assert all(torch.equal(a, b) for a, b in zip(free.model.parameters(), pulled.model.parameters(), strict=True))


@pytest.mark.parametrize("shared", [False, True])
def test_a_rate_of_zero_keeps_experts_alike(small_graph, quick, shared):
    """Without a shared expert, they stay as cloned; with one, they move with it."""
    config = quick.updated({"rbm": {"routed_lr": 0.0, "shared_expert": shared}})
    trainer = trained(small_graph, config, 5)
    first = [each.detach().clone() for each in expert_parameters(trainer.model.layers)]
    scales = [layer.log_scale.detach().clone() for layer in trainer.model.layers]
    trainer.model.train()
    trainer.train_epoch(5)
    moved = any(not torch.equal(a, b) for a, b in zip(first, expert_parameters(trainer.model.layers), strict=True))
    assert moved == shared
    assert spread(trainer) == 0
    assert any(not torch.equal(a, layer.log_scale) for a, layer in zip(scales, trainer.model.layers, strict=True))


def test_a_lower_rate_moves_experts_less(small_graph, quick):
    fast, slow = (trained(small_graph, quick.updated({"rbm": {"routed_lr": rate}}), 7) for rate in (1.0, 0.1))
    assert 0 < spread(slow) < 0.5 * spread(fast)


def test_a_shared_expert_begins_as_the_clone_and_adds_what_is_routed(small_graph, quick):
    config = quick.updated({"rbm": {"shared_expert": True}})
    trainer = trained(small_graph, config, 4)
    expert = trainer.model.layers[0].weight[0].detach().clone()
    trainer.model.train()
    trainer.begin_epoch(4)
    part = trainer.shared_expert
    assert torch.equal(part.shared[0], expert)
    assert not any(residual.any() for residual in part.residuals)
    trainer.train_epoch(5)
    assert any(residual.any() for residual in part.residuals)
    for each, shared, residual in zip(part.experts, part.shared, part.residuals, strict=True):
        assert torch.equal(each, shared + residual)


def test_a_shared_expert_takes_the_sum_of_gradients():
    """One step of gradient descent moves expert e by its own gradient and by the sum of all gradients."""
    experts = torch.nn.Parameter(torch.randn(3, 4))
    part, start = SharedExpert([experts]), experts.detach().clone()
    gradient = torch.randn(3, 4)
    experts.grad = gradient.clone()
    part.take_gradients()
    torch.optim.SGD([*part.shared, *part.residuals], lr=0.1).step()
    part.write_experts()
    torch.testing.assert_close(experts.detach(), start - 0.1 * (gradient + gradient.sum(0)))
    assert experts.grad is None


def test_weight_decay_of_residuals_keeps_experts_close(small_graph, quick):
    loose, tight = (
        trained(small_graph, quick.updated({"rbm": {"shared_expert": True, "residual_weight_decay": decay}}), 9)
        for decay in (0.0, 10.0)
    )
    assert spread(tight) < 0.8 * spread(loose)


@pytest.mark.parametrize("shared", [False, True])
def test_dead_experts_start_anew_every_so_many_routed_epochs(small_graph, quick, shared):
    """Two of four experts get a memory vector far from all nodes: they are reset after every second routed epoch."""
    small_graph.x = small_graph.x.abs()
    changes = {"top_k": 1, "reset_dead_experts": 2, "shared_expert": shared}
    trainer = trained(small_graph, quick.updated({"rbm": changes}), 5)
    layer = trainer.model.layers[0]
    dead = [1, 3]

    def used() -> list[int]:
        return layer.route(trainer.observed_x).experts.unique().tolist()

    def kill() -> None:
        with torch.no_grad():
            layer.memory[dead] = -1.0  # the rows have no negative number

    kill()
    trainer.model.train()
    trainer.begin_epoch(5)  # one routed epoch
    assert used() == [0, 2]
    others = [parameter[[0, 2]].detach().clone() for parameter in layer.expert_parameters()]
    trainer.begin_epoch(6)
    assert used() == [0, 1, 2, 3]
    for parameter, before in zip(layer.expert_parameters(), others, strict=True):
        assert torch.equal(parameter[[0, 2]], before)
        for each in dead:
            assert any(torch.equal(parameter[each], one) for one in before), "a copy of one that lives"
    if shared:
        part = trainer.shared_expert
        for each, common, residual in zip(part.experts, part.shared, part.residuals, strict=True):
            torch.testing.assert_close(common + residual, each)
    kill()
    trainer.config = quick.updated({"rbm": {"top_k": 1}})  # the default
    trainer.begin_epoch(8)
    assert used() == [0, 2]


def test_routing_begins_from_the_best_epoch_of_pretraining(small_graph, quick, monkeypatch):
    """Validation decides, and of two equal epochs the later one counts."""
    evaluate = StudentTrainer.evaluate
    monkeypatch.setattr(
        StudentTrainer,
        "evaluate",
        lambda student: evaluate(student)._replace(val=0.9 if student.epoch in (1, 2) else 0.1, test=0.0),
    )
    best = trained(small_graph, quick, 3).model.layers[0].weight[0].detach().clone()
    last = trained(small_graph, quick, 4).model.layers[0].weight[0].detach().clone()
    for from_best, expected in ((True, best), (False, last)):
        trainer = trained(small_graph, quick.updated({"rbm": {"route_from_best": from_best}}), 4)
        trainer.begin_epoch(4)
        assert torch.equal(trainer.model.layers[0].weight, expected.expand(4, -1, -1))


@pytest.mark.parametrize(
    "changes",
    [
        {"expert_pull": 0.3, "reset_dead_experts": 1},
        {"routed_lr": 0.1},
        {"shared_expert": True, "residual_weight_decay": 0.1},
        {"route_from_best": True, "memory_init": "teacher"},
    ],
)
@pytest.mark.parametrize("epoch", [4, 6])  # the checkpoint is the last one before routing, or of routed training
def test_a_kill_changes_nothing(small_graph, quick, tmp_path, monkeypatch, changes, epoch):
    """This includes what is remembered from before the kill: the best pretraining epoch is the second here."""
    evaluate = StudentTrainer.evaluate
    monkeypatch.setattr(
        StudentTrainer, "evaluate", lambda student: evaluate(student)._replace(val=0.9 if student.epoch == 1 else 0.5)
    )
    config = quick.updated({"rbm": {**changes, "select_pretraining": False, "patience": 100}})
    options = {"config": config, "methods": ["rbm"], "measure_latency": False, "cache": tmp_path / "cache"}
    whole = rbm.distill(small_graph, folder=tmp_path / "whole", **options)
    resumed = killed_and_resumed(small_graph, tmp_path / "killed", "rbm", epoch, **options)
    assert resumed.summary == whole.summary
    assert torch.equal(resumed.student(small_graph.x), whole.student(small_graph.x))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_pull": 1.5}, "rbm.expert_pull is 1.5, expected between 0"),
        ({"routed_lr": -1.0}, "rbm.routed_lr is -1.0, expected at least 0"),
        ({"routed_lr": 0.1, "reset_optimizer": False}, "rbm.routed_lr is 0.1, expected 1 where reset_optimizer"),
        ({"shared_expert": True, "expert_pull": 0.1}, "rbm.shared_expert is True, expected false where"),
        ({"residual_weight_decay": 0.1}, "rbm.residual_weight_decay is 0.1, expected 0 without shared_expert"),
        ({"reset_dead_experts": -1}, "rbm.reset_dead_experts is -1, expected at least 0"),
        ({"memory_init": "labels"}, "rbm.memory_init is 'labels', expected one of kmeans, classes, teacher"),
    ],
)
def test_settings_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        Config().updated({"rbm": changes})


def test_a_teacher_of_logits_alone_cannot_place_memory(small_graph, quick):
    """The error is raised before the student trains."""
    config = quick.updated({"rbm": {"memory_init": "teacher"}})
    with pytest.raises(ValueError, match="memory_init is teacher, but this teacher shows no hidden layer"):
        trained(small_graph, config, 0)


def test_neutral_settings_keep_the_fingerprint_of_committed_rows():
    """The fingerprint in results/paper.csv for RbM on Cora, transductive, seed 0."""
    config = preset_config("clean", "cora", "transductive")
    assert config_fingerprint(config, "rbm") == "c2eab3079af96cfe"
    for name, value in {
        "route_from_best": True,
        "memory_init": "classes",
        "expert_pull": 0.1,
        "routed_lr": 0.5,
        "shared_expert": True,
        "reset_dead_experts": 5,
    }.items():
        assert config_fingerprint(config.updated({"rbm": {name: value}}), "rbm") != "c2eab3079af96cfe"
