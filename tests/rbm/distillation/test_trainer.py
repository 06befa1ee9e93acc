"""The common loss of the students (Eqs. 9 and 12) and its gradient, compared with loops over nodes and edges."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from rbm.config import Config
from rbm.datasets.splits import split_graph
from rbm.distillation import trainer as trainers
from rbm.distillation.soft_targets import SoftTargets, weigh_pairs
from rbm.distillation.trainer import StudentTrainer
from rbm.nn import losses
from rbm.nn.dropout import dropout
from rbm.nn.students import MLPStudent
from rbm.teachers.outputs import TeacherOutputs, outputs_from_logits

T = 0.7
MLP = {"dropout": 0.0, "lr": 0.02, "weight_decay": 0.003}


@pytest.fixture
def trainer(small_graph, monkeypatch):
    """A trainer without randomness, with hidden rows of the teacher and less trust in each further node."""
    monkeypatch.setattr(TeacherOutputs, "entropy_change", lambda self, *_: torch.linspace(0, 1, len(self.soft_labels)))
    for name in ("train_mask", "val_mask", "test_mask"):
        small_graph[name] = small_graph[name].roll(31)  # a labelled node's place among observed nodes has another class

    def make(setting="transductive", **distill) -> StudentTrainer:
        split = split_graph(small_graph, setting, unseen_fraction=0.4)
        outputs = outputs_from_logits(torch.randn(60, 3), split)
        outputs = replace(outputs, hidden=torch.randn(split.observed.num_nodes, 5))
        distill = {"label_weight": 0.3, "temperature": T, "neighbors": True, "shuffle": False, **distill}
        config = Config().updated({"distill": distill, "mlp": MLP, "reliability": {"init_power": 2.0}})
        return StudentTrainer(MLPStudent(12, 8, 3), split, outputs, config)

    return make


def softened(logits: torch.Tensor, mode: str) -> torch.Tensor:
    return (logits / T).softmax(-1) if mode == "softmax" else logits.softmax(-1) ** (1 / T)


def expected_loss(ours: StudentTrainer, x: torch.Tensor, mean: str = "nodes", mode: str = "softmax") -> torch.Tensor:
    """The loss of rows ``x`` of all observed nodes."""
    observed, teacher = ours.split.observed, ours.teacher_outputs.soft_labels
    logits, trust = ours.model(x), 1 - torch.linspace(0, 1, len(teacher)) ** 2
    p, q = softened(teacher, mode), softened(logits, mode)
    divergence = lambda u, v: (p[u] * (p[u] / q[v]).log()).sum()  # noqa: E731
    sources = [[] for _ in teacher]
    for u, v in observed.edge_index.T.tolist():
        sources[v].append(u)
    soft, count = 0.0, len(teacher)
    for v, neighbors in enumerate(sources):
        odds = sum(float(trust[u]) for u in neighbors)
        count += odds if mean == "pairs" else 0
        divisor = odds if mean == "nodes" and odds > 0 else 1
        soft = soft + divergence(v, v) + sum(float(trust[u]) / divisor * divergence(u, v) for u in neighbors)
    hard = F.cross_entropy(logits[observed.train_mask], observed.y[observed.train_mask])
    return 0.3 * hard + 0.7 * soft / count


def stepped(ours: StudentTrainer) -> tuple[float, list[torch.Tensor]]:
    """The loss of an epoch, and the gradients of its only step."""
    seen = []
    ours.optimizer_step = lambda: seen.append([parameter.grad.clone() for parameter in ours.model.parameters()])
    ours.model.train()
    loss = ours.train_epoch(0)
    (gradients,) = seen
    return loss, gradients


def assert_steps_on(ours: StudentTrainer, expected: torch.Tensor) -> None:
    gradients = torch.autograd.grad(expected, list(ours.model.parameters()))
    loss, found = stepped(ours)
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    for one, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
@pytest.mark.parametrize("batch_size", [0, 7])
@pytest.mark.parametrize(("forward", "mean"), [("node", "nodes"), ("pair", "nodes"), ("node", "pairs")])
def test_an_epoch_steps_on_the_papers_loss(trainer, setting, batch_size, forward, mean):
    ours = trainer(setting, batch_size=batch_size, forward=forward, mean=mean)
    assert_steps_on(ours, expected_loss(ours, ours.split.observed.x, mean))


@pytest.mark.parametrize("forward", ["node", "pair"])
def test_log_probabilities_are_softened_as_the_settings_ask(trainer, forward):
    ours = trainer(forward=forward, temperature_mode="scaled_log_probs")
    assert_steps_on(ours, expected_loss(ours, ours.split.observed.x, mode="scaled_log_probs"))


def test_a_step_per_batch_has_the_gradient_of_that_batch_alone(trainer):
    ours, seen = trainer(batch_size=7, step_per_batch=True), []
    expected = torch.autograd.grad(expected_loss(ours, ours.split.observed.x), list(ours.model.parameters()))
    ours.optimizer_step = lambda: seen.append([parameter.grad.clone() for parameter in ours.model.parameters()])
    ours.train_epoch(0)
    assert len(seen) == 9
    for *parts, whole in zip(*seen, expected, strict=True):  # each batch has the weight of the whole loss
        torch.testing.assert_close(sum(parts) / 9, whole, rtol=1e-4, atol=1e-6)


def test_targets_follow_the_reliability_when_it_is_learned(trainer, monkeypatch):
    ours = trainer()

    def learn(agree):
        answers = ours.model(ours.split.observed.x).argmax(-1)
        assert torch.equal(agree, answers == ours.teacher_outputs.soft_labels.argmax(-1))
        ours.reliability.power = 0.5

    monkeypatch.setattr(ours.reliability, "is_due", lambda epoch: epoch == 1)
    monkeypatch.setattr(ours.reliability, "learn", learn)
    masses = []
    for epoch in range(4):
        ours.train_epoch(epoch)
        ours.evaluate()
        masses.append(ours.targets.mass)
    trust = 1 - torch.linspace(0, 1, len(masses[0])) ** 0.5
    pairs = weigh_pairs(ours.graph, trust, mean="nodes", draw="expectation")
    assert torch.equal(masses[0], masses[1])
    torch.testing.assert_close(masses[2], SoftTargets.of(pairs, ours.graph, ours.teacher_logs).mass)
    assert torch.equal(masses[2], masses[3])
    assert not torch.allclose(masses[1], masses[2])
    other = trainer()
    other.restore(ours.state())
    assert other.reliability.power == 0.5


def test_neighbors_are_drawn_anew_in_each_epoch(trainer):
    ours = trainer(draw="sample")
    drawn = []
    for epoch in range(3):
        ours.train_epoch(epoch)
        drawn.append(ours.pairs.neighbors)
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_logits_of_all_nodes_are_in_the_order_of_the_graph(trainer, setting):
    ours = trainer(setting)
    assert ours.first_layer is not None
    with torch.no_grad():
        torch.testing.assert_close(ours.all_logits(), ours.model.eval()(ours.split.graph.x))


@pytest.mark.parametrize("moves", [False, True])
def test_weights_of_further_losses(trainer, monkeypatch, moves):
    """The perturbation is given here; auxiliary losses of both passes count, the similarity once. The memory moves in
    the first pass, and in the second one if the settings ask for it.
    """
    asked, frozen = [], []
    monkeypatch.setattr(trainers, "pgd_perturb", lambda x, _, **how: asked.append(how) or x + 1)
    options = {"adversarial_weight": 0.6, "adversarial_eps": 0.2, "adversarial_steps": 3}
    ours = trainer(**options, update_memory_on_adversarial=moves, similarity_weight=0.4)
    ours.freeze_memory = frozen.append
    ours.auxiliary_loss = lambda trace, share: trace.last.square().mean()
    x, nodes = ours.split.observed.x, ours.train_nodes
    expected = 0.0
    for weight, rows in ((1.0, x), (0.6, x + 1)):
        auxiliary = ours.model(rows, return_trace=True)[1].last.square().mean()
        expected = expected + weight * (expected_loss(ours, rows) + auxiliary)
    hidden = ours.projection(ours.model(x, return_trace=True)[1].first[nodes]).relu()
    similarity = losses.similarity_loss(hidden, ours.teacher_outputs.hidden[nodes])
    assert_steps_on(ours, expected + 0.4 * similarity)
    assert asked == [{"eps": 0.2, "steps": 3}]
    assert frozen == [not moves, False]


def test_an_auxiliary_loss_is_a_mean_over_all_batches(trainer):
    ours = trainer(batch_size=7)
    ours.auxiliary_loss = lambda trace, share: trace.last.square().mean()
    x = ours.split.observed.x
    auxiliary = ours.model(x, return_trace=True)[1].last.square().mean()
    assert_steps_on(ours, expected_loss(ours, x) + auxiliary)


def test_projected_rows_have_the_students_dropout_in_training_alone(trainer):
    ours = trainer(similarity_weight=0.4)
    ours.network = replace(ours.network, dropout=0.5)
    hidden, nodes = torch.randn(7, 8), torch.arange(3, 10)
    projected = ours.projection(hidden).relu()
    for training in (True, False):
        ours.model.train(training)
        torch.manual_seed(3)
        found = ours.similarity_loss(hidden, nodes)
        torch.manual_seed(3)
        expected = losses.similarity_loss(dropout(projected, 0.5, training), ours.teacher_outputs.hidden[nodes])
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("forward", ["node", "pair"])
def test_batches_share_the_weight_of_the_similarity(trainer, forward):
    """Like the other losses: the limit of memory that a batch is does not decide how much it counts."""
    ours = trainer(similarity_weight=0.4, batch_size=7, forward=forward)
    observed, labelled = ours.split.observed, set(ours.train_nodes.tolist())
    rows = torch.arange(60) if forward == "node" else ours.train_nodes
    similarity = 0.0
    for batch in rows.split(7):
        nodes = [node for node in batch.tolist() if node in labelled]
        if nodes:
            hidden = ours.projection(ours.model(observed.x[nodes], return_trace=True)[1].first).relu()
            found = losses.similarity_loss(hidden, ours.teacher_outputs.hidden[nodes])
            similarity = similarity + len(nodes) / len(labelled) * found
    assert_steps_on(ours, expected_loss(ours, observed.x) + 0.4 * similarity)


def test_the_projection_learns_and_is_part_of_the_state(trainer):
    ours, other = trainer(similarity_weight=0.4), trainer(similarity_weight=0.4)
    before = ours.projection.weight.clone()
    ours.model.train()
    ours.train_epoch(0)
    assert not torch.equal(ours.projection.weight, before)
    other.restore(ours.state())
    assert torch.equal(other.projection.weight, ours.projection.weight)


def test_the_noise_is_that_of_the_settings_and_of_the_seed(small_graph, monkeypatch):
    asked = []

    def entropy_change(self, *given):
        asked.append(given)
        return torch.zeros(60)

    monkeypatch.setattr(TeacherOutputs, "entropy_change", entropy_change)
    split = split_graph(small_graph)
    for neighbors in (False, True):
        config = Config().updated({"seed": 7, "distill": {"neighbors": neighbors}, "reliability": {"noise_std": 0.3}})
        StudentTrainer(MLPStudent(12, 8, 3), split, outputs_from_logits(torch.randn(60, 3), split), config)
    assert asked == [(config.reliability, 7)], "and none if no neighbour teaches"


def test_the_optimiser_has_the_settings_of_the_section(trainer):
    ours = trainer()
    (group,) = ours.optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.02, 0.003)
    network = replace(ours.config.rbm, lr=0.5)
    other = StudentTrainer(ours.model, ours.split, ours.teacher_outputs, ours.config, network=network)
    assert other.optimizer.param_groups[0]["lr"] == 0.5
