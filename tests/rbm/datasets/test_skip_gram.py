"""Skip-gram without gensim: its steps against restatements, and its vectors against gensim's."""

import sys

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid, normalize

from rbm.datasets.encodings import deepwalk, random_walks
from rbm.datasets.load import load_dataset

module = sys.modules["rbm.datasets.encodings.skip_gram"]
SETTINGS = module.SkipGram(dim=8, window_size=3, epochs=1, negative=2, hierarchical_softmax=True, seed=0)


def ring(size: int) -> torch.Tensor:
    around = torch.arange(size)
    edges = torch.stack([around, around.roll(1)])
    return torch.cat([edges, edges.flip(0)], dim=1)


def test_a_step_descends_the_logistic_losses():
    """Contexts and targets that occur several times get the sum of their gradients; pairs without a step get none."""
    generator = torch.Generator().manual_seed(0)
    inputs, weights = torch.randn(5, 4, generator=generator), torch.randn(6, 4, generator=generator)
    contexts, targets = torch.tensor([[0, 1, 1], [4, 0, 2]]).int(), torch.tensor([[5, 5, 2, 0], [2, 1, 5, 3]]).int()
    labels = torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 0]])
    steps = 0.1 * (torch.rand(2, 3, 4, generator=generator) < 0.7)
    x, w = inputs.clone().requires_grad_(), weights.clone().requires_grad_()
    loss = sum(
        -steps[g, c, p] * logsigmoid((2 * labels[g, p] - 1) * (x[contexts[g, c]] @ w[targets[g, p]]))
        for g in range(2)
        for c in range(3)
        for p in range(4)
    )
    loss.backward()
    module._descend(inputs, weights, contexts, targets, labels, steps)
    torch.testing.assert_close(inputs, (x - x.grad).detach())
    torch.testing.assert_close(weights, (w - w.grad).detach())


def test_frequent_words_have_short_paths():
    """Counts 8, 4, 2, 1, 1 have paths of 1, 2, 3, 4 and 4 nodes; no two words have the same branches."""
    paths, branches = module._huffman(np.array([2, 8, 1, 4, 1]))
    assert (paths >= 0).sum(axis=1).tolist() == [3, 1, 4, 2, 4]
    assert paths.max() == 3
    codes = set()
    for path, taken in zip(paths.tolist(), branches.tolist(), strict=True):
        depth = sum(node >= 0 for node in path)
        assert path[depth - 1] == 3, "the last inner node is the root"
        codes.add(tuple(taken[:depth][::-1]))
    assert all(a == b or a != b[: len(a)] for a in codes for b in codes), "no code begins another"
    assert len(codes) == 5


@pytest.mark.parametrize("window_size", [1, 2, 5])
def test_contexts_are_the_places_within_reach(window_size):
    """Against loops over places. A place's reach is not known here: its contexts are all those up to the farthest."""
    generator = np.random.default_rng(0)
    chunk = generator.permutation(60).reshape(6, 10)
    chunk[generator.random(chunk.shape) < 0.2] = -1
    centers, contexts = module._places(chunk, window_size, generator)
    found = {center: {word for word in row if word >= 0} for center, row in zip(centers, contexts, strict=True)}
    assert contexts.shape == (len(found), 2 * window_size)
    reaches = set()
    for walk in chunk:
        words = [word for word in walk if word >= 0]
        for place, center in enumerate(words):
            near = [{*words[max(0, place - r) : place], *words[place + 1 : place + r + 1]} for r in range(7)]
            reach = near.index(found[center])
            assert 1 <= reach <= window_size
            reaches.add(reach)
    assert len(reaches) == window_size
    assert (chunk >= 0).sum() == len(found)


def test_negative_samples_are_drawn_by_frequency():
    """As powers of 0.75 of the counts: chi-square, 2 degrees of freedom; 13.8 is exceeded once in 1,000."""
    counts = np.array([1, 16, 81])
    outputs = module._Outputs(counts, 3, False, np.random.default_rng(0))
    targets, labels = outputs.of(np.zeros(20_000, np.int32))
    assert (targets[:, 0] == 0).all()
    assert (labels == [1, 0, 0, 0]).all()
    drawn = np.bincount(targets[:, 1:].ravel() + 1, minlength=4)
    assert drawn[1] == 0, "the center itself is no negative sample"
    expected = 60_000 * np.array([1, 8, 27]) / 36
    assert (((drawn[[0, 2, 3]] - expected) ** 2) / expected).sum() < 13.8


def test_the_same_bits_with_more_threads():
    walks = random_walks(ring(40), 40, walk_length=9)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(module.skip_gram(walks, np.bincount(walks.ravel()), SETTINGS))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert (found[0] == found[1]).all()


def test_a_walk_longer_than_a_chunk(monkeypatch):
    walks = random_walks(ring(40), 40, walk_length=30, walks_per_node=1)
    monkeypatch.setattr(module, "_CHUNK", 7)
    read = []
    positions = module.skip_gram(walks, np.bincount(walks.ravel()), SETTINGS._replace(epochs=2, advance=read.append))
    assert read == [1] * 80
    assert np.isfinite(positions).all()


def test_says_the_same_of_a_graph_as_gensim(monkeypatch):
    """Of each digit's 10 nearest by gensim's vectors, as many are among the 10 nearest by ours as by another seed's."""
    pytest.importorskip("gensim")
    graph = load_dataset("digits")
    nodes = graph.num_nodes

    def nearest(positions: torch.Tensor) -> torch.Tensor:
        unit = normalize(positions)
        cosines = (unit @ unit.t()).fill_diagonal_(-1)
        return torch.zeros(nodes, nodes).scatter_(1, cosines.topk(10).indices, 1.0)

    gensim, again = (deepwalk(graph.edge_index, nodes, walks_per_node=2, seed=seed) for seed in (0, 1))
    monkeypatch.setitem(sys.modules, "gensim", None)
    ours = deepwalk(graph.edge_index, nodes, walks_per_node=2, seed=2)
    assert 0.85 < ours.norm(dim=1).mean() / gensim.norm(dim=1).mean() < 1.15
    shared, expected = ((nearest(gensim) * nearest(other)).sum() / (10 * nodes) for other in (ours, again))
    assert shared > 0.95 * expected
