"""NOSMOG's loss: that of the target, the same on adversarial inputs, and similarity to the teacher's rows."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rbm.config import NOSMOGConfig
from rbm.datasets.encodings import Encodings
from rbm.datasets.splits import split_graph
from rbm.distillation.methods.nosmog import NOSMOGTrainer
from rbm.nn.students import MLPStudent
from rbm.teachers.outputs import outputs_from_module

EPS = 0.05


class Marking(nn.Module):
    """A teacher whose hidden rows identify their nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = nn.Linear(6, 4)

    def forward(self, x, edge_index):
        return self.answers(x)

    def embed(self, x, edge_index):
        return torch.stack([x[:, 0].sin(), x[:, 0].cos()], dim=1)


@pytest.fixture
def marked(directed_graph):
    """A graph in which the first feature of a node is its id."""
    directed_graph.x[:, 0] = torch.arange(40.0)
    return directed_graph


@pytest.fixture(params=["transductive", "inductive"])
def trainer(request, marked):
    split = split_graph(marked, request.param, unseen_fraction=0.4)
    positions = torch.randn(40, 3)
    teacher_outputs = outputs_from_module(Marking(), split, 4)

    def make(**options) -> NOSMOGTrainer:
        config = NOSMOGConfig(**{"dropout": 0.0, "adversarial_eps": EPS, "adversarial_steps": 3, **options})
        encodings = Encodings(positions[split.observed_nodes], positions)
        student = MLPStudent(9, 8, 4, num_layers=options.get("num_layers", 3))
        return NOSMOGTrainer(student, split, teacher_outputs, config, encodings)

    return make


def inputs_of(trainer, nodes):
    return trainer.observed_x[nodes]


def test_similarity_is_to_the_teachers_rows_of_the_same_nodes(trainer):
    ours = trainer(similarity_weight=0.7, adversarial_weight=0.0)
    nodes = torch.randperm(ours.split.observed.num_nodes)[:10]
    x = inputs_of(ours, nodes)
    number = ours.split.observed_nodes[nodes].float()
    assert torch.equal(x[:, 0], number)
    first, second, last = ours.model.layers
    hidden = second(first(x).relu())
    shown = ours.projection(hidden).relu()
    taught = torch.stack([number.sin(), number.cos()], dim=1)
    likeness = (shown @ shown.T - taught @ taught.T).square().mean()
    target = ours.soft_loss(last(hidden.relu()), nodes)
    torch.testing.assert_close(ours.batch_loss(nodes, ours.soft_loss), target + 0.7 * likeness)


@pytest.mark.parametrize("target", ["soft_loss", "hard_loss"])
def test_loss_of_disturbed_inputs(trainer, target):
    ours = trainer(similarity_weight=0.0, adversarial_weight=0.3)
    assert ours.projection is None
    target, nodes = getattr(ours, target), torch.arange(10)
    x = inputs_of(ours, nodes)
    torch.manual_seed(3)
    delta = torch.empty(10, 9).uniform_(-EPS, EPS)
    for _ in range(3):
        delta.requires_grad_()
        loss = target(ours.model(x + delta), nodes)
        step = EPS / 4 * torch.autograd.grad(loss, delta)[0].sign()
        delta = (delta + step).detach().clamp(-EPS, EPS)
    plain, harder = target(ours.model(x), nodes), target(ours.model(x + delta), nodes)
    assert harder > plain
    expected = torch.autograd.grad(plain + 0.3 * harder, list(ours.model.parameters()))

    torch.manual_seed(3)
    seen = []
    hook = ours.model.register_forward_pre_hook(lambda _, rows: seen.append(rows[0].detach()))
    loss = ours.batch_loss(nodes, target)
    hook.remove()
    torch.testing.assert_close(loss, plain + 0.3 * harder)
    loss.backward()
    for parameter, gradient in zip(ours.model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    moved = (seen[-1] - x).abs()
    assert moved[:, :6].max() > 0.9 * EPS, "features"
    assert moved[:, 6:].max() > 0.9 * EPS, "and positions"
    assert moved.max() < 1.001 * EPS


def test_both_passes_have_this_loss_and_the_projection_learns(trainer):
    ours = trainer(label_weight=0.5, batch_size=5, similarity_weight=1.0)
    before = ours.projection.weight.detach().clone()
    targets = []
    batch_loss = ours.batch_loss
    ours.batch_loss = lambda nodes, target: targets.append(target.__name__) or batch_loss(nodes, target)
    ours.train_epoch(0)
    observed = ours.split.observed.num_nodes
    assert targets == ["hard_loss"] * (10 // 5) + ["soft_loss"] * (observed // 5)
    assert not torch.equal(ours.projection.weight, before)
    other = trainer(similarity_weight=1.0)
    other.restore(ours.state())
    assert torch.equal(other.projection.weight, ours.projection.weight)


def test_dropout_of_the_projection_is_for_training_alone(trainer):
    ours = trainer(similarity_weight=1.0, adversarial_weight=0.0, dropout=0.5)
    nodes = torch.arange(10)
    assert ours.batch_loss(nodes, ours.soft_loss) != ours.batch_loss(nodes, ours.soft_loss)
    ours.model.eval()
    assert ours.batch_loss(nodes, ours.soft_loss) == ours.batch_loss(nodes, ours.soft_loss)


def test_sparse_features_give_the_loss_of_dense_ones(marked):
    marked.x = F.dropout(marked.x, 0.7)
    positions = torch.randn(40, 3)
    encodings = Encodings(positions, positions)
    teacher_outputs = outputs_from_module(Marking(), split_graph(marked), 4)
    sparse = marked.clone()
    sparse.x = marked.x.to_sparse_csr()

    def loss_on(graph):
        torch.manual_seed(0)
        model = MLPStudent(9, 8, 4)
        ours = NOSMOGTrainer(model, split_graph(graph), teacher_outputs, NOSMOGConfig(dropout=0.0), encodings)
        return ours.batch_loss(torch.arange(5, 25), ours.soft_loss)

    torch.testing.assert_close(loss_on(sparse), loss_on(marked))


def test_a_student_of_one_layer_shows_its_answers(trainer):
    """It has no hidden layer, so the trace contains its outputs."""
    ours = trainer(num_layers=1, similarity_weight=1.0)
    assert ours.batch_loss(torch.arange(10), ours.soft_loss).isfinite()
