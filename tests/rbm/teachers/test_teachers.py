"""Teachers compared with PyG's own layers, forward and backward."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.nn import SAGEConv
from torch_geometric.nn import models as pyg_models
from torch_geometric.utils import add_self_loops

from rbm.config import Config
from rbm.datasets import load_dataset
from rbm.datasets.splits import split_graph
from rbm.teachers import GCN, TEACHERS, GraphSAGE, aggregation, build_teacher
from rbm.teachers.prepare import build_configured_teacher
from rbm.teachers.training import build_teacher_trainer
from rbm.utils.repeatable import deterministic

NODES = 30
LEARNING = [name for name in TEACHERS if name != "label_propagation"]
NORMS = ("none", "batch", "layer")


@pytest.fixture
def graph() -> tuple[torch.Tensor, torch.Tensor]:
    """A directed graph with a duplicate edge; nodes 28 and 29 are isolated."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(28, (90,), generator=generator)
    target = (source + torch.randint(1, 28, (90,), generator=generator)) % 28
    edges = torch.stack([source, target])
    return torch.randn(NODES, 12, generator=generator), torch.cat([edges, edges[:, :1]], dim=1)


class PyGSage(nn.Module):
    """The specification in terms of PyG's layer: mean over neighbours and one more self-loop, without root weight."""

    def __init__(self, teacher: GraphSAGE, widths: list[int]) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.convs = nn.ModuleList([SAGEConv(a, b, aggr="mean", root_weight=False) for a, b in pairs])
        self.norms = teacher.norms
        self.convs.load_state_dict(teacher.convs.state_dict())

    def forward(self, x, edge_index):
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        for conv, norm in zip(self.convs[:-1], self.norms, strict=True):
            hidden = conv(x, edge_index)
            x = norm(hidden).relu()
        return self.convs[-1](x, edge_index), hidden


def gradients(module: nn.Module, logits: torch.Tensor) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    return torch.autograd.grad((logits * weights).sum(), list(module.convs.parameters()))


# Widths that shrink, grow and stay: the mean is taken before or after the projection.
@pytest.mark.parametrize("hidden", [5, 12, 40])
@pytest.mark.parametrize("norm", NORMS)
def test_sage_equals_pyg(graph, norm, hidden):
    x, edge_index = graph
    torch.manual_seed(1)
    teacher = GraphSAGE(12, hidden, 3, num_layers=3, norm=norm)
    reference = PyGSage(teacher, [12, hidden, hidden, 3])
    logits, (expected, embedding) = teacher(x, edge_index), reference(x, edge_index)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(teacher.embed(x, edge_index), embedding, rtol=1e-4, atol=1e-5)
    for got, want in zip(gradients(teacher, logits), gradients(reference, expected), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("norm", NORMS)
def test_gcn_equals_pyg(graph, norm):
    x, edge_index = graph
    torch.manual_seed(1)
    teacher = GCN(12, 8, 3, num_layers=3, norm=norm)
    pyg_norm = {"none": None, "batch": "batch_norm", "layer": "layer_norm"}[norm]
    kwargs = {"mode": "node"} if norm == "layer" else None
    reference = pyg_models.GCN(12, 8, 3, 3, norm=pyg_norm, norm_kwargs=kwargs, act_first=True)
    reference.convs.load_state_dict(teacher.convs.state_dict())
    torch.testing.assert_close(teacher(x, edge_index), reference(x, edge_index), rtol=1e-4, atol=1e-5)
    got, want = gradients(teacher, teacher(x, edge_index)), gradients(reference, reference(x, edge_index))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_gcn_embedding_is_taken_after_relu_and_before_norm(graph):
    x, edge_index = graph
    teacher = GCN(12, 8, 3, norm="layer").eval()
    expected = teacher.convs[0](x, teacher.adjacency(edge_index, NODES)).relu()
    assert torch.equal(teacher.embed(x, edge_index), expected)
    assert float(expected.detach().min()) == 0.0


@pytest.mark.parametrize("name", TEACHERS)
def test_a_prepared_adjacency_gives_the_same_bits(graph, name):
    x, edge_index = graph
    teacher = build_teacher(name, 12, 3, hidden_channels=8)
    prepared = teacher.adjacency(edge_index, NODES)
    assert torch.equal(teacher(x, prepared), teacher(x, edge_index))
    assert torch.equal(teacher.embed(x, prepared), teacher.embed(x, edge_index))


@pytest.mark.parametrize("name", TEACHERS)
def test_double_precision(graph, name):
    x, edge_index = graph
    teacher = build_teacher(name, 12, 3, hidden_channels=8).double()
    assert teacher(x.double(), edge_index).dtype == torch.float64


@pytest.mark.parametrize("name", ["sage", "gcn"])
def test_messages_of_features_are_kept_while_they_stay_the_same(graph, name, monkeypatch):
    x, edge_index = graph
    products = []
    multiply = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: products.append(b.shape) or multiply(a, b))
    teacher = build_teacher(name, 12, 3, hidden_channels=16)
    adjacency = teacher.adjacency(edge_index, NODES)

    def logits() -> torch.Tensor:
        return teacher(x, adjacency)

    with torch.inference_mode():
        first = logits().clone()
    products.clear()
    logits().sum().backward()  # tensors made in inference mode could not be used in training
    assert torch.equal(logits(), first)
    assert products.count(x.shape) == 1
    x.mul_(2)
    fresh = build_teacher(name, 12, 3, hidden_channels=16)
    fresh.load_state_dict(teacher.state_dict())
    assert torch.equal(logits(), fresh(x.clone(), edge_index))
    assert not torch.equal(logits(), first)


