"""Degenerate graphs through the whole distillation: finite results, or a message that explains why not."""

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import rbm
from rbm.config import Config
from rbm.datasets.splits import per_class_masks
from rbm.distillation.distill import Distillation

NODES, CLASSES, WIDTH = 60, 3, 8
TINY = {
    "teacher": {"hidden_channels": 6, "max_epochs": 4},
    "mlp": {"max_epochs": 3},
    "rbm": {"hidden_channels": 4, "num_experts": 3, "top_k": 2, "max_epochs": 3, "pretrain_epochs": 2},
    "reliability": {"update_start_epoch": 0},
    "encoding": {"walk_length": 6, "walks_per_node": 2, "embedding_dim": 4, "label_propagation": True},
}
# In addition to the defaults, settings that treat edges and nodes differently.
WAYS = {
    "expectation": {},
    "pairs": {
        "distill": {"forward": "pair", "draw": "sample", "mean": "pairs"},
        "encoding": {"fill": "all_mean", "self_loops": True, "exclude_self": True},
    },
    "batches": {"distill": {"batch_size": 59}, "rbm": {"norm": "batch"}},  # the last batch has one row
}


@pytest.fixture
def tiny() -> Config:
    return Config().updated(TINY)


def graph() -> Data:
    """Random, undirected, without self-loops or duplicates."""
    generator = torch.Generator().manual_seed(3)
    edges = torch.randint(NODES, (2, 150), generator=generator)
    edges = edges[:, edges[0] != edges[1]]
    place = torch.arange(NODES)
    return Data(
        x=torch.randn(NODES, WIDTH, generator=generator),
        edge_index=torch.cat([edges, edges.flip(0)], dim=1).unique(dim=1),
        y=place % CLASSES,
        train_mask=place < 18,
        val_mask=(place >= 18) & (place < 30),
        test_mask=place >= 30,
    )


def isolated_nodes(data: Data) -> None:
    """Isolate nodes in each of the sets, and many of the unseen nodes."""
    alone = torch.tensor([0, 1, 20, *range(40, NODES)])
    data.edge_index = data.edge_index[:, ~torch.isin(data.edge_index, alone).any(dim=0)]


def duplicate_edges(data: Data) -> None:
    data.edge_index = torch.cat([data.edge_index, data.edge_index, data.edge_index[:, :50]], dim=1)


def self_loops(data: Data) -> None:
    some = torch.arange(0, NODES, 2)
    data.edge_index = torch.cat([data.edge_index, torch.stack([some, some]), torch.tensor([[4, 4], [4, 4]])], dim=1)


def self_loops_alone(data: Data) -> None:
    data.edge_index = torch.arange(NODES).repeat(2, 1)


def no_edges(data: Data) -> None:
    data.edge_index = torch.empty(2, 0, dtype=torch.int64)


def one_edge(data: Data) -> None:
    data.edge_index = torch.tensor([[0], [59]])


def directed_edges(data: Data) -> None:
    """Direct edges from low to high ids: the first node has no incoming, the last no outgoing edge."""
    data.edge_index = data.edge_index[:, data.edge_index[0] < data.edge_index[1]]


def missing_training_class(data: Data) -> None:
    data.train_mask &= data.y != 2


def one_training_class(data: Data) -> None:
    data.train_mask &= data.y == 1


def one_training_node(data: Data) -> None:
    data.train_mask[1:] = False


def a_class_without_nodes(data: Data) -> None:
    data.num_classes = CLASSES + 2


def unlabelled_nodes(data: Data) -> None:
    data.test_mask[50:] = False
    data.y[50:] = -1


def features_of_zeros(data: Data) -> None:
    data.x[::2] = 0.0


def all_nodes_alike(data: Data) -> None:
    data.x[:] = 0.0
    no_edges(data)


def shared_small_classes(data: Data) -> None:
    """19, 11 and 30 nodes per class: fewer than the 20 and 30 of a drawn split."""
    data.y = torch.arange(CLASSES).repeat_interleave(torch.tensor([19, 11, 30]))
    data.train_mask, data.val_mask, data.test_mask = per_class_masks(data.y, small_classes="share")


FINE = [
    isolated_nodes,
    duplicate_edges,
    self_loops,
    self_loops_alone,
    no_edges,
    one_edge,
    directed_edges,
    missing_training_class,
    one_training_class,
    one_training_node,
    a_class_without_nodes,
    unlabelled_nodes,
    features_of_zeros,
    all_nodes_alike,
    shared_small_classes,
]


def assert_finite(result: Distillation, data: Data) -> None:
    classes = data.get("num_classes") or CLASSES
    answers = [student(result.student_inputs(method)) for method, student in result.students.items()]
    for logits in (result.teacher_logits, *answers):
        assert logits.shape == (NODES, classes)
        assert bool(torch.isfinite(logits).all())
    for found in result.encodings.values():
        assert found is None or bool(torch.isfinite(found.full).all())
    for name in ("teacher", *result.students):
        for accuracy in ("val_accuracy", "test_accuracy", "test_max"):
            assert 0.0 <= result.summary[name][accuracy] <= 1.0, (name, accuracy)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("setting", ["transductive", "inductive"])
