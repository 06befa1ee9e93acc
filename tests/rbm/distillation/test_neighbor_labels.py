"""Soft labels of neighbours are learned where they are of a node's own class, and left out where they mislead."""

import pytest
import torch
from block_graphs import block_graph

import rbm
from rbm.config import Config
from rbm.config.presets import preset_config
from rbm.datasets.splits import split_graph
from rbm.distillation.neighbor_labels import choose_neighbor_labels
from rbm.distillation.sentences import verdict_sentences

QUICK = Config().updated(
    {
        "teacher": {"hidden_channels": 16, "max_epochs": 30, "lr": 0.02},
        "mlp": {"max_epochs": 30},
        "rbm": {"hidden_channels": 16, "num_experts": 4, "top_k": 2},
        "encoding": {"deepwalk": False},
    }
)


def right_logits(data, share=1.0):
    """Logits that are right for a share of each class's nodes."""
    generator = torch.Generator().manual_seed(0)
    right = torch.rand(data.num_nodes, generator=generator) < share
    return 6.0 * torch.nn.functional.one_hot(torch.where(right, data.y, (data.y + 1) % 3), 3).float()


def test_a_heterophilous_graph_leaves_them_out_and_a_homophilous_one_does_not():
    for homophily, used, reason in ((0.1, False, "heterophily"), (0.9, True, "homophily")):
        data = block_graph(homophily)
        chosen = choose_neighbor_labels(split_graph(data), right_logits(data, 0.9), Config())
        assert (chosen.used, chosen.reason) == (used, reason)
        assert chosen.change.nodes == int(data.val_mask.sum())


def test_validation_leaves_them_out_where_they_make_targets_worse():
    data = block_graph(0.4, degree=20)
    chosen = choose_neighbor_labels(split_graph(data), right_logits(data), Config())
    assert (chosen.used, chosen.reason) == (True, "homophily"), "a sure teacher outvotes neighbours that disagree"
    data = block_graph(0.4, degree=4)
    split = split_graph(data)
    unsure = 0.1 * right_logits(data)
    chosen = choose_neighbor_labels(split, unsure, Config())
    assert (chosen.used, chosen.reason) == (False, "validation")
    # By hand: a node's own soft label and the mean of its neighbours'.
    soft, wrong = unsure.softmax(-1), 0
    for node in data.val_mask.nonzero().flatten().tolist():
        around = soft[data.edge_index[0, data.edge_index[1] == node]]
        mean = around.mean(0) if len(around) else torch.zeros(3)
        wrong += int((soft[node] + mean).argmax() != data.y[node])
    assert chosen.change.difference == pytest.approx(-wrong / chosen.change.nodes)


@pytest.mark.parametrize("asked", [True, False])
def test_what_is_asked_for_is_done(asked):
    data = block_graph(0.1)
    config = Config().updated({"distill": {"neighbors": asked}})
    chosen = choose_neighbor_labels(split_graph(data), right_logits(data), config)
    assert chosen == (asked, "asked for", None)


def test_in_the_inductive_setting_the_observed_graph_tells():
    data = block_graph(0.1)
    split = split_graph(data, "inductive")
    chosen = choose_neighbor_labels(split, right_logits(data)[split.observed_nodes], Config())
    assert chosen.reason == "heterophily"


def test_test_labels_have_no_say():
    data = block_graph(0.4, degree=4)
    lying = data.clone()
    lying.y = torch.where(data.test_mask, (data.y + 1) % 3, data.y)
    logits = 0.1 * right_logits(data)
    first, second = (choose_neighbor_labels(split_graph(graph), logits, Config()) for graph in (data, lying))
    assert first == second


def test_without_edges_there_is_nothing_to_leave_out():
    data = block_graph(0.1)
    data.edge_index = torch.empty(2, 0, dtype=torch.int64)
    assert choose_neighbor_labels(split_graph(data), right_logits(data), Config()).used


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
    assert result.verdict[0].endswith(
        "; students learn no soft labels of neighbours (--set distill.neighbors=true lets them)."
    )
    assert "distill.neighbors=false" not in result.verdict[1]
    assert "neighbours" not in with_them.verdict[0]


def test_the_sentence_of_validation():
    change = {"difference": -0.031, "low": -0.05, "high": -0.01, "p": 0.01, "nodes": 200}
    found = rbm.distill(block_graph(0.9, nodes=300), config=QUICK, methods=["mlp"], measure_latency=False).summary[
        "verdict"
    ]
    found["neighbors"] = {"used": False, "reason": "validation", "change": change}
    assert "would make 3.1 % of the validation nodes' targets wrong that are right" in verdict_sentences(found)[0]


@pytest.mark.parametrize("preset", ["clean", "paper", "official"])
def test_the_graphs_of_the_paper_keep_them(preset):
    assert preset_config(preset, "cora").distill.neighbors is True
    assert preset_config("clean", "digits").distill.neighbors is True
    assert preset_config("clean", "mine.npz").distill.neighbors == "auto"


@pytest.mark.parametrize("value", ["yes", 2, None])
def test_another_value(value):
    with pytest.raises(ValueError, match=r"distill\.neighbors is .*, expected true, false or auto"):
        Config().updated({"distill": {"neighbors": value}})