def test_kept_messages_go_with_their_graph(graph):
    x, edge_index = graph
    teacher = build_teacher("sage", 12, 3, hidden_channels=16)
    before = len(aggregation._products)
    for _ in range(3):
        teacher(x.clone(), teacher.adjacency(edge_index, NODES))
    with torch.no_grad():
        teacher(x.clone(), edge_index)
    assert len(aggregation._products) == before


def test_initialisation_of_sage():
    torch.manual_seed(0)
    conv = GraphSAGE(300, 200, 3).convs[0]
    bound = math.sqrt(2) * math.sqrt(6 / 500)
    largest = float(conv.lin_l.weight.detach().abs().max())
    assert 0.99 * bound < largest <= bound
    assert not conv.lin_l.bias.any()


@pytest.mark.parametrize("name", ["sage", "gcn"])
def test_dropout_spares_the_input_and_the_logits(name):
    # Without edges and with one hidden unit of weight one, a dropped hidden unit leaves only the bias.
    teacher = build_teacher(name, 1, 1, hidden_channels=1, dropout=0.5).train()
    for parameter in teacher.parameters():
        nn.init.ones_(parameter)
    torch.manual_seed(0)
    logits = teacher(torch.ones(400, 1), torch.empty(2, 0, dtype=torch.int64))
    # Hidden: 1 * 1 + 1 = 2; dropped: 0, kept: 4; logits add the bias 1.
    assert set(logits.flatten().tolist()) == {1.0, 5.0}
    assert set(teacher.eval()(torch.ones(4, 1), torch.empty(2, 0, dtype=torch.int64)).flatten().tolist()) == {3.0}


@pytest.mark.parametrize("name", LEARNING)
def test_training_learns_and_repeats_to_the_bit(name):
    data = load_dataset("digits")

    def train() -> tuple[torch.Tensor, float]:
        torch.manual_seed(0)
        teacher = build_teacher(name, 64, 10, hidden_channels=32, dropout=0.3, norm="batch")
        optimizer = torch.optim.Adam(teacher.parameters(), lr=0.01)
        adjacency = teacher.adjacency(data.edge_index, data.num_nodes)
        for _ in range(40):
            optimizer.zero_grad()
            F.cross_entropy(teacher(data.x, adjacency)[data.train_mask], data.y[data.train_mask]).backward()
            optimizer.step()
        with torch.no_grad():
            logits = teacher.eval()(data.x, adjacency)
        return logits, float((logits.argmax(1) == data.y)[data.test_mask].float().mean())

    # Sums over edges are deterministic on several threads if requested, as rbm.distill does.
    with deterministic():
        logits, accuracy = train()
        assert accuracy > 0.85
        assert torch.equal(logits, train()[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "gin"}, "teacher: got 'gin', expected one of sage, gcn"),
        ({"norm": "graph"}, "norm: got 'graph', expected one of none, batch, layer"),
        ({"num_layers": 1}, "num_layers: got 1, expected at least 2"),
        ({"hidden_channels": 0}, "hidden_channels: got 0"),
        ({"dropout": 1.0}, r"dropout: got 1\.0"),
    ],
)
def test_bad_settings(changes, message):
    settings = {"name": "sage", "hidden_channels": 8} | changes
    with pytest.raises(ValueError, match=message):
        build_teacher(settings.pop("name"), 12, 3, **settings)


