"""Splits by class, and what the inductive setting hides."""

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from rbm.config import Config
from rbm.datasets.splits import halved, per_class_masks, split_for, split_graph, without_test_set

NODES = 40


def graph(seed: int = 0) -> Data:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(NODES, generator=generator)
    data = Data(
        x=torch.randn(NODES, 3, generator=generator),
        y=torch.randint(4, (NODES,), generator=generator),
        edge_index=torch.randint(NODES, (2, 200), generator=generator),
        edge_weight=torch.rand(200, generator=generator),
    )
    for name, nodes in (("train_mask", order[:6]), ("val_mask", order[6:12]), ("test_mask", order[12:33])):
        data[name] = torch.zeros(NODES, dtype=torch.bool)
        data[name][nodes] = True
    data.num_classes = 4
    return data


def ids(mask: torch.Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


def test_transductive_hides_nothing():
    data = graph()
    split = split_graph(data)
    assert split.setting == "transductive"
    assert split.graph is data
    assert split.observed is data
    assert split.observed_nodes.tolist() == list(range(NODES))
    assert (split.unseen_nodes.dtype, split.unseen_nodes.numel()) == (torch.int64, 0)
    assert split.of_observed(data.y) is data.y


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("fraction", [0.2, 0.5, 1.0])
def test_inductive_hides_the_permuted_test_nodes(seed, fraction):
    data = graph()
    split = split_graph(data, "inductive", unseen_fraction=fraction, seed=seed)
    test = data.test_mask.nonzero().flatten()
    torch.manual_seed(seed)
    expected = test[torch.randperm(21)[: int(fraction * 21)]]
    assert split.unseen_nodes.tolist() == sorted(expected.tolist())

    observed_test = sorted(set(test.tolist()) - set(expected.tolist()))
    other = ids(~(data.train_mask | data.val_mask | data.test_mask))
    assert split.observed_nodes.tolist() == ids(data.train_mask) + ids(data.val_mask) + observed_test + other
    assert torch.equal(split.of_observed(data.y), split.observed.y)


def test_observed_graph_is_the_full_graph_without_the_unseen_nodes():
    data = graph()
    split = split_graph(data, "inductive", unseen_fraction=0.5)
    observed, nodes = split.observed, split.observed_nodes
    unseen = set(split.unseen_nodes.tolist())
    kept = [
        (source, target, weight)
        for (source, target), weight in zip(data.edge_index.t().tolist(), data.edge_weight.tolist(), strict=True)
        if source not in unseen and target not in unseen
    ]
    assert len(kept) < data.num_edges
    mapped = nodes[observed.edge_index].t().tolist()
    assert [(*edge, weight) for edge, weight in zip(mapped, observed.edge_weight.tolist(), strict=True)] == kept
    for key in ("x", "y", "train_mask", "val_mask", "test_mask"):
        assert torch.equal(observed[key], data[key][nodes]), key
    assert observed.num_classes == 4
    assert observed.num_nodes == NODES - len(unseen)
    assert int(observed.test_mask.sum()) == 21 - len(unseen)


def test_sparse_features_are_those_of_the_same_nodes():
    data = graph()
    split = split_graph(data, "inductive", unseen_fraction=0.5)
    data.x = data.x.to_sparse_csr()
    sparse = split_graph(data, "inductive", unseen_fraction=0.5)
    assert sparse.observed.x.layout == torch.sparse_csr
    assert torch.equal(sparse.observed.x.to_dense(), split.observed.x)


def test_planetoid_fraction_leaves_no_observed_test_node():
    split = split_graph(graph(), "inductive", unseen_fraction=1.0)
    assert not split.observed.test_mask.any()
    assert split.unseen_nodes.numel() == 21


def test_splitting_leaves_graph_and_global_generator_alone():
    data = graph()
    before = {key: value.clone() for key, value in data.to_dict().items() if torch.is_tensor(value)}
    torch.manual_seed(123)
    state = torch.get_rng_state()
    split_graph(data, "inductive")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(data[key], value) for key, value in before.items())


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_hyperparameters_are_chosen_without_the_test_set(setting):
    data = graph()
    chosen_on = without_test_set(data, setting, unseen_fraction=0.5, seed=3)
    other = data.clone()
    other.y[data.test_mask] = 3 - other.y[data.test_mask]
    again = without_test_set(other, setting, unseen_fraction=0.5, seed=3)
    assert all(torch.equal(chosen_on[key], again[key]) for key in ("x", "y", "edge_index", "test_mask"))
    hidden = int(0.5 * int(data.test_mask.sum())) if setting == "inductive" else 0
    assert chosen_on.num_nodes == NODES - hidden
    assert int((chosen_on.y == -1).sum()) == int(data.test_mask.sum()) - hidden
    count = int(data.val_mask.sum())
    assert (int(chosen_on.test_mask.sum()), int(chosen_on.val_mask.sum())) == (count // 2, count - count // 2)
    assert not (chosen_on.test_mask & (chosen_on.val_mask | chosen_on.train_mask)).any()
    assert chosen_on.num_classes == data.num_classes
    assert int(data.test_mask.sum()) == 21, "the graph that was given is as it was"


def test_the_two_halves_of_the_validation_nodes():
    data = graph()
    data.val_mask[ids(data.train_mask)[0]], data.train_mask[ids(data.train_mask)[0]] = True, False  # 7 nodes
    one, other = halved(data, 4, seed=2), halved(data, 4, seed=2, other=True)
    assert (len(ids(one.test_mask)), len(ids(other.test_mask))) == (3, 4)
    assert torch.equal(one.test_mask | other.test_mask, data.val_mask)
    assert torch.equal(one.val_mask, other.test_mask)
    drawn = torch.randperm(7, generator=torch.Generator().manual_seed(2))[:3]
    assert torch.equal(one.test_mask.nonzero().flatten(), data.val_mask.nonzero().flatten()[drawn].sort().values)
    data.val_mask = torch.arange(NODES) == 3
    with pytest.raises(ValueError, match=r"data\.val_mask: 1 node is marked, expected at least 2"):
        halved(data, 4, seed=2)


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_the_split_of_a_run_has_its_seed_and_what_it_evaluates_on(setting):
    data, config = graph(), Config().updated({"setting": setting, "seed": 3})
    chosen = without_test_set(data, setting, unseen_fraction=0.5, seed=3)
    for evaluate_on, expected in (
        ("test", split_graph(data, setting, unseen_fraction=0.5, seed=3)),
        ("validation", split_graph(chosen, setting, seed=3)),  # all of its test nodes are unseen
    ):
        found = split_for(config.updated({"evaluate_on": evaluate_on}), data, unseen_fraction=0.5)
        assert torch.equal(found.observed_nodes, expected.observed_nodes)
        assert torch.equal(found.unseen_nodes, expected.unseen_nodes)
        for name in ("x", "y", "edge_index", "train_mask", "val_mask", "test_mask"):
            assert torch.equal(found.graph[name], expected.graph[name]), name
            assert torch.equal(found.observed[name], expected.observed[name]), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"setting": "inductve"}, "setting: got 'inductve', expected one of transductive, inductive"),
        ({"setting": "inductive", "unseen_fraction": 0.0}, r"^unseen_fraction is 0\.0, expected a number in \(0, 1\]"),
        ({"setting": "inductive", "unseen_fraction": 1.5}, r"^unseen_fraction is 1\.5"),
        ({"setting": "inductive", "unseen_fraction": 0.01}, "hides no node at all"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        split_graph(graph(), **arguments)


def test_a_share_of_the_graph_is_checked_too():
    """A tensor is taken there: a Data may hold its numbers so."""
    data = graph()
    data.unseen_fraction = torch.tensor(0.5)
    assert len(split_graph(data, "inductive").unseen_nodes) == int(data.test_mask.sum()) // 2
    for share, kind in (("a", TypeError), (torch.tensor(1.5), ValueError)):
        data.unseen_fraction = share
        with pytest.raises(kind, match=r"^data\.unseen_fraction is ('a'|1\.5), expected a number"):
            split_graph(data, "inductive")


@pytest.mark.parametrize("split_rng", ["pcg64", "mt19937"])
def test_per_class_masks_follow_the_published_algorithm(split_rng):
    labels = torch.tensor([2, 0, 1, 0, 2, 2] * 30)
    rng = np.random.default_rng(4) if split_rng == "pcg64" else np.random.RandomState(4)
    train, val = [], []
    for c in (0, 1, 2):
        train += rng.choice([i for i in range(180) if labels[i] == c], 5, replace=False).tolist()
    for c in (0, 1, 2):
        val += rng.choice([i for i in range(180) if labels[i] == c and i not in train], 7, replace=False).tolist()
    masks = per_class_masks(labels, seed=4, train_per_class=5, val_per_class=7, split_rng=split_rng)
    assert all(mask.dtype == torch.bool for mask in masks)
    assert ids(masks[0]) == sorted(train)
    assert ids(masks[1]) == sorted(val)
    assert ids(masks[2]) == sorted(set(range(180)) - set(train) - set(val))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split_rng": "xorshift"}, "split_rng: got 'xorshift', expected one of pcg64, mt19937"),
        ({"seed": -1}, "seed is -1, expected at least 0"),
        ({}, r"labels: class 1 has 50 nodes, expected more than 50"),
    ],
)
def test_bad_per_class_splits(arguments, message):
    labels = torch.tensor([0] * 80 + [1] * 50)
    with pytest.raises(ValueError, match=message):
        per_class_masks(labels, **arguments)


