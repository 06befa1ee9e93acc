"""All encodings of a split together: the labels that they read and do not read, and the cache."""

from types import SimpleNamespace

import pytest
import torch
from torch_geometric.data import Data

import rbm.datasets.encodings
from rbm.datasets.encodings import deepwalk, encode, label_propagation, transfer
from rbm.datasets.splits import split_graph
from rbm.utils.cache import Cache

NODES, CLASSES = 40, 3
SETTINGS = ("transductive", "inductive")


def settings(**other) -> SimpleNamespace:
    known = {
        "deepwalk": True,
        "label_propagation": False,
        "walk_length": 8,
        "walks_per_node": 2,
        "window_size": 3,
        "epochs": 1,
        "embedding_dim": 4,
        "negative": 5,
        "hierarchical_softmax": True,
        "workers": 1,
        "fill": "observed_mean",
        "propagation_decay": 0.5,
        "propagation_hops": 4,
        "exclude_self": False,
        "self_loops": False,
        "relative_norm": 0.0,
    }
    assert known.keys() >= other.keys()
    return SimpleNamespace(**{**known, **other})


def graph() -> Data:
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(NODES, (2, 90), generator=generator)
    data = Data(
        x=torch.randn(NODES, 3, generator=generator),
        y=torch.randint(CLASSES, (NODES,), generator=generator),
        edge_index=torch.cat([edges, edges.flip(0)], dim=1),
    )
    order = torch.randperm(NODES, generator=generator)
    for name, nodes in (("train_mask", order[:9]), ("val_mask", order[9:18]), ("test_mask", order[18:36])):
        data[name] = torch.zeros(NODES, dtype=torch.bool)
        data[name][nodes] = True
    return data


def split_of(data: Data, setting: str):
    return split_graph(data, setting, unseen_fraction=0.5, seed=1)


def encoded(data: Data, setting: str, config: SimpleNamespace, *, seed: int = 0, cache: Cache | None = None, **other):
    return encode(split_of(data, setting), config, CLASSES, seed=seed, cache=cache or Cache(), **other)


BOTH = settings(label_propagation=True)


@pytest.mark.parametrize("setting", SETTINGS)
def test_shapes_and_order(setting):
    data = graph()
    extra = [torch.randn(NODES, 2), torch.randn(NODES, 1).double()]
    split = split_of(data, setting)
    found = encode(split, BOTH, CLASSES, seed=0, cache=Cache(), extra=extra)
    width = 4 + CLASSES + 3
    assert found.observed.shape == (split.observed_nodes.numel(), width)
    assert found.full.shape == (NODES, width)
    assert found.observed.dtype == found.full.dtype == torch.float32
    assert torch.equal(found.full[split.observed_nodes], found.observed)
    assert torch.equal(found.full[:, -3:], torch.cat(extra, dim=1).float())


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_encodings_as_long_as_features(setting, sparse):
    data = graph()
    lengths = split_of(data, setting).observed.x.norm(dim=1).mean()
    if sparse:
        data.x = data.x.to_sparse_csr()
    extra = [torch.randn(NODES, 2)]
    found = encoded(data, setting, settings(label_propagation=True, relative_norm=0.5), extra=extra)
    raw = encoded(data, setting, BOTH, extra=extra)
    for columns in (slice(0, 4), slice(4, 4 + CLASSES)):
        torch.testing.assert_close(found.observed[:, columns].norm(dim=1).mean(), 0.5 * lengths)
        factor = found.observed[:, columns].norm() / raw.observed[:, columns].norm()
        torch.testing.assert_close(found.full[:, columns], factor * raw.full[:, columns])
    assert torch.equal(found.full[:, -2:], extra[0]), "yours stay as they are"


@pytest.mark.parametrize("setting", SETTINGS)
def test_encodings_of_zeros_stay_zeros_whatever_their_norm(setting):
    data = graph()
    data.edge_index = data.edge_index[:, :0]
    found = encoded(data, setting, settings(label_propagation=True, relative_norm=0.5))
    assert torch.equal(found.full, torch.zeros(NODES, 4 + CLASSES))


def test_given_encodings_lose_their_gradient():
    extra = [torch.ones(NODES, 1, requires_grad=True)]
    assert not encoded(graph(), "inductive", settings(deepwalk=False), extra=extra).full.requires_grad


def test_nothing_asked_for():
    assert encoded(graph(), "inductive", settings(deepwalk=False)) is None