@pytest.mark.parametrize("name", ["sage", "drgat"])
def test_the_optimizer_has_the_teachers_settings(small_graph, name):
    config = Config().updated({"teacher": {"name": name, "hidden_channels": 8, "lr": 0.03, "weight_decay": 0.07}})
    split = split_graph(small_graph)
    trainer = build_teacher_trainer(build_configured_teacher(config, split, 3), split, config)
    [group] = trainer.optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.03, 0.07)
    assert list(map(id, group["params"])) == list(map(id, trainer.model.parameters()))


class OfAPlugin(nn.Module):
    """A teacher as CONTRIBUTING.md shows it; subclasses have a mistake each."""

    def __init__(self, in_channels, hidden_channels, out_channels, num_layers, dropout, norm):
        super().__init__()
        self.linear = nn.Linear(in_channels, out_channels)

    def forward(self, x, edge_index):
        return self.linear(x)


class FewClasses(OfAPlugin):
    def forward(self, x, edge_index):
        return self.linear(x)[:, :2]


class FewRows(OfAPlugin):
    def forward(self, x, edge_index):
        return self.linear(x)[1:]


class Pair(OfAPlugin):
    def forward(self, x, edge_index):
        return self.linear(x), x


class OneArgument(OfAPlugin):
    def forward(self, x):
        return self.linear(x)


class Frozen(OfAPlugin):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.requires_grad_(False)


class OtherConstructor(OfAPlugin):
    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, 8, out_channels, 2, 0.0, "none")


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (
            FewClasses,
            ValueError,
            r"a FewClasses, which returned a tensor \[60, 2\], expected .* \[60, 3\]: one row a n",
        ),
        (FewRows, ValueError, r"a FewRows, which returned a tensor \[59, 3\], expected a tensor of logits \[60, 3\]"),
        (Frozen, ValueError, r"a Frozen, which has no parameter to train; pass what it computes as logits"),
        (Pair, TypeError, r"a Pair, which returned a tuple, expected a tensor of logits \[60, 3\]"),
        (
            OneArgument,
            TypeError,
            r"a OneArgument with forward\(x\), which cannot be called as teacher\(x, edge_index\)",
        ),
        (
            OtherConstructor,
            TypeError,
            r"teacher 'mine' is the class OtherConstructor\(in_channels, out_channels\), which cannot be made from"
            r" \(in_channels, hidden_channels, out_channels, num_layers, dropout, norm\) \(too many",
        ),
    ],
)
def test_a_teacher_of_a_plugin_that_does_not_fit_is_named(small_graph, monkeypatch, made, error, message):
    monkeypatch.setitem(TEACHERS, "mine", made)
    with pytest.raises(error, match=message):
        build_configured_teacher(Config().updated({"teacher": {"name": "mine"}}), split_graph(small_graph), 3)


def test_a_python_without_pytorch_geometric_is_named(monkeypatch):
    """Regression test: on Python 3.15, `rbm distill` ended with a missing argument of `_eval_type` (PyG 2.8)."""

    def fail(*_arguments):
        raise TypeError("_eval_type() missing 1 required positional argument: 'type_params'")

    monkeypatch.setattr(GraphSAGE, "make_conv", staticmethod(fail))
    with pytest.raises(RuntimeError, match=r"teacher 'sage' cannot be built: torch-geometric .* use an older Python"):
        build_teacher("sage", 12, 3, hidden_channels=8)


def test_the_check_of_a_teacher_of_a_plugin_draws_no_random_numbers(small_graph, monkeypatch):
    class Noisy(OfAPlugin):
        def forward(self, x, edge_index):
            return self.linear(x + torch.randn_like(x))

    monkeypatch.setitem(TEACHERS, "mine", Noisy)
    torch.manual_seed(0)
    Noisy(small_graph.num_features, 8, 3, 2, 0.0, "none")
    expected = torch.get_rng_state()
    torch.manual_seed(0)
    build_configured_teacher(Config().updated({"teacher": {"name": "mine"}}), split_graph(small_graph), 3)
    assert torch.equal(torch.get_rng_state(), expected)