@pytest.mark.parametrize("split_rng", ["pcg64", "mt19937"])
def test_small_classes_share_what_they_have(split_rng):
    sizes = [80, 51, 50, 19, 11, 3, 2, 1]
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    labels = labels[torch.randperm(labels.numel())]
    masks = per_class_masks(labels, seed=3, split_rng=split_rng, small_classes="share")
    found = [tuple(labels[mask].bincount(minlength=len(sizes))[c].item() for mask in masks) for c in range(len(sizes))]
    expected = [(20, 30, 30), (20, 30, 1), (19, 30, 1), (7, 11, 1), (4, 6, 1), (1, 1, 1), (1, 0, 1), (1, 0, 0)]
    assert found == expected
    assert bool((sum(mask.long() for mask in masks) == 1).all()), "each node in one set"


@pytest.mark.parametrize("split_rng", ["pcg64", "mt19937"])
def test_sharing_changes_nothing_where_all_classes_are_large(split_rng):
    labels = torch.arange(300) % 4
    shared = per_class_masks(labels, seed=5, split_rng=split_rng, small_classes="share")
    assert all(map(torch.equal, shared, per_class_masks(labels, seed=5, split_rng=split_rng)))


@pytest.mark.parametrize("small_classes", ["error", "share"])
def test_unlabelled_nodes_are_in_no_set(small_classes):
    labels = torch.arange(240) % 3
    labels[torch.randperm(240)[:40]] = -1
    masks = per_class_masks(labels, small_classes=small_classes)
    assert torch.equal(torch.stack(masks).any(dim=0), labels >= 0)
    assert labels[masks[0]].bincount().tolist() == [20, 20, 20]


