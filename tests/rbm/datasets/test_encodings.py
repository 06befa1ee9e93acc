"""Random walks, DeepWalk, label propagation, and encodings of unseen nodes."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from rbm.datasets.encodings import deepwalk, label_propagation, random_walks, transfer

NODES, CLASSES = 30, 4
# Node 0 ends walks; there are also an edge that occurs three times, a self-loop, and an isolated node 5.
DIRECTED = torch.tensor([[1, 2, 2, 3, 3, 3, 4, 4], [2, 3, 0, 1, 1, 1, 4, 3]])


def random_edges(seed: int = 0, count: int = 120) -> torch.Tensor:
    """Directed, with duplicate edges and self-loops; nodes 28 and 29 are isolated."""
    edges = torch.randint(NODES - 2, (2, count), generator=torch.Generator().manual_seed(seed))
    return torch.cat([edges, edges[:, :10], torch.arange(3).expand(2, -1)], dim=1)


def cliques(size: int = 12) -> torch.Tensor:
    """Two cliques joined by one edge."""
    one = torch.combinations(torch.arange(size)).t()
    edges = torch.cat([one, one + size, torch.tensor([[0], [size]])], dim=1)
    return torch.cat([edges, edges.flip(0)], dim=1)


class TestRandomWalks:
    def test_walks_follow_edges_and_end_only_at_dead_ends(self):
        walks = random_walks(DIRECTED, 6, walk_length=8, walks_per_node=50, seed=1)
        assert walks.shape == (300, 8)
        assert walks.dtype == np.int32
        edges = set(zip(*DIRECTED.tolist(), strict=True))
        seen = set()
        for walk in walks.tolist():
            path = [node for node in walk if node >= 0]
            assert walk == path + [-1] * (8 - len(path))
            steps = set(itertools.pairwise(path))
            seen |= steps
            assert edges.issuperset(steps)
            assert len(path) == 8 or path[-1] in (0, 5)
        assert seen == edges

    def test_each_pass_visits_every_node_in_an_order_of_its_own(self):
        walks = random_walks(random_edges(), NODES, walk_length=3, walks_per_node=4)
        passes = walks[:, 0].reshape(4, NODES)
        assert (np.sort(passes) == np.arange(NODES)).all()
        assert len({tuple(order) for order in passes.tolist()}) == 4

    def test_neighbors_are_drawn_uniformly_and_duplicates_count(self):
        """Chi-square over 6 targets, one of them duplicated: 5 degrees of freedom; 20.5 is exceeded once in 1,000."""
        targets = torch.tensor([1, 2, 3, 4, 5, 6, 6])
        walks = random_walks(torch.stack([torch.zeros(7).long(), targets]), 7, walk_length=2, walks_per_node=14_000)
        drawn = walks[walks[:, 0] == 0, 1]
        expected = 14_000 / 7 * np.array([1, 1, 1, 1, 1, 2])
        found = np.bincount(drawn, minlength=7)[1:]
        assert ((found - expected) ** 2 / expected).sum() < 20.5

    @pytest.mark.parametrize("edges", [torch.empty(2, 0).long(), torch.arange(4).expand(2, -1)])
    def test_without_other_nodes_walks_stay(self, edges):
        walks = random_walks(edges, 4, walk_length=5, walks_per_node=2)
        assert ((walks == walks[:, :1]) | (walks < 0)).all()
        assert (walks >= 0).sum() == (40 if edges.numel() else 8)

    def test_seeds(self):
        one, same, other = (random_walks(random_edges(), NODES, seed=seed) for seed in (3, 3, 4))
        assert (one == same).all()
        assert (one != other).any()

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"walk_length": 1}, ValueError, "walk_length: got 1, expected 2 to 10000 nodes"),
            ({"walk_length": 10_001}, ValueError, "walk_length: got 10001"),
            ({"walks_per_node": 0}, ValueError, "walks_per_node: got 0, expected at least 1"),
            ({"edge_index": DIRECTED.float()}, TypeError, r"edge_index: got torch.float32.*use edge_index.long\(\)"),
            ({"edge_index": DIRECTED.t()}, ValueError, r"edge_index: got shape \[8, 2\], expected \[2, edges\]"),
            ({"num_nodes": 4}, ValueError, "edge_index: got node ids from 0 to 4, expected 0 to 3; renumber"),
        ],
    )
    def test_bad_arguments(self, arguments, error, message):
        with pytest.raises(error, match=message):
            random_walks(**{"edge_index": DIRECTED, "num_nodes": 6, **arguments})


class TestDeepWalk:
    @pytest.fixture(autouse=True, params=["gensim", "without gensim"])
    def trainer(self, request, monkeypatch):
        if request.param == "gensim":
            pytest.importorskip("gensim")
        else:
            monkeypatch.setitem(sys.modules, "gensim", None)
        return request.param

    def test_neighbors_come_closer_than_strangers(self):
        positions = deepwalk(cliques(), 24, dim=16, walk_length=40, walks_per_node=40, epochs=3)
        unit = torch.nn.functional.normalize(positions)
        cosines = unit @ unit.t()
        own = torch.arange(24) // 12
        inside = (own[:, None] == own) & ~torch.eye(24, dtype=torch.bool)
        # Without the two ends of the bridge, which are in between.
        inner = torch.tensor([i for i in range(24) if i not in (0, 12)])
        inside, cosines = inside[inner][:, inner], cosines[inner][:, inner]
        across = (own[:, None] != own)[inner][:, inner]
        assert cosines[inside].min() > cosines[across].max() + 0.1

    def test_nodes_that_meet_nobody_get_zeros(self):
        """Node 5 is isolated, and node 6 has only a self-loop. Node 0 has no outgoing edge, but walks lead to it."""
        edges = torch.cat([DIRECTED, torch.tensor([[6], [6]])], dim=1)
        positions = deepwalk(edges, 7, dim=8, walk_length=6)
        assert positions.shape == (7, 8)
        assert positions.dtype == torch.float32
        assert (positions[[5, 6]] == 0).all()
        assert (positions[:5] != 0).any(dim=1).all()

    @pytest.mark.parametrize("edges", [torch.empty(2, 0).long(), torch.arange(3).expand(2, -1)])
    def test_without_edges_between_nodes_all_are_zero(self, edges):
        assert torch.equal(deepwalk(edges, 3, dim=4), torch.zeros(3, 4))

    def test_the_seed_is_also_that_of_skip_gram(self, monkeypatch):
        walks = random_walks(random_edges(), NODES, walk_length=6)
        monkeypatch.setattr(sys.modules[deepwalk.__module__], "random_walks", lambda *_, **__: walks)
        first, again, other = (deepwalk(random_edges(), NODES, dim=4, seed=seed) for seed in (0, 0, 1))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_every_setting_has_an_effect(self):
        def positions(**other):
            settings = {"dim": 4, "walk_length": 10, "seed": 0, **other}
            return deepwalk(random_edges(), NODES, **settings)

        base = positions()
        assert torch.equal(positions(), base)
        for other in (
            {"seed": 1},
            {"window_size": 1},
            {"epochs": 2},
            {"negative": 0},
            {"negative": 9},
            {"hierarchical_softmax": False},
            {"walks_per_node": 6},
        ):
            assert not torch.equal(positions(**other), base), other

    def test_the_same_bits_in_every_process(self, trainer):
        hide = "import sys; sys.modules['gensim'] = None;" if trainer == "without gensim" else ""
        code = hide + (
            "import torch; from rbm.datasets.encodings import deepwalk;"
            "edges = torch.stack([torch.arange(60) % 20, torch.arange(60) * 7 % 20]);"
            "print(deepwalk(edges, 20, dim=4, walk_length=6).numpy().tobytes().hex())"
        )
        printed = [
            subprocess.run(
                [sys.executable, "-c", code],
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
                check=True,
            )
            for seed in ("1", "2")
        ]
        assert len(printed[0].stdout) == 20 * 4 * 8 + 1
        assert set(printed[0].stdout.strip()) != {"0"}
        assert printed[0].stdout == printed[1].stdout

    @pytest.mark.parametrize("workers", [1, 2])
    def test_an_error_of_its_reader_ends_it(self, workers):
        """Gensim reads walks in a thread of its own, in which an exception would be lost."""
        calls = []

        def advance(more):
            calls.append(more)
            raise TimeoutError("no time left")

        with pytest.raises(TimeoutError, match="no time left"):
            deepwalk(cliques(), 24, walks_per_node=200, walk_length=5, epochs=3, workers=workers, advance=advance)
        assert len(calls) == 1, "later epochs read nothing either"

    def test_a_node_that_occurs_once_has_a_position(self):
        """Node 0 has no incoming edge, and one walk begins there."""
        positions = deepwalk(torch.tensor([[0, 1, 2], [1, 2, 1]]), 3, dim=4, walk_length=3, walks_per_node=1)
        assert (positions != 0).any(dim=1).all()

    def test_all_walks_are_read_in_each_epoch(self):
        """More walks than one chunk holds; a walk without another node, such as that from node 0, is not read."""
        around = torch.arange(1, 1100)
        read = []
        deepwalk(torch.stack([around, around.roll(1)]), 1100, dim=2, walk_length=3, epochs=2, advance=read.append)
        assert sum(read) == 2 * 5 * 1099

    def test_several_workers_train_as_well(self):
        positions = deepwalk(random_edges(), NODES, dim=4, workers=2)
        assert (positions[:28] != 0).any(dim=1).sum() >= 25
        assert torch.isfinite(positions).all()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"dim": 0}, "dim: got 0, expected at least 1"),
            ({"workers": 0}, "workers: got 0"),
            ({"negative": -1}, "negative: got -1, expected at least 0"),
            ({"negative": 0, "hierarchical_softmax": False}, "negative: got 0 without hierarchical_softmax"),
        ],
    )
    def test_bad_arguments(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            deepwalk(DIRECTED, 6, **arguments)


def test_gensim_has_the_constants_of_the_released_code(monkeypatch, caplog):
    models = pytest.importorskip("gensim.models")
    given, word2vec = {}, models.Word2Vec

    def record(**arguments):
        given.update(arguments)
        return word2vec(**arguments)

    monkeypatch.setattr(models, "Word2Vec", record)
    deepwalk(cliques(), 24, dim=2, walk_length=3)
    assert {name: given[name] for name in ("sg", "alpha", "sample")} == {"sg": 1, "alpha": 0.025, "sample": 1e-3}
    assert not caplog.text, "two losses at once are no mistake of the user"
    word2vec([["a", "b"]], hs=1, negative=5, min_count=1)
    assert "probably a mistake" in caplog.text, "it is for others"


def dense_label_propagation(edges, labels, train, decay, hops, exclude_self, self_loops):
    """SPEC 1.13 by matrices, float64."""
    adjacency = torch.zeros(NODES, NODES).double()
    for source, target in edges.t().tolist():
        adjacency[target, source] += 1
    adjacency = adjacency + torch.eye(NODES) if self_loops else adjacency * (1 - torch.eye(NODES))
    step = decay * adjacency / adjacency.sum(1, keepdim=True).clamp(min=1)
    carried = torch.linalg.matrix_power(torch.eye(NODES) + step, hops - 1) @ step
    if exclude_self:
        carried.fill_diagonal_(0)
    onehot = torch.zeros(NODES, CLASSES).double()
    onehot[train, labels[train]] = 1
    spread = carried @ onehot
    return spread / (spread.sum(1, keepdim=True) + 1e-6)


def labelled(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(CLASSES, (NODES,), generator=generator), torch.rand(NODES, generator=generator) < 0.4


class TestLabelPropagation:
    @pytest.mark.parametrize("self_loops", [False, True])
    @pytest.mark.parametrize("exclude_self", [False, True])
    @pytest.mark.parametrize(("decay", "hops"), [(0.1, 10), (0.7, 3), (0.5, 1)])
    def test_equals_the_dense_matrices(self, decay, hops, exclude_self, self_loops):
        (labels, train), edges = labelled(), random_edges()
        options = {"decay": decay, "hops": hops, "exclude_self": exclude_self, "self_loops": self_loops}
        found = label_propagation(edges, labels, train, CLASSES, **options)
        expected = dense_label_propagation(edges, labels, train, **options)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=2e-7, atol=1e-12)

    def test_chunks_of_columns_add_up(self, monkeypatch):
        (labels, train), edges = labelled(), random_edges()
        whole = label_propagation(edges, labels, train, CLASSES, exclude_self=True)
        module = sys.modules["rbm.datasets.encodings.label_propagation"]
        monkeypatch.setattr(module, "_COLUMN_NUMBERS", 5 * NODES)
        torch.testing.assert_close(label_propagation(edges, labels, train, CLASSES, exclude_self=True), whole)

    @pytest.mark.parametrize("self_loops", [False, True])
    def test_excluded_labels_do_not_come_back(self, self_loops):
        """A training node's row is bitwise independent of its own label; without the option, it is not."""
        (labels, train), edges = labelled(), random_edges()
        edges = torch.cat([edges, edges.flip(0)], dim=1)
        options = {"decay": 0.9, "self_loops": self_loops}
        excluded = label_propagation(edges, labels, train, CLASSES, exclude_self=True, **options)
        included = label_propagation(edges, labels, train, CLASSES, **options)
        for node in (train & (torch.arange(NODES) < 28)).nonzero().flatten().tolist():
            other = labels.clone()
            other[node] = (labels[node] + 1) % CLASSES
            changed = label_propagation(edges, other, train, CLASSES, exclude_self=True, **options)
            assert torch.equal(changed[node], excluded[node])
            assert not torch.equal(changed, excluded)
            assert not torch.equal(label_propagation(edges, other, train, CLASSES, **options)[node], included[node])

    @pytest.mark.parametrize("exclude_self", [False, True])
    def test_labels_outside_the_mask_are_never_read(self, exclude_self):
        (labels, train), edges = labelled(), random_edges()
        expected = label_propagation(edges, labels, train, CLASSES, exclude_self=exclude_self)
        for wrong in (-1, CLASSES + 100, 0):
            planted = torch.where(train, labels, wrong)
            assert torch.equal(label_propagation(edges, planted, train, CLASSES, exclude_self=exclude_self), expected)

    @pytest.mark.parametrize("exclude_self", [False, True])
    def test_nothing_to_propagate(self, exclude_self):
        labels, train = labelled()
        none = torch.zeros(NODES, CLASSES)
        found = label_propagation(torch.empty(2, 0).long(), labels, train, CLASSES, exclude_self=exclude_self)
        assert torch.equal(found, none)
        found = label_propagation(random_edges(), labels, torch.zeros_like(train), CLASSES, exclude_self=exclude_self)
        assert torch.equal(found, none)

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"decay": 0.0}, ValueError, r"decay: got 0\.0, expected a positive"),
            ({"hops": 0}, ValueError, "hops: got 0, expected at least 1"),
            ({"num_classes": 3}, ValueError, "labels: training nodes have classes from 0 to 3, expected 0 to 2"),
            (
                {"labels": torch.zeros(NODES, 1).long(), "train_mask": torch.zeros(NODES, 1).bool()},
                ValueError,
                r"got shape \[30, 1\]",
            ),
            ({"labels": torch.full((NODES,), -1)}, ValueError, "labels: training nodes have classes from -1 to -1"),
            ({"labels": torch.zeros(NODES)}, TypeError, "labels: got torch.float32, expected torch.int64"),
            ({"train_mask": torch.zeros(3).bool()}, ValueError, r"train_mask: got shape \[3\] with labels"),
            ({"train_mask": torch.arange(NODES)}, TypeError, "train_mask: got torch.int64, expected torch.bool"),
        ],
    )
    def test_bad_arguments(self, arguments, error, message):
        labels, train = labelled()
        given = {"edge_index": random_edges(), "labels": labels, "train_mask": train, "num_classes": CLASSES}
        with pytest.raises(error, match=message):
            label_propagation(**{**given, **arguments})


