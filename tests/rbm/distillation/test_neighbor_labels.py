"""Soft labels of neighbours are used on homophilous graphs and omitted on heterophilous ones."""

import pytest
import torch
from block_graphs import block_graph

import rbm
from rbm.config import Config
from rbm.config.presets import preset_config
from rbm.datasets.homophily import edge_homophily
from rbm.datasets.splits import split_graph
from rbm.distillation.neighbor_labels import uses_neighbor_labels

QUICK = Config().updated(
    {
        "teacher": {"hidden_channels": 16, "max_epochs": 30, "lr": 0.02},
        "mlp": {"max_epochs": 30},
        "rbm": {"hidden_channels": 16, "num_experts": 4, "top_k": 2},
        "encoding": {"deepwalk": False},
    }
)


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
@pytest.mark.parametrize(("homophily", "used"), [(0.1, False), (0.24, False), (0.45, False), (0.6, True), (0.9, True)])
def test_a_heterophilous_graph_leaves_them_out(homophily, used, setting):
    split = split_graph(block_graph(homophily, degree=60), setting)
    assert uses_neighbor_labels(split, Config()) == used
    for asked in (True, False):
        assert uses_neighbor_labels(split, Config().updated({"distill": {"neighbors": asked}})) == asked


def test_a_large_class_with_random_edges_leaves_them_out():
    data = block_graph(0.9, degree=60)
    assert uses_neighbor_labels(split_graph(data), Config())
    data.y = torch.where(torch.rand(data.num_nodes) < 0.75, 0, data.y)  # over three quarters of the nodes
    data.edge_index = torch.randint(data.num_nodes, data.edge_index.shape)
    assert not uses_neighbor_labels(split_graph(data), Config())


def test_test_labels_have_no_say():
    data = block_graph(0.1)
    data.y = torch.where(data.test_mask, 0, data.y)  # counting all labels, half of the edges would be within a class
    assert not uses_neighbor_labels(split_graph(data), Config())
    data = block_graph(0.9)
    data.y = torch.where(data.test_mask, torch.randint_like(data.y, 3), data.y)
    everything = edge_homophily(data.edge_index, data.y, torch.ones_like(data.test_mask))
    assert not everything.follows_classes
    assert uses_neighbor_labels(split_graph(data), Config())


def test_without_edges_there_is_nothing_to_leave_out():
    data = block_graph(0.1)
    data.edge_index = torch.empty(2, 0, dtype=torch.int64)
    assert uses_neighbor_labels(split_graph(data), Config())


def test_a_run_does_what_was_chosen_and_says_so():
    data = block_graph(0.1, nodes=300)
    run = {"methods": ["mlp"], "measure_latency": False}
    result = rbm.distill(data, config=QUICK, **run)
    without = rbm.distill(data, config=QUICK.updated({"distill": {"neighbors": False}}), **run)
    with_them = rbm.distill(data, config=QUICK.updated({"distill": {"neighbors": True}}), **run)
    states = [each.student.state_dict() for each in (result, without, with_them)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])
    assert result.config.distill.neighbors == "auto"
    assert [each.summary["verdict"]["neighbors"] for each in (result, without, with_them)] == [False, False, True]
    assert result.verdict[0].endswith("; students do not learn the soft labels of neighbours (distill.neighbors).")
    assert "distill.neighbors=false" not in result.verdict[1]
    assert "neighbours" not in with_them.verdict[0]


@pytest.mark.parametrize("preset", ["clean", "paper", "official"])
def test_the_graphs_of_the_paper_keep_them(preset):
    assert preset_config(preset, "cora").distill.neighbors is True
    assert preset_config("clean", "digits").distill.neighbors is True
    assert preset_config("clean", "mine.npz").distill.neighbors == "auto"


@pytest.mark.parametrize("value", ["yes", 2, None])
def test_another_value(value):
    with pytest.raises(ValueError, match=r"distill\.neighbors is .*, expected true, false or auto"):
        Config().updated({"distill": {"neighbors": value}})