@pytest.mark.parametrize("self_loops", [False, True])
@pytest.mark.parametrize("fill", ["observed_mean", "all_mean"])
def test_inductive_positions_are_walked_on_the_observed_graph_and_transferred(fill, self_loops):
    data = graph()
    split = split_of(data, "inductive")
    found = encoded(data, "inductive", settings(fill=fill, self_loops=self_loops), seed=7)

    def edges_of(part: Data) -> torch.Tensor:
        loops = torch.arange(part.num_nodes).expand(2, -1)
        return torch.cat([part.edge_index, loops], dim=1) if self_loops else part.edge_index

    options = {"dim": 4, "walk_length": 8, "walks_per_node": 2, "window_size": 3, "seed": 7}
    expected = deepwalk(edges_of(split.observed), split.observed.num_nodes, **options)
    assert torch.equal(found.observed, expected)
    assert torch.equal(found.full, transfer(expected, split.observed_nodes, edges_of(data), NODES, fill))
    assert found.full[split.unseen_nodes].any()


def test_inductive_labels_come_from_the_observed_graph_and_for_unseen_nodes_from_the_full_one():
    data = graph()
    split = split_of(data, "inductive")
    found = encoded(data, "inductive", settings(deepwalk=False, label_propagation=True))
    options = {"decay": 0.5, "hops": 4}
    observed = label_propagation(
        split.observed.edge_index, split.observed.y, split.observed.train_mask, CLASSES, **options
    )
    full = label_propagation(data.edge_index, data.y, data.train_mask, CLASSES, **options)
    assert torch.equal(found.observed, observed)
    assert torch.equal(found.full[split.unseen_nodes], full[split.unseen_nodes])
    assert torch.equal(found.full[split.observed_nodes], observed)
    assert not torch.equal(full[split.observed_nodes], observed)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("exclude_self", [False, True])
def test_a_wrong_label_outside_the_training_set_changes_no_bit(setting, exclude_self):
    """For a validation node, an observed and an unseen test node, a node outside all sets, and all of them at once."""
    data = graph()
    config = settings(label_propagation=True, exclude_self=exclude_self)
    expected = encoded(data, setting, config)
    unseen = split_of(data, "inductive").unseen_nodes
    observed_test = data.test_mask.clone()
    observed_test[unseen] = False
    others = ~(data.train_mask | data.val_mask | data.test_mask)
    planted = [mask.nonzero().flatten()[:1] for mask in (data.val_mask, observed_test, others)]
    for nodes in (*planted, unseen[:1], (~data.train_mask).nonzero().flatten()):
        assert nodes.numel()
        wrong = data.clone()
        wrong.y[nodes] = (wrong.y[nodes] + 1) % CLASSES
        found = encoded(wrong, setting, config)
        assert torch.equal(found.observed, expected.observed)
        assert torch.equal(found.full, expected.full)
    wrong = data.clone()
    wrong.y[data.train_mask.nonzero()[0]] += 1
    wrong.y %= CLASSES
    assert not torch.equal(encoded(wrong, setting, config).full, expected.full)


def test_observed_rows_do_not_know_unseen_nodes():
    """They depend neither on features nor on edges of unseen nodes; rows of unseen nodes depend on the edges."""
    data = graph()
    expected = encoded(data, "inductive", BOTH)
    other = data.clone()
    unseen = split_of(data, "inductive").unseen_nodes
    other.x[unseen] += 5
    other.edge_index = torch.cat(
        [torch.stack([torch.arange(NODES), unseen[torch.arange(NODES) % unseen.numel()]]), data.edge_index], dim=1
    )
    found = encoded(other, "inductive", BOTH)
    assert torch.equal(found.observed, expected.observed)
    assert not torch.equal(found.full[unseen], expected.full[unseen])


class Counted:
    def __init__(self, function) -> None:
        self.function, self.runs = function, 0

    def __call__(self, *args, **kwargs):
        self.runs += 1
        return self.function(*args, **kwargs)


@pytest.fixture
def counted(monkeypatch) -> dict[str, Counted]:
    found = {name: Counted(getattr(rbm.datasets.encodings, name)) for name in ("deepwalk", "label_propagation")}
    for name, function in found.items():
        monkeypatch.setattr(rbm.datasets.encodings, name, function)
    return found


