"""KRD's loss is a mean over pairs: each node with itself, and with reliable neighbours."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from rbm.config import Config
from rbm.datasets.splits import split_graph
from rbm.distillation.methods.krd import KRDTrainer
from rbm.nn.students import MLPStudent
from rbm.teachers.outputs import TeacherOutputs, outputs_from_logits


@pytest.fixture
def change(monkeypatch) -> torch.Tensor:
    """A given change of each node's entropy instead of a teacher's; node 0 is not trusted at all."""
    values = torch.rand(40)
    values[0] = 1.0
    monkeypatch.setattr(TeacherOutputs, "entropy_change", lambda self, *_: values[: len(self.soft_labels)])
    return values


def trainer_of(split, teacher_outputs, classes: int = 4, **options) -> KRDTrainer:
    changes = {"dropout": 0.0, "reliability": {"update_start_epoch": 5, "init_power": 2.0}, **options}
    config = Config().updated({"krd": changes})
    return KRDTrainer(MLPStudent(6, 8, classes), split, teacher_outputs, config)


@pytest.mark.parametrize("epoch", [0, 4, 5, 6])
def test_loss_and_gradient_equal_a_loop_over_pairs(split, teacher_outputs, change, epoch):
    ours = trainer_of(split, teacher_outputs, label_weight=0.3, temperature=0.7, draw="expectation")
    graph, teacher = split.observed, teacher_outputs.logits[split.observed_nodes]
    trust = torch.ones(len(teacher)) if epoch < 5 else 1 - change[: len(teacher)] ** 2
    logits = ours.model(graph.x)
    pairs = [(node, node, 1.0) for node in range(len(teacher))]
    pairs += [(v, u, float(trust[u])) for u, v in graph.edge_index.T.tolist() if u != v]
    soft = 0.0
    for v, u, weight in pairs:
        p, q = (F.softmax(row / 0.7, dim=-1) for row in (teacher[u], logits[v]))
        soft = soft + weight * (p * (p / q).log()).sum()
    soft = soft / sum(weight for *_, weight in pairs)
    hard = F.cross_entropy(logits[graph.train_mask], graph.y[graph.train_mask])
    expected = 0.3 * hard + 0.7 * soft
    gradients = torch.autograd.grad(expected, list(ours.model.parameters()))

    assert ours.train_epoch(epoch) == pytest.approx(expected.item(), rel=1e-5)
    for parameter, gradient in zip(ours.model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_drawn_pairs_are_edges_of_the_graph(split, change):
    """The teacher assigns every node its own class, so that targets reveal their pairs."""
    count = split.observed.num_nodes
    ours = trainer_of(split, outputs_from_logits(1e3 * torch.eye(40), split), classes=40)
    sources, targets = split.observed.edge_index
    edges = torch.zeros(count, count).index_put_((targets, sources), torch.ones(len(sources)), accumulate=True)
    edges.fill_diagonal_(0)

    def drawn(epoch: int) -> torch.Tensor:
        mass = ours._targets(epoch).mass[:, split.observed_nodes]
        pairs = mass / mass[count - 1, count - 1]  # a node's pair with itself has weight one
        torch.testing.assert_close(mass.sum(), torch.tensor(1.0))
        torch.testing.assert_close(pairs, pairs.round(), atol=1e-4, rtol=0)
        return pairs.round()

    torch.testing.assert_close(drawn(0), edges + torch.eye(count), msg="all of them at first")
    first, second = drawn(5), drawn(5)
    for pairs in (first, second):
        assert (pairs.diagonal() == 1).all()
        assert (pairs - torch.eye(count) <= edges).all()
        assert pairs[1:, 0].sum() == 0 < edges[:, 0].sum(), "a node without trust teaches itself alone"
        assert count < pairs.sum() < count + edges.sum()
    assert not torch.equal(first, second), "drawn anew"


def test_draws_follow_the_trust(directed_graph, change):
    split = split_graph(directed_graph)
    ours = trainer_of(split, outputs_from_logits(1e3 * torch.eye(40), split), classes=40)
    graph = ours.graph
    drawn = torch.stack([ours._targets(5).mass[graph.targets, graph.sources] > 0 for _ in range(500)])
    trust = 1 - change[graph.sources] ** 2
    pairs = list(zip(graph.targets.tolist(), graph.sources.tolist(), strict=True))
    once = torch.tensor([pairs.count(pair) == 1 for pair in pairs])
    assert (drawn.float().mean(0) - trust)[once].abs().max() < 5 * 0.5 / 500**0.5, "five standard deviations"


def test_the_exponent_moves_when_it_is_due(split, teacher_outputs, change):
    reliability = {"update_start_epoch": 2, "update_every": 2, "power_momentum": 0.5}
    ours = trainer_of(split, teacher_outputs, reliability=reliability)
    powers = [ours.reliability.power]
    for epoch in range(6):
        ours.train_epoch(epoch)
        ours.evaluate()
        powers.append(ours.reliability.power)
    assert [b != a for a, b in itertools.pairwise(powers)] == [False, False, True, False, True, False]
    other = trainer_of(split, teacher_outputs)
    other.restore(ours.state())
    assert other.reliability.power == powers[-1]


def test_the_exponent_is_learned_from_where_student_and_teacher_agree(split, teacher_outputs, change, monkeypatch):
    ours, seen = trainer_of(split, teacher_outputs, reliability={"update_start_epoch": 0}), []
    monkeypatch.setattr(ours.reliability, "learn", seen.append)
    ours.train_epoch(0)
    ours.evaluate()
    agree = ours.model(split.observed.x).argmax(-1) == teacher_outputs.soft_labels.argmax(-1)
    assert 0 < agree.sum() < len(agree) / 2
    assert [found.tolist() for found in seen] == [agree.tolist()]


def test_the_noise_is_that_of_its_own_settings_and_of_the_seed(split, teacher_outputs, monkeypatch):
    asked = []

    def entropy_change(self, *given):
        asked.append(given)
        return torch.zeros(len(self.soft_labels))

    monkeypatch.setattr(TeacherOutputs, "entropy_change", entropy_change)
    config = Config().updated({"seed": 7, "krd": {"reliability": {"noise_std": 0.3}}})
    KRDTrainer(MLPStudent(6, 8, 4), split, teacher_outputs, config)
    assert asked == [(config.krd.reliability, 7)]
