"""One aggregated target per node gives the loss of all its pairs."""

import pytest
import torch
from torch.nn import functional as F

from rbm.config import DistillConfig
from rbm.config.presets import preset_config
from rbm.distillation.soft_targets import Neighborhood, Pairs, SoftTargets, list_pairs, weigh_pairs
from rbm.nn import losses

NODES, CLASSES = 30, 5


@pytest.fixture
def graph() -> Neighborhood:
    """Directed, with self-loops, duplicates and nodes without incoming edges."""
    edges = torch.randint(0, NODES - 3, (2, 120))
    return Neighborhood(torch.cat([edges, edges[:, :10], torch.tensor([[4, 29], [4, 29]])], dim=1), NODES)


@pytest.fixture
def answers() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of student and teacher; some teacher logits exclude classes."""
    student, teacher = torch.randn(2, NODES, CLASSES, dtype=torch.float64)
    teacher[3, :4] = -1e4
    return student, teacher


def plain_loss(pairs, student, teacher, temperature, mode) -> torch.Tensor:
    """Pair by pair, as the paper writes it."""
    total = torch.zeros((), dtype=torch.float64)
    for v, u, weight in pairs:
        if mode == "softmax":
            p, q = (F.softmax(logits / temperature, dim=-1) for logits in (teacher[u], student[v]))
            total = total + weight * torch.where(p > 0, p * (p / q).log(), 0.0).sum()
        else:
            p, q = (F.log_softmax(logits, dim=-1) / temperature for logits in (teacher[u], student[v]))
            total = total + weight * (p.exp() * (p - q)).nan_to_num().sum()
    return total


def test_neighbors_are_sources_without_self_loops():
    graph = Neighborhood(torch.tensor([[0, 2, 1, 2, 2], [1, 1, 1, 0, 1]]), 4)
    assert graph.sources.tolist() == [2, 0, 2, 2]
    assert graph.crow.tolist() == [0, 1, 4, 4, 4]
    assert graph.sums(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [1.0, 9.0, 0.0, 0.0]


def test_sums_of_later_nodes_do_not_lose_digits_to_earlier_ones():
    graph = Neighborhood(torch.tensor([[1, 0, 0], [0, 1, 2]]), 3)
    weights = torch.tensor([1e8, 0.3, 0.7])
    torch.testing.assert_close(graph.sums(weights), weights)


@pytest.mark.parametrize("mode", losses.TEMPERATURE_MODES)
@pytest.mark.parametrize("mean", ["nodes", "pairs"])
@pytest.mark.parametrize("draw", ["expectation", "sample"])
def test_node_wise_equals_pair_wise(graph, answers, mean, draw, mode):
    student, teacher = answers
    trust = torch.rand(NODES, dtype=torch.float64)
    trust[::7] = 0.0
    pairs = weigh_pairs(graph, trust, mean=mean, draw=draw)
    logs = losses.log_probabilities(teacher, 0.7, mode)
    targets = SoftTargets.of(pairs, graph, logs)
    rows, sources, weights = list_pairs(pairs, graph)
    expected = plain_loss(zip(rows.tolist(), sources.tolist(), weights.tolist(), strict=True), *answers, 0.7, mode)

    leaf = student.clone().requires_grad_()
    loss = targets.loss(leaf, None, 0.7, mode)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    by_pairs = student.clone().requires_grad_()
    pair_loss = losses.pair_loss(by_pairs[rows], logs[sources], weights, 0.7, mode)
    torch.testing.assert_close(pair_loss, expected, rtol=1e-12, atol=1e-12)
    gradients = (torch.autograd.grad(value, at)[0] for value, at in ((loss, leaf), (pair_loss, by_pairs)))
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)

    parts = [targets.loss(student[nodes], nodes, 0.7, mode) for nodes in torch.randperm(NODES).split(7)]
    torch.testing.assert_close(sum(parts), expected, rtol=1e-12, atol=1e-12)


def test_weights_of_the_papers_means(graph):
    trust = 1e-6 * torch.rand(NODES, dtype=torch.float64)  # only ratios count
    trust[graph.sources[graph.crow[5] : graph.crow[6]]] = 0.0
    pairs = weigh_pairs(graph, trust, mean="nodes", draw="expectation")
    assert pairs.own == 1 / NODES
    reached = graph.sums(trust[graph.sources]) > 0
    torch.testing.assert_close(graph.sums(pairs.neighbors), reached.double() / NODES)
    assert not reached[5], "a node whose neighbours all have odds zero learns from itself alone"
    odds = pairs.neighbors[graph.crow[1] : graph.crow[2]]
    torch.testing.assert_close(
        odds / odds.sum(), F.normalize(trust[graph.sources[graph.crow[1] : graph.crow[2]]], 1, 0)
    )


def test_weights_of_the_released_mean(graph):
    trust = torch.rand(NODES)
    pairs = weigh_pairs(graph, trust, mean="pairs", draw="sample")
    kept = pairs.neighbors.count_nonzero()
    assert 0 < kept < len(graph)
    assert pairs.own == pytest.approx(1 / (NODES + kept.item()))
    assert pairs.neighbors.unique().tolist() == pytest.approx([0.0, pairs.own])


@pytest.mark.parametrize("mean", ["nodes", "pairs"])
def test_draws_average_to_the_expectation(graph, mean):
    trust = 0.2 + 0.8 * torch.rand(NODES, dtype=torch.float64)
    draws = [weigh_pairs(graph, trust, mean=mean, draw="sample").neighbors for _ in range(4000)]
    assert not torch.equal(draws[0], draws[1]), "drawn anew each time"
    expected = weigh_pairs(graph, trust, mean=mean, draw="expectation").neighbors
    spread = 1 / NODES / 4000**0.5  # each draw is between zero and 1 / NODES
    torch.testing.assert_close(torch.stack(draws).mean(0), expected, rtol=0.05, atol=5 * spread)
    if mean == "nodes":
        assert (torch.stack(draws) > 0).double().sum(1).unique().numel() == 1, (
            "one neighbour for each node that has any"
        )


@pytest.mark.parametrize("point", [0.0, 1.0])
def test_a_draw_at_an_end_of_a_nodes_odds_is_one_of_its_neighbors(graph, point, monkeypatch):
    """Rounding may move a point to the end, where the odds of the next node begin."""
    trust = torch.rand(NODES, dtype=torch.float64)
    trust[::3] = 0.0
    monkeypatch.setattr(torch, "rand", lambda size, **options: torch.full((size,), point, **options))
    drawn = weigh_pairs(graph, trust, mean="nodes", draw="sample").neighbors
    reached = graph.sums(trust[graph.sources]) > 0
    torch.testing.assert_close(graph.sums(drawn), reached.double() / NODES)
    if point == 0.0:
        assert (trust[graph.sources[drawn > 0]] > 0).all(), "no node that is not trusted at all"


def test_no_trust_leaves_neighbors_out(graph, answers):
    student, teacher = answers
    pairs = weigh_pairs(graph, None, mean="nodes", draw="expectation")
    loss = SoftTargets.of(pairs, graph, losses.log_probabilities(teacher)).loss(student, None, 1.0, "softmax")
    torch.testing.assert_close(loss, losses.soft_label_loss(student, teacher))


def test_a_graph_without_edges():
    graph = Neighborhood(torch.empty(2, 0, dtype=torch.int64), 4)
    for draw in ("expectation", "sample"):
        pairs = weigh_pairs(graph, torch.ones(4), mean="nodes", draw=draw)
        targets = SoftTargets.of(pairs, graph, losses.log_probabilities(torch.randn(4, 3)))
        torch.testing.assert_close(targets.mass.sum(), torch.tensor(1.0))
    assert list_pairs(Pairs(0.25, torch.empty(0)), graph)[0].tolist() == [0, 1, 2, 3]


def test_defaults_are_the_papers():
    config = DistillConfig()
    assert (config.mean, config.draw, config.forward) == ("nodes", "expectation", "node")
    assert preset_config("clean", "cora").distill.neighbors is True