@pytest.mark.parametrize("spoil", FINE)
def test_gives_a_finite_result(tiny, spoil, setting, way):
    data = graph()
    spoil(data)
    before = {name: value.clone() for name, value in data.to_dict().items() if torch.is_tensor(value)}
    config = tiny.updated({"setting": setting}).updated(WAYS[way])
    teacher = "gcn" if way == "pairs" else "sage"
    result = rbm.distill(data, teacher, config=config, unseen_fraction=0.4, measure_latency=False)
    assert_finite(result, data)
    assert all(torch.equal(data[name], value) for name, value in before.items()), "the graph is left as it was"


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
@pytest.mark.parametrize("spoil", FINE)
def test_other_methods_give_a_finite_result(tiny, spoil, setting):
    data = graph()
    spoil(data)
    few = {"max_epochs": 2, "hidden_channels": 4}
    small = {"moe": {**few, "pretrain_epochs": 1}, "glnn": {**few, "batch_size": 7}, "nosmog": {**few, "batch_size": 7}}
    small |= {"krd": {**few, "reliability": {"update_start_epoch": 0}}, "cohop": {**few, "rounds": 2}}
    config = tiny.updated({"setting": setting, **small})
    others = ["moe", "ensemble", "glnn", "krd", "nosmog", "cohop"]
    result = rbm.distill(data, config=config, methods=others, unseen_fraction=0.4, measure_latency=False)
    assert_finite(result, data)


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
@pytest.mark.parametrize("spoil", [isolated_nodes, no_edges, features_of_zeros])
def test_sparse_features_give_a_finite_result(tiny, spoil, setting):
    data = graph()
    spoil(data)
    data.x = data.x.clamp_min(0.0).to_sparse_csr()
    config = tiny.updated({"setting": setting})
    assert_finite(rbm.distill(data, config=config, unseen_fraction=0.4, measure_latency=False), data)


@pytest.mark.parametrize("spoil", [isolated_nodes, no_edges])
def test_isolated_nodes_have_no_encoding(tiny, spoil):
    data = graph()
    spoil(data)
    alone = torch.ones(NODES, dtype=torch.bool)
    alone[data.edge_index.unique()] = False
    for setting in ("transductive", "inductive"):
        config = tiny.updated({"setting": setting})
        result = rbm.distill(data, config=config, unseen_fraction=0.4, measure_latency=False)
        assert not result.encodings["rbm"].full[alone].any()


def test_labels_outside_the_masks_change_nothing(tiny):
    known, unknown = graph(), graph()
    known.test_mask[50:] = False
    unlabelled_nodes(unknown)
    results = [rbm.distill(data, config=tiny, measure_latency=False) for data in (known, unknown)]
    assert results[0].summary == results[1].summary


# Faults that stop it before any work


def spoiled(**changes) -> Data:
    data = graph()
    for name, value in changes.items():
        data[name] = value
    return data


NOBODY = torch.zeros(NODES, dtype=torch.bool)
STOPPED = {
    "edge outside": ({"edge_index": torch.tensor([[0, 60], [1, 2]])}, r"data\.edge_index: .*60 -> 2.* from 0 to 59"),
    "no training node": ({"train_mask": NOBODY}, r"data\.train_mask: no node is marked, expected at least one"),
    "unlabelled training node": ({"y": torch.full((NODES,), -1)}, r"data\.y: 60 labels are out of range .* has -1"),
    "wrong number of classes": ({"num_classes": 2}, r"data\.y: 20 labels .* has 2\), expected class numbers .* to 1"),
    "double features": ({"x": graph().x.double()}, r"data\.x: got torch\.float64, expected torch\.float32"),
    "brain features": ({"x": graph().x.bfloat16()}, r"data\.x: got torch\.bfloat16, expected torch\.float32"),
    "learned features": ({"x": graph().x.requires_grad_()}, r"data\.x: requires a gradient.*use data\.x\.detach\(\)"),
}


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
@pytest.mark.parametrize("fault", STOPPED)
def test_stops_before_any_work(tiny, tmp_path, fault, setting):
    changes, message = STOPPED[fault]
    with pytest.raises((TypeError, ValueError), match=message):
        rbm.distill(spoiled(**changes), config=tiny.updated({"setting": setting}), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_no_unseen_node_is_left_to_hide(tiny):
    data = graph()
    shared_small_classes(data)
    assert int(data.test_mask.sum()) == 3
    with pytest.raises(ValueError, match=r"unseen_fraction: 0\.2 of 3 test nodes hides no node at all; mark more test"):
        rbm.distill(data, config=tiny.updated({"setting": "inductive"}))


# A user's graph with classes that are too small for 20 training and 30 validation nodes


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_small_classes_of_a_file(tiny, tmp_path, setting):
    data = graph()
    shared_small_classes(data)
    np.savez(tmp_path / "graph.npz", x=data.x, edge_index=data.edge_index, y=data.y)
    with pytest.raises(
        ValueError, match=r"labels: class 1 has 11 nodes, expected more than 50 .*small_classes='share'"
    ):
        rbm.load_graph(tmp_path / "graph.npz", small_classes="error")
    loaded = rbm.load_dataset(tmp_path / "graph.npz")
    assert torch.equal(loaded.train_mask, data.train_mask)
    assert loaded.y[loaded.train_mask].bincount().tolist() == [7, 4, 11]
    config = tiny.updated({"setting": setting})
    assert_finite(rbm.distill(loaded, config=config, unseen_fraction=0.4, measure_latency=False), data)


def test_classes_of_one_node_leave_nothing_to_validate(tiny, tmp_path):
    y = np.where(np.arange(NODES) < CLASSES, np.arange(NODES), -1)
    np.savez(tmp_path / "graph.npz", x=graph().x, edge_index=graph().edge_index, y=y)
    with pytest.raises(ValueError, match=r"data\.val_mask: no node is marked, expected at least one"):
        rbm.distill(rbm.load_graph(tmp_path / "graph.npz"), config=tiny)
