"""CoHOp's label histograms, compared with a plain search from every node on a graph with directed edges."""

import pytest
import torch

from rbm.config import CoHOpConfig, Config
from rbm.datasets.encodings import label_propagation
from rbm.datasets.encodings.grown import GrownGraph
from rbm.datasets.splits import split_graph
from rbm.distillation.methods import cohop
from rbm.distillation.methods.cohop import histogram_encodings, histograms_on, label_histograms


def plain_histograms(edge_index, labels, nodes, classes, radius, hops) -> torch.Tensor:
    """A breadth-first search along the edges from each of the labelled ``nodes``."""
    histograms = torch.zeros(len(labels), classes, dtype=torch.float64)
    for source in nodes:
        reached, frontier = {source}, {source}
        for distance in range(hops + 1):
            for node in frontier:
                histograms[node, labels[source]] += radius**distance
            frontier = {v for u, v in edge_index.T.tolist() if u in frontier} - reached
            reached |= frontier
    return (histograms / (histograms.sum(1, keepdim=True) + 1e-6)).float()


@pytest.mark.parametrize("hops", [1, 2, 10])
@pytest.mark.parametrize("radius", [0.4, 1.0])
def test_equals_a_search_from_every_label(directed_graph, hops, radius):
    graph = directed_graph
    config = CoHOpConfig(smoothing_radius=radius, hops=hops, histogram="exact")
    rows = label_histograms(graph.edge_index, graph.y, graph.train_mask, 4, config)
    nodes = graph.train_mask.nonzero().flatten().tolist()
    torch.testing.assert_close(rows, plain_histograms(graph.edge_index, graph.y, nodes, 4, radius, hops))
    assert rows.dtype == torch.float32


def test_by_hand():
    """A chain 0 -> 1 -> 2 -> 3 and an isolated node 4; nodes 0 and 4 are labelled."""
    edges = torch.tensor([[0, 1, 2, 4], [1, 2, 3, 4]])
    labels, train = torch.tensor([1, -1, 7, 0, 0]), torch.tensor([True, False, False, False, True])

    def rows(edges, **options):
        return label_histograms(edges, labels, train, 2, CoHOpConfig(smoothing_radius=0.5, **options))

    expected = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    torch.testing.assert_close(rows(edges, hops=2), expected, atol=1e-5, rtol=0)
    shortcut = torch.cat([edges, torch.tensor([[4], [2]])], dim=1)
    torch.testing.assert_close(rows(shortcut)[2], torch.tensor([0.5, 0.25]) / 0.75, atol=1e-5, rtol=0)
    backwards = rows(edges.flip(0))
    assert backwards[1:4].sum() == 0, "labels flow from row 0 to row 1"


def test_large_graphs_take_powers_of_the_random_walk(directed_graph, monkeypatch):
    graph = directed_graph
    arguments = (graph.edge_index, graph.y, graph.train_mask, 4)
    exact, walks = (label_histograms(*arguments, CoHOpConfig(histogram=name)) for name in ("exact", "propagation"))
    torch.testing.assert_close(walks, label_propagation(*arguments, decay=0.4, hops=9))
    for hops, expected in ((3, 2), (2, 1), (1, 1)):
        short = CoHOpConfig(histogram="propagation", smoothing_radius=0.7, hops=hops)
        found = label_histograms(*arguments, short)
        torch.testing.assert_close(found, label_propagation(*arguments, decay=0.7, hops=expected))
    assert not torch.allclose(exact, walks, atol=1e-2)
    for limit, expected in ((10 * 40, exact), (10 * 40 - 1, walks)):  # training nodes x nodes
        monkeypatch.setattr(cohop, "_EXACT_ENTRIES", limit)
        assert torch.equal(label_histograms(*arguments, CoHOpConfig()), expected)


def test_unseen_nodes_see_the_full_graph_and_the_observed_training_labels(directed_graph):
    split = split_graph(directed_graph, "inductive", unseen_fraction=0.4)
    config = CoHOpConfig(histogram="exact")
    observed, full = histogram_encodings(split, 4, config)
    seen, nodes = split.observed, split.observed_nodes
    train = seen.train_mask.nonzero().flatten()
    alone = plain_histograms(seen.edge_index, seen.y, train.tolist(), 4, 0.4, 10)
    everyone = plain_histograms(directed_graph.edge_index, directed_graph.y, nodes[train].tolist(), 4, 0.4, 10)
    torch.testing.assert_close(observed, alone)
    torch.testing.assert_close(full[nodes], alone)
    torch.testing.assert_close(full[split.unseen_nodes], everyone[split.unseen_nodes])
    assert full[split.unseen_nodes].sum() > 1
    assert not torch.allclose(everyone[nodes], alone), "unseen nodes open further ways, which training did not have"


def test_observed_and_unseen_nodes_have_histograms_of_one_kind(directed_graph, monkeypatch):
    """The table of distances is smaller for the observed nodes than for all nodes."""
    split = split_graph(directed_graph, "inductive", unseen_fraction=0.4)
    labelled = int(split.observed.train_mask.sum())
    monkeypatch.setattr(cohop, "_EXACT_ENTRIES", labelled * split.observed.num_nodes)
    found, expected = (histogram_encodings(split, 4, CoHOpConfig(histogram=name)) for name in ("auto", "propagation"))
    assert torch.equal(found.observed, expected.observed)
    assert torch.equal(found.full, expected.full)


def test_a_grown_graph_has_histograms_of_the_kind_of_training(directed_graph, monkeypatch):
    """The table of distances of the grown graph is larger than that of the graph of the training."""
    smaller = directed_graph.subgraph(torch.arange(35))
    directed_graph.train_mask[35:] = False
    split = split_graph(directed_graph)
    monkeypatch.setattr(cohop, "_EXACT_ENTRIES", int(smaller.train_mask.sum()) * 35)
    grown = GrownGraph(Config(), split_graph(smaller), split, torch.arange(35), 4, torch.empty(35, 4))
    assert torch.equal(histograms_on(grown), histogram_encodings(split, 4, CoHOpConfig(histogram="exact")).full)
