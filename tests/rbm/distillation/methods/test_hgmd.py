"""HGMD: the neighbours drawn for hard nodes, and the targets of their pairs."""

import math

import pytest
import torch
from torch.nn import functional as F

from rbm.config import Config, HGMDConfig
from rbm.distillation.methods.hgmd import HGMDTrainer, hardness, train_hgmd
from rbm.distillation.task import DistillationTask
from rbm.nn.students import MLPStudent
from rbm.utils.progress import Progress


@pytest.fixture
def trainer(split, teacher_outputs):
    def make(**options) -> HGMDTrainer:
        config = HGMDConfig(hidden_channels=8, dropout=0.0, **options)
        return HGMDTrainer(MLPStudent(6, 8, 4), split, teacher_outputs, config)

    return make


def entropies(logits: torch.Tensor) -> list[float]:
    found = [-sum(p * math.log(p) for p in row.tolist()) for row in logits.softmax(-1)]
    return [value / max(found) for value in found]


def test_probabilities_equal_the_papers_subgraph_extraction(trainer, teacher_outputs):
    ours = trainer(rate=3.0, max_epochs=11, temperature=0.7)  # which is for the loss alone
    assert (ours.probabilities(0) == 1).all(), "nothing is known of the student yet"
    answers = torch.randn(len(teacher_outputs.soft_labels), 4)
    ours.on_epoch_end(answers)
    p, knowledge, distillation = (
        teacher_outputs.soft_labels.softmax(-1),
        *map(entropies, (teacher_outputs.soft_labels, answers)),
    )
    for epoch in (0, 4, 10):
        rate = 3.0 * 100 ** (-epoch / 10)
        expected = [
            1
            - math.exp(
                -rate
                * float(F.cosine_similarity(p[v], p[u], dim=0))
                * math.sqrt(knowledge[v] * distillation[v])
                / knowledge[u]
            )
            for v, u in zip(ours.graph.targets.tolist(), ours.graph.sources.tolist(), strict=True)
        ]
        torch.testing.assert_close(ours.probabilities(epoch), torch.tensor(expected), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("scheme", ["mixup", "weight"])
def test_loss_and_gradient_equal_a_loop_over_pairs(trainer, teacher_outputs, scheme):
    ours = trainer(scheme=scheme, temperature=0.7)
    z, count = teacher_outputs.soft_labels, len(teacher_outputs.soft_labels)
    drawn = torch.arange(0, len(ours.graph), 2)
    probability, share = torch.rand(len(drawn)), torch.rand(len(drawn))
    logits = torch.randn(count, 4, requires_grad=True)
    pairs = [(v, v, 1.0, 1.0) for v in range(count)]
    for place, edge in enumerate(drawn.tolist()):
        v, u = int(ours.graph.targets[edge]), int(ours.graph.sources[edge])
        pairs.append((v, u, float(probability[place]), float(share[place])))
    p, q = (z / 0.7).softmax(-1), (logits / 0.7).log_softmax(-1)
    similarity = lambda v, u: float(F.cosine_similarity(z[v].softmax(-1), z[u].softmax(-1), dim=0))  # noqa: E731
    total = torch.zeros(())
    for v, u, a, b in pairs:
        if scheme == "mixup":
            label, weight = (1 - a * b) * p[v] + a * b * p[u], 1.0
        else:
            of_v = [similarity(v, other) * chance for node, other, chance, _ in pairs if node == v]
            label, weight = p[u], similarity(v, u) * a / sum(of_v) * len(of_v)
        total = total + weight * (label * (label.log() - q[v])).sum()
    expected = total / len(pairs)
    found = ours.aggregate(drawn, probability, share).loss(logits, None, 0.7, "softmax")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("beta", "least", "most"), [(0.4, 0.32, 0.5), (50.0, 0.0, 0.1)])