def test_class_numbers_without_nodes_have_no_share():
    labels = torch.tensor([0] * 6 + [4] * 6)
    masks = per_class_masks(labels, small_classes="share")
    assert [labels[mask].bincount(minlength=5).tolist() for mask in masks] == [
        [2, 0, 0, 0, 2],
        [3, 0, 0, 0, 3],
        [1, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize("small_classes", ["error", "share"])
def test_no_label_at_all(small_classes):
    for labels in (torch.full((9,), -1), torch.empty(0, dtype=torch.int64)):
        with pytest.raises(ValueError, match="labels: no node has one"):
            per_class_masks(labels, small_classes=small_classes)


def test_unknown_rule_for_small_classes():
    with pytest.raises(ValueError, match="small_classes: got 'drop', expected error or share"):
        per_class_masks(torch.zeros(60, dtype=torch.int64), small_classes="drop")


def test_lists_of_names_are_split_like_tensors():
    data = graph()
    data.titles, data.kinds = list(range(data.num_nodes)), list(range(data.num_edges))
    split = split_graph(data, "inductive")
    assert split.observed.titles == split.observed_nodes.tolist()
    ends = split.observed_nodes[split.observed.edge_index]
    assert torch.equal(data.edge_index[:, split.observed.kinds], ends)


def test_attributes_whose_edges_or_nodes_are_not_in_the_first_dimension():
    """PyG's rule: the last dimension of an attribute with "index" in its name, the first one of any other."""
    data, nodes, edges = graph(), torch.arange(NODES), torch.arange(200)
    data.edge_label_index = torch.stack([edges, edges + 1000])
    data.place_index = torch.stack([nodes, nodes, nodes])
    data.tags, data.overlap = np.arange(NODES).reshape(NODES, 1), torch.eye(NODES).to_sparse()
    data.landmarks_index, data.weight = torch.arange(7).expand(2, -1), torch.arange(5)  # of neither nodes nor edges
    split = split_graph(data, "inductive", unseen_fraction=0.5)
    observed, kept = split.observed, split.observed_nodes
    assert torch.equal(kept[observed.edge_index], data.edge_index[:, observed.edge_label_index[0]])
    assert torch.equal(observed.edge_label_index[1], observed.edge_label_index[0] + 1000)
    assert torch.equal(observed.place_index, kept.expand(3, -1))
    assert torch.equal(torch.from_numpy(observed.tags)[:, 0], kept)
    assert torch.equal(observed.overlap.to_dense(), torch.eye(NODES)[kept])
    assert observed.landmarks_index is data.landmarks_index
    assert observed.weight is data.weight
