"""Epochs that skip computations on which neither loss nor accuracies depend: the same training as without skipping."""

import pytest
import torch

from rbm.config import Config
from rbm.datasets.splits import split_graph
from rbm.nn.dropout import dropout
from rbm.nn.sparse_rows import as_rows
from rbm.teachers import build_teacher
from rbm.teachers.labelled import LabelledNodes, nonzero_columns, submatrix
from rbm.teachers.training import build_teacher_trainer
from rbm.training.loop import train_epoch

EPOCHS = 4


def trainer_of(graph, settings, setting="transductive"):
    """The trainer of a float64 teacher on a graph with 6 features and few labelled nodes."""
    graph.x = graph.x.double()
    graph.train_mask &= torch.arange(graph.num_nodes) % 4 == 0
    config = Config().updated({"teacher": settings})
    torch.manual_seed(0)
    network = config.teacher
    teacher = build_teacher(
        network.name,
        graph.num_features,
        3,
        hidden_channels=network.hidden_channels,
        num_layers=network.num_layers,
        dropout=network.dropout,
        norm=network.norm,
    ).double()
    return build_teacher_trainer(teacher, split_graph(graph, setting, unseen_fraction=0.4), config)


def course(trainer) -> list[torch.Tensor]:
    """Losses, logits after each epoch, and the parameters at the end."""
    found = []
    for epoch in range(EPOCHS):
        found += [torch.tensor(train_epoch("teacher", trainer, epoch)), *trainer.logits()]
    return [*found, *(parameter.detach() for parameter in trainer.model.parameters())]


@pytest.mark.parametrize("name", ["sage", "gcn"])
@pytest.mark.parametrize(
    "settings",
    [
        {"hidden_channels": 16},
        {"hidden_channels": 4, "norm": "layer"},
        {"hidden_channels": 16, "num_layers": 3, "setting": "inductive"},
        {"hidden_channels": 4, "num_layers": 3, "setting": "inductive"},
        {"hidden_channels": 16, "sparse": True},
        {"hidden_channels": 4, "num_layers": 3, "sparse": True, "setting": "inductive"},
    ],
)
def test_same_training_as_with_all_rows(small_graph, monkeypatch, name, settings):
    settings = {"name": name, "dropout": 0.4} | settings
    sparse, setting = settings.pop("sparse", False), settings.pop("setting", "transductive")
    if sparse:
        small_graph.x = (small_graph.x * (small_graph.x > 0)).to_sparse_csr()
    found = course(trainer := trainer_of(small_graph.clone(), settings, setting))
    assert trainer.observed, "or this compares a way with itself"
    assert len(trainer.observed.reached[-1]) < len(trainer.observed.reached[0]) < small_graph.num_nodes
    monkeypatch.setattr(LabelledNodes, "serves", lambda *_: False)
    expected = course(trainer := trainer_of(small_graph.clone(), settings, setting))
    assert not trainer.observed
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_an_epoch_has_one_first_product(small_graph, monkeypatch):
    trainer = trainer_of(small_graph, {"hidden_channels": 16})
    conv, products = trainer.model.convs[0], []
    monkeypatch.setattr(type(conv), "transform", lambda conv, x: products.append(len(x)) or conv.lin_l(x))
    course(trainer)
    # One more before the first epoch; none for the second layer, which projects its rows first.
    assert products == [small_graph.num_nodes] * (EPOCHS + 1)


def test_weights_that_moved_between_evaluation_and_step(small_graph):
    trainer = trainer_of(small_graph, {"hidden_channels": 16, "dropout": 0.0})
    trainer.model.eval()
    trainer.logits()
    trainer.model.load_state_dict({name: 2 * value for name, value in trainer.model.state_dict().items()})
    plain = trainer.model(trainer.observed_x, trainer.observed_edges)
    torch.testing.assert_close(trainer.logits()[0], plain)
    torch.testing.assert_close(trainer.observed.logits(), plain[small_graph.train_mask])


@pytest.mark.parametrize(("name", "norm"), [("sage", "batch"), ("gcn", "batch"), ("gat", "none"), ("mlp", "none")])
def test_other_teachers_see_all_rows(small_graph, name, norm):
    trainer = trainer_of(small_graph, {"name": name, "norm": norm})
    assert trainer.observed is None
    course(trainer)


def test_rows_and_columns_of_a_matrix():
    generator = torch.Generator().manual_seed(0)
    dense = torch.rand(9, 9, generator=generator) * (torch.rand(9, 9, generator=generator) < 0.3)
    dense[4] = 0
    matrix, rows = dense.to_sparse_csr(), torch.tensor([1, 4, 8])
    columns = nonzero_columns(matrix, rows)
    assert columns.tolist() == dense[rows].any(0).nonzero().flatten().tolist()
    assert torch.equal(submatrix(matrix, rows, columns).to_dense(), dense[rows][:, columns])
    nothing = torch.empty(0, dtype=torch.int64)
    assert submatrix(matrix, nothing, nonzero_columns(matrix, nothing)).shape == (0, 0)


@pytest.mark.parametrize("width", [3, 4])
def test_rows_get_the_mask_that_they_have_among_all(width):
    rows, x = torch.tensor([0, 2, 5, 6]), torch.randn(7, width)
    masked = []
    for part in (x, x[rows]):
        torch.manual_seed(3)
        masked.append(dropout(part, 0.5, rows=None if part is x else rows, count=7))
        masked.append(torch.rand(1))
    assert torch.equal(masked[0][rows], masked[2])
    assert torch.equal(masked[1], masked[3]), "as many numbers are drawn"


def test_features_stay_where_they_are(small_graph):
    """Sparse rows are not converted to dense."""
    small_graph.x = (small_graph.x * (small_graph.x > 0)).to_sparse_csr()
    trainer = trainer_of(small_graph, {"hidden_channels": 16})
    assert trainer.observed.aggregated is None
    assert type(trainer.observed.rows) is type(as_rows(small_graph.x))