def test_the_first_epoch_mixes_along_all_edges_with_the_hard_labels_beside(
    trainer, split, teacher_outputs, monkeypatch, beta, least, most
):
    ours, seen = trainer(label_weight=0.3, temperature=0.7, beta=beta), []
    monkeypatch.setattr(ours, "aggregate", lambda *given: seen.append(given) or HGMDTrainer.aggregate(ours, *given))
    logits = ours.model(split.observed.x)
    loss = ours.train_epoch(0)
    ((drawn, probability, share),) = seen
    assert torch.equal(drawn, torch.arange(len(ours.graph)))
    assert (probability == 1).all()
    assert ((share > 0) & (share < 1)).all()
    assert least < share.std() < most, "Beta(0.4, 0.4) lies at the ends, Beta(50, 50) in the middle"
    soft = ours.aggregate(drawn, probability, share).loss(logits, None, 0.7, "softmax")
    hard = F.cross_entropy(logits[split.observed.train_mask], split.observed.y[split.observed.train_mask])
    assert loss == pytest.approx((0.3 * hard + 0.7 * soft).item(), rel=1e-5)


def test_pairs_are_drawn_by_their_probabilities_in_later_epochs(trainer, monkeypatch):
    ours, seen = trainer(), []
    chances = torch.rand(len(ours.graph))
    chances[:2] = torch.tensor([0.0, 1.0])
    monkeypatch.setattr(ours, "probabilities", lambda epoch: chances)
    monkeypatch.setattr(ours, "aggregate", lambda *given: seen.append(given) or HGMDTrainer.aggregate(ours, *given))
    counts = torch.zeros_like(chances)
    for epoch in range(1, 201):
        ours.epoch_loss(epoch)
        drawn, probability, _ = seen.pop()
        assert torch.equal(probability, chances[drawn])
        counts[drawn] += 1
    torch.testing.assert_close(counts / 200, chances, atol=0.2, rtol=0)
    assert (counts[0], counts[1]) == (0, 200)


@pytest.mark.parametrize("scheme", ["mixup", "weight"])
def test_without_drawn_pairs_each_node_learns_from_itself(split, trainer, teacher_outputs, scheme):
    split.observed.edge_index = split.observed.edge_index[:, :0]
    ours = trainer(scheme=scheme, label_weight=0.3, temperature=0.7)
    logits = ours.model(split.observed.x)
    p, q = ((z / 0.7).log_softmax(-1) for z in (teacher_outputs.soft_labels, logits))
    soft = (p.exp() * (p - q)).sum(-1).mean()
    hard = F.cross_entropy(logits[split.observed.train_mask], split.observed.y[split.observed.train_mask])
    assert ours.train_epoch(0) == pytest.approx((0.3 * hard + 0.7 * soft).item(), rel=1e-5)


def test_sure_labels_are_no_division_by_zero(trainer):
    sure = hardness(torch.tensor([[1e4, 0.0], [0.0, 0.0]]))
    torch.testing.assert_close(sure, torch.tensor([1e-8, 1.0]))
    assert (hardness(torch.full((3, 2), 1e4) * torch.tensor([0.0, 1.0])) == 1e-8).all()


def test_its_state_is_the_students_last_answers(trainer):
    ours, other = trainer(), trainer()
    ours.train_epoch(0)
    ours.evaluate()
    other.restore(ours.state())
    assert torch.equal(other.probabilities(1), ours.probabilities(1))
    assert (other.probabilities(1) < 1).any()


def test_it_reads_its_own_section(split, teacher_outputs, monkeypatch):
    config, phases = Config().updated({"hgmd": {"hidden_channels": 8, "dropout": 0.2}}), []
    task = DistillationTask(split, teacher_outputs, config, 4, lambda section: None, None, Progress(None))
    monkeypatch.setattr(task, "fit", lambda *given: phases.append(given) or {})
    student = train_hgmd(task).student
    assert (student.layers[0].out_features, student.dropout) == (8, 0.2)
    ((phase, trainer, network),) = phases
    assert (phase, trainer.config, network) == ("hgmd", config.hgmd, config.hgmd)