class TestTransfer:
    @pytest.mark.parametrize("fill", ["observed_mean", "all_mean"])
    @pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 6), (torch.float64, 6), (torch.float32, 600)])
    def test_equals_a_loop(self, fill, dtype, width):
        edges = random_edges()
        edges = torch.cat([edges, torch.tensor([[29, 3], [29, 28]])], dim=1)
        nodes = torch.randperm(NODES - 2)[:15]
        observed = torch.randn(15, width, dtype=dtype)
        full = transfer(observed, nodes, edges, NODES, fill)
        assert (full.dtype, full.shape) == (dtype, (NODES, width))
        rows = dict(zip(nodes.tolist(), observed, strict=True))
        filled = 0
        for node in range(NODES):
            if node in rows:
                assert torch.equal(full[node], rows[node])
                continue
            sources = edges[0, edges[1] == node].tolist()
            given = [rows.get(source, torch.zeros(width, dtype=dtype)) for source in sources]
            if fill == "observed_mean":
                given = [rows[source] for source in sources if source in rows]
            expected = torch.stack(given).mean(0) if given else torch.zeros(width, dtype=dtype)
            torch.testing.assert_close(full[node], expected)
            filled += bool(given) and bool(expected.any())
        assert filled > 5
        assert (full[29] == 0).all()

    def test_the_two_fills_differ_by_what_unseen_neighbors_count(self):
        """Node 2 has edges from 0 (observed), 1 (unseen) and itself: it gets a third of node 0's row, or all of it."""
        edges = torch.tensor([[0, 1, 2], [2, 2, 2]])
        observed = torch.tensor([[3.0, 6.0]])
        for fill, expected in (("observed_mean", [3.0, 6.0]), ("all_mean", [1.0, 2.0])):
            full = transfer(observed, torch.tensor([0]), edges, 3, fill)
            assert full.tolist() == [[3.0, 6.0], [0.0, 0.0], expected]

    def test_all_observed_or_none(self):
        observed = torch.randn(4, 2)
        assert torch.equal(transfer(observed, torch.tensor([3, 1, 0, 2]), DIRECTED[:, :4], 4)[[3, 1, 0, 2]], observed)
        none = transfer(torch.empty(0, 2), torch.empty(0).long(), DIRECTED, 6)
        assert torch.equal(none, torch.zeros(6, 2))

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"fill": "mean"}, ValueError, "fill: got 'mean', expected one of observed_mean, all_mean"),
            ({"observed": torch.zeros(2, 3).long()}, TypeError, r"observed: got torch.int64.*observed.float\(\)"),
            (
                {"observed": torch.zeros(2)},
                ValueError,
                r"observed: got shape \[2\], expected \[observed nodes, width\]",
            ),
            ({"observed_nodes": torch.tensor([1.0, 2.0])}, TypeError, "observed_nodes: got torch.float32"),
            ({"observed_nodes": torch.tensor([1])}, ValueError, r"observed_nodes: got shape \[1\], expected \[2\]"),
            (
                {"observed_nodes": torch.tensor([1, 6])},
                ValueError,
                "observed_nodes: got ids from 1 to 6, expected 0 to 5",
            ),
            (
                {"observed_nodes": torch.tensor([-1, 1])},
                ValueError,
                "observed_nodes: got ids from -1 to 1, expected 0 to 5",
            ),
            ({"observed_nodes": torch.tensor([1, 1])}, ValueError, "observed_nodes: some ids are there twice"),
        ],
    )
    def test_bad_arguments(self, arguments, error, message):
        given = {"observed": torch.zeros(2, 3), "observed_nodes": torch.tensor([0, 1])}
        with pytest.raises(error, match=message):
            transfer(**{**given, "edge_index": DIRECTED, "num_nodes": 6, **arguments})
