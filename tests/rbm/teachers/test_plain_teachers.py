"""GAT and APPNP compared with PyG's layers, an MLP without edges, and label propagation without training."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from torch_geometric import nn as pyg

import rbm
from rbm.config import Config
from rbm.teachers import APPNP, GAT, MLP, LabelPropagation

QUICK = {"teacher": {"max_epochs": 5}, "mlp": {"max_epochs": 5}, "encoding": {"deepwalk": False}}


def test_gat_equals_pyg(small_graph):
    torch.manual_seed(1)
    teacher = GAT(12, 16, 3, num_layers=3)
    convs = [pyg.GATConv(12, 2, 8), pyg.GATConv(16, 2, 8), pyg.GATConv(16, 3, 1)]
    for ours, theirs in zip(teacher.convs, convs, strict=True):
        theirs.load_state_dict(ours.state_dict())
    h = small_graph.x
    for conv in convs[:-1]:
        hidden = conv(h, small_graph.edge_index)
        h = F.elu(hidden)
    logits = teacher(small_graph.x, small_graph.edge_index)
    torch.testing.assert_close(logits, convs[-1](h, small_graph.edge_index), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(teacher.embed(small_graph.x, small_graph.edge_index), hidden, rtol=1e-4, atol=1e-5)
    logits.square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in teacher.parameters())


@pytest.mark.parametrize(("hidden", "heads"), [(64, 8), (12, 4), (7, 1)])
def test_heads_of_gat_share_the_width(hidden, heads, small_graph):
    teacher = GAT(12, hidden, 4)
    assert [conv.heads for conv in teacher.convs] == [heads, 1]
    assert teacher.embed(small_graph.x, small_graph.edge_index).shape == (60, hidden)


def test_initialisation_of_gat():
    for conv in GAT(100, 64, 4).convs:
        weight = conv.lin.weight.detach()
        bound = (6 / sum(weight.shape)) ** 0.5
        assert 0.95 * bound < float(weight.abs().max()) <= bound, "Glorot's uniform one, as in PyG"


def test_appnp_equals_pyg(small_graph):
    torch.manual_seed(1)
    teacher = APPNP(12, 8, 3, num_layers=3)
    h = small_graph.x
    for linear in teacher.convs[:-1]:
        h = F.linear(h, linear.weight, linear.bias).relu()
    scores = F.linear(h, teacher.convs[-1].weight, teacher.convs[-1].bias)
    expected = pyg.APPNP(K=10, alpha=0.1)(scores, small_graph.edge_index)
    torch.testing.assert_close(teacher(small_graph.x, small_graph.edge_index), expected, rtol=1e-4, atol=1e-5)


def test_mlp_sees_no_edge(small_graph):
    teacher = MLP(12, 8, 3, num_layers=3)
    h = small_graph.x
    for linear in teacher.convs[:-1]:
        h = F.linear(h, linear.weight, linear.bias).relu()
    expected = F.linear(h, teacher.convs[-1].weight, teacher.convs[-1].bias)
    for edges in (small_graph.edge_index, torch.empty(2, 0, dtype=torch.int64)):
        torch.testing.assert_close(teacher(small_graph.x, edges), expected)


def test_label_propagation_equals_pyg(small_graph):
    teacher = LabelPropagation(12, 8, 3)
    known = small_graph.y.masked_fill(~small_graph.train_mask, -1)
    teacher.register_labels([known])
    shares = pyg.LabelPropagation(50, alpha=0.9)(small_graph.y, small_graph.edge_index, small_graph.train_mask)
    soft = teacher(small_graph.x, small_graph.edge_index).softmax(-1)
    torch.testing.assert_close(soft, (shares + 1e-4) / (shares + 1e-4).sum(-1, keepdim=True))
    assert not list(teacher.parameters())
    assert not teacher.state_dict(), "labels belong to the graph"
    stranger = teacher(torch.zeros(5, 12), torch.empty(2, 0, dtype=torch.int64)).softmax(-1)
    torch.testing.assert_close(stranger, torch.full((5, 3), 1 / 3))


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
@pytest.mark.parametrize("teacher", ["gat", "appnp", "mlp", "label_propagation"])
def test_distilled(teacher, setting, small_graph, tmp_path):
    config = replace(Config().updated(QUICK), setting=setting)
    found = rbm.distill(
        small_graph, teacher, config=config, methods=["mlp"], folder=tmp_path / "run", cache=tmp_path / "cache"
    )
    assert found.summary["teacher"]["name"] == teacher
    assert found.teacher_logits.shape == (60, 3)
    again = rbm.distill(small_graph, teacher, config=config, methods=["mlp"], cache=tmp_path / "cache")
    assert again.timings["teacher"]["cached"]
    assert again.summary["teacher"] == found.summary["teacher"]
    assert torch.equal(again.teacher_logits, found.teacher_logits)
    kept = rbm.distill(small_graph, teacher, config=found.config, methods=["mlp"], folder=tmp_path / "run", resume=True)
    assert torch.equal(kept.teacher_logits, found.teacher_logits)


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_label_propagation_knows_training_labels_alone(setting, small_graph):
    config = replace(Config().updated(QUICK), setting=setting)
    planted = small_graph.clone()
    planted.y[~small_graph.train_mask] = (planted.y[~small_graph.train_mask] + 1) % 3
    before, after = (
        rbm.distill(graph, "label_propagation", config=config, methods=["labels"], measure_latency=False)
        for graph in (small_graph, planted)
    )
    assert torch.equal(after.teacher_logits, before.teacher_logits)
    assert before.summary["teacher"]["val_accuracy"] > 0.5 > after.summary["teacher"]["val_accuracy"]