@pytest.mark.parametrize("setting", SETTINGS)
def test_known_encodings_are_not_computed_again(setting, counted, tmp_path):
    data = graph()
    first = encoded(data, setting, BOTH, cache=Cache(tmp_path))
    runs = {name: function.runs for name, function in counted.items()}
    assert runs == {"deepwalk": 1, "label_propagation": 1 if setting == "transductive" else 2}
    second = encoded(data, setting, BOTH, cache=Cache(tmp_path))
    assert {name: function.runs for name, function in counted.items()} == runs
    assert torch.equal(first.observed, second.observed)
    assert torch.equal(first.full, second.full)
    # A label that is not read does not cause a new computation either.
    wrong = data.clone()
    wrong.y[~data.train_mask] = 0
    encoded(wrong, setting, BOTH, cache=Cache(tmp_path))
    assert {name: function.runs for name, function in counted.items()} == runs
    # A label that is read does.
    wrong.y[data.train_mask] = (data.y[data.train_mask] + 1) % CLASSES
    encoded(wrong, setting, BOTH, cache=Cache(tmp_path))
    assert {name: function.runs // runs[name] for name, function in counted.items()} == {
        "deepwalk": 1,
        "label_propagation": 2,
    }


@pytest.mark.parametrize("deepwalk", [False, True])
def test_the_cache_tells_graphs_apart(deepwalk, tmp_path):
    """Graphs with the same labels and other edges, and with the same edges and other nodes."""
    config = settings(deepwalk=deepwalk, label_propagation=not deepwalk)
    data, cache = graph(), Cache(tmp_path)
    turned, longer = data.clone(), data.clone()
    turned.edge_index = (data.edge_index + 1) % NODES
    for name in ("x", "y", "train_mask", "val_mask", "test_mask"):
        longer[name] = torch.cat([data[name], torch.zeros_like(data[name][:1])])
    for each in (data, turned, longer):
        found = encoded(each, "transductive", config, cache=cache)
        assert torch.equal(found.full, encoded(each, "transductive", config).full)


def test_positions_of_another_gensim_are_made_anew(counted, tmp_path, monkeypatch):
    for version in ("4.4.0", "4.5.0", "4.5.0", ""):
        monkeypatch.setattr("rbm.datasets.encodings.gensim_version", lambda version=version: version)
        encoded(graph(), "transductive", settings(), cache=Cache(tmp_path))
    assert counted["deepwalk"].runs == 3


def test_seeds_share_transductive_positions_and_have_inductive_ones_of_their_own(counted, tmp_path):
    data = graph()
    for setting, runs in (("transductive", 1), ("inductive", 3)):
        found = [encoded(data, setting, settings(), seed=seed, cache=Cache(tmp_path)) for seed in (3, 4)]
        assert torch.equal(found[0].full, found[1].full) == (setting == "transductive")
        assert counted["deepwalk"].runs == runs


@pytest.mark.parametrize(
    "other",
    [
        {"deepwalk": False, "self_loops": True},  # self-loops of label propagation
        {"walk_length": 9},
        {"walks_per_node": 3},
        {"window_size": 2},
        {"epochs": 2},
        {"embedding_dim": 5},
        {"negative": 4},
        {"hierarchical_softmax": False},
        {"self_loops": True},
        {"propagation_decay": 0.4},
        {"propagation_hops": 3},
        {"exclude_self": True},
    ],
)
def test_every_setting_reaches_its_encoding(other, tmp_path):
    data, cache = graph(), Cache(tmp_path)
    known = settings(label_propagation=True, deepwalk=other.get("deepwalk", True))
    expected = encoded(data, "inductive", known, cache=cache)
    found = encoded(data, "inductive", settings(label_propagation=True, **other), cache=cache)
    assert found.full.shape != expected.full.shape or not torch.equal(found.full, expected.full)


def test_a_training_label_out_of_range_is_an_error():
    data = graph()
    data.y[data.train_mask.nonzero()[0]] = -1
    with pytest.raises(ValueError, match="labels: training nodes have classes from -1"):
        encoded(data, "inductive", BOTH)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (torch.zeros(NODES, 2).long(), TypeError, r"encodings\[1\]: got a torch.strided tensor of torch.int64"),
        ([1.0], TypeError, r"encodings\[1\]: got list, expected a dense floating tensor"),
        (torch.zeros(NODES), ValueError, r"encodings\[1\]: got shape \[40\], expected \[40, width\]"),
        (torch.zeros(NODES - 1, 2), ValueError, r"encodings\[1\]: got shape \[39, 2\], expected \[40, width\]"),
        (torch.full((NODES, 1), torch.nan), ValueError, r"encodings\[1\]: holds NaN or infinity"),
    ],
)
def test_bad_extra_encodings(given, error, message):
    with pytest.raises(error, match=message):
        encoded(graph(), "inductive", settings(deepwalk=False), extra=[torch.zeros(NODES, 1), given])
