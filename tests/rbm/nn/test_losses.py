"""Each loss, compared with a few lines of its equation."""

import pytest
import torch
from torch.nn import functional as F

from rbm import FusedRbMLayer
from rbm.nn import losses
from rbm.nn.rbm_layer import Routing


@pytest.fixture
def routed():
    layer = FusedRbMLayer(6, 4, 5, 2, dtype=torch.float64)
    x = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    return layer, x, layer(x, return_routing=True)[1]


def test_hard_labels():
    logits, labels = torch.randn(6, 3), torch.tensor([0, 2, 1, 1, 0, 2])
    expected = -torch.stack([row.softmax(0)[label].log() for row, label in zip(logits, labels, strict=True)]).mean()
    torch.testing.assert_close(losses.hard_label_loss(logits, labels), expected)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_soft_labels(temperature):
    logits, teacher = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    p, q = (teacher / temperature).softmax(-1), (logits / temperature).softmax(-1)
    expected = (p * (p.log() - q.log())).sum() / 6
    torch.testing.assert_close(losses.soft_label_loss(logits, teacher, temperature), expected)
    assert losses.soft_label_loss(teacher, teacher, temperature).abs() < 1e-12


def test_soft_labels_in_the_released_form_have_the_stated_gradient():
    logits = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    teacher, tau = torch.randn(6, 3, dtype=torch.float64, requires_grad=True), 0.7
    losses.soft_label_loss(logits, teacher, tau, "scaled_log_probs").backward()
    powered = teacher.detach().softmax(-1) ** (1 / tau)
    mass = powered.sum(-1, keepdim=True)
    torch.testing.assert_close(logits.grad, (mass * logits.detach().softmax(-1) - powered) / (6 * tau))
    assert teacher.grad is None


def test_unknown_temperature_mode():
    with pytest.raises(ValueError, match="mode is 'hot', expected one of softmax, scaled_log_probs"):
        losses.soft_label_loss(torch.zeros(1, 2), torch.zeros(1, 2), 1.0, "hot")


def test_commitment(routed):
    layer, x, routing = routed
    cosines = F.normalize(x, dim=-1) @ F.normalize(layer.memory, dim=-1).T
    expected = -sum(routing.gates[b, j] * cosines[b, routing.experts[b, j]] for b in range(11) for j in range(2)) / 11
    loss = losses.commitment_loss(routing)
    torch.testing.assert_close(loss, expected)
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    (expected_grad,) = torch.autograd.grad(expected, x)
    torch.testing.assert_close(grad, expected_grad)


def test_no_rows_cost_nothing():
    routing = Routing(*torch.empty(3, 0, 2))
    assert losses.commitment_loss(routing) == 0
    assert losses.load_balance_loss(routing, 4) == 0


def test_similarity_is_of_all_pairs_of_rows_and_moves_the_student_alone():
    student, teacher = torch.randn(5, 4, requires_grad=True), torch.randn(5, 7, requires_grad=True)
    loss = losses.similarity_loss(student, teacher)
    pairs = [(student[i] @ student[j] - teacher[i] @ teacher[j]) ** 2 for i in range(5) for j in range(5)]
    torch.testing.assert_close(loss, torch.stack(pairs).mean())
    loss.backward()
    assert student.grad.abs().sum() > 0
    assert teacher.grad is None


def test_self_similarity():
    memory = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    loss = losses.self_similarity_loss(memory)
    pairs = [F.cosine_similarity(a, b, dim=0) for a in memory for b in memory]
    torch.testing.assert_close(loss, torch.stack(pairs).mean())
    # Gradient on one side only: half of that of the symmetric expression.
    (one_side,) = torch.autograd.grad(loss, memory)
    (both_sides,) = torch.autograd.grad(torch.stack(pairs).mean(), memory)
    torch.testing.assert_close(one_side, both_sides / 2)
    # The layer moves its memory at the next forward and on eval(), which may come before the backward pass.
    loss = losses.self_similarity_loss(memory)
    memory.detach().zero_()
    assert torch.equal(torch.autograd.grad(loss, memory)[0], one_side)


def test_load_balance(routed):
    _, x, routing = routed
    load = torch.stack([(routing.gates * (routing.experts == e)).sum() for e in range(5)])
    loss = losses.load_balance_loss(routing, 5)
    torch.testing.assert_close(loss, load.var(unbiased=True) / load.mean() ** 2)
    torch.testing.assert_close(losses.expert_load(routing, 5), load)
    assert torch.autograd.grad(loss, x)[0].abs().sum() > 0


def test_balanced_load_costs_nothing():
    experts = torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2]], dtype=torch.int32)
    routing = Routing(torch.full((4, 2), 0.5), experts, torch.ones(4, 2))
    assert losses.load_balance_loss(routing, 4) == 0
    single = Routing(torch.ones(4, 1), torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1))
    assert losses.load_balance_loss(single, 1) == 0


def test_embedding_loss_sums_layers_and_skips_zero_weights(routed):
    layer, _, routing = routed
    weights = {"commitment_weight": 0.3, "self_similarity_weight": 0.2, "load_balance_weight": 0.1}
    one = (
        0.3 * losses.commitment_loss(routing)
        + 0.2 * losses.self_similarity_loss(layer.memory)
        + 0.1 * losses.load_balance_loss(routing, 5)
    )
    torch.testing.assert_close(losses.embedding_loss([routing] * 2, [layer.memory] * 2, **weights), 2 * one)
    assert losses.embedding_loss([routing], [layer.memory], **dict.fromkeys(weights, 0.0)) == 0.0
