"""VQGraph: the tokenizer's losses, the codes that follow rows, and a student that learns soft assignments."""

import copy

import pytest
import torch
from torch.nn import functional as F

from rbm.config import Config, TokenizerConfig, VQGraphConfig
from rbm.datasets.splits import split_graph
from rbm.distillation.methods import vqgraph
from rbm.distillation.methods.vqgraph import (
    Codebook,
    EdgeError,
    Tokenizer,
    TokenizerTrainer,
    VQGraphTrainer,
    train_vqgraph,
)
from rbm.distillation.task import DistillationTask
from rbm.nn.students import MLPStudent
from rbm.utils.progress import Progress

SMALL = {"codebook_size": 9, "code_channels": 5, "hidden_channels": 7, "dropout": 0.0}


START = ("random", "rows")


def tokenizer_of(split, **options) -> TokenizerTrainer:
    config = TokenizerConfig(**SMALL, **options)
    torch.manual_seed(3)
    return TokenizerTrainer(Tokenizer(6, 4, config), split, config)


def dense_adjacency(edge_index, count):
    adjacency = torch.eye(count)
    for u, v in edge_index.T.tolist():
        if u != v:
            adjacency[v, u] = 1
    return adjacency


def dense_edge_error(rows, adjacency):
    products = rows @ rows.T
    low, high = products.min().item(), products.max().item()
    return F.mse_loss((products - low) / (high - low), adjacency).sqrt()


def propagation(edge_index, count):
    """Duplicate edges count twice, as in every teacher."""
    adjacency = torch.eye(count)
    for u, v in edge_index.T.tolist():
        adjacency[v, u] += u != v
    degrees = adjacency.sum(1)
    return adjacency / (degrees[:, None] * degrees[None, :]).sqrt()


def test_the_tokenizers_loss_and_gradient(split):
    ours = tokenizer_of(split, node_weight=0.6, edge_weight=0.9, commitment_weight=0.3)
    observed, model = split.observed, ours.model.eval()  # codes are fixed
    x, spread = observed.x, propagation(observed.edge_index, observed.num_nodes)
    h = (spread @ x @ model.first.lin.weight.T + model.first.bias).relu()
    nearest = (F.normalize(h) @ F.normalize(model.codebook.codes).T).argmax(1)
    assert len(nearest.unique()) > 2
    e = h + (model.codebook.codes[nearest] - h).detach()
    z, nodes = model.edge_decoder(e), model.node_decoder(e)
    q = model.head((spread @ z @ model.second.lin.weight.T + model.second.bias).relu())
    train = observed.train_mask
    expected = F.cross_entropy(q[train], observed.y[train])
    expected = expected + 0.6 * (h - nodes).square().mean() + 0.3 * (h - e.detach()).square().mean()
    expected = expected + 0.9 * dense_edge_error(z, dense_adjacency(observed.edge_index, len(x)))
    tokens = model(x, ours.adjacency)
    found = ours.loss(tokens)
    assert torch.equal(tokens.nearest, nearest)
    torch.testing.assert_close(tokens.logits, q)
    torch.testing.assert_close(found, expected)
    parameters = list(model.parameters())
    for mine, plain in zip(
        torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(mine, plain, atol=1e-5, rtol=1e-4)


def test_the_error_of_edges_needs_no_matrix_of_all_pairs(directed_graph):
    codes = torch.randn(6, 3)
    nearest = torch.randint(0, 6, (40,))
    rows = codes[nearest].requires_grad_()
    expected = dense_edge_error(rows, dense_adjacency(directed_graph.edge_index, 40))
    found = EdgeError(directed_graph.edge_index, 40)(rows, nearest)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, rows)[0], torch.autograd.grad(expected, rows)[0])
    close = EdgeError(directed_graph.edge_index, 40)((rows * 1e-3 + 1).detach(), nearest)
    torch.testing.assert_close(
        close,
        dense_edge_error(
            (rows * 1e-3 + 1).detach().double(), dense_adjacency(directed_graph.edge_index, 40).double()
        ).float(),
        atol=1e-3,
        rtol=1e-3,
    )
    one = EdgeError(directed_graph.edge_index, 40)(torch.ones(40, 3), torch.zeros(40, dtype=torch.int64))
    edges = dense_adjacency(directed_graph.edge_index, 40).sum()
    torch.testing.assert_close(one, edges.sqrt() / 40)
    # Two pairs of joined nodes, each with a code of its own: no error is left, where a root has no finite derivative.
    nearest = torch.tensor([0, 0, 1, 1])
    exact = torch.eye(2)[nearest].requires_grad_()
    none = EdgeError(torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]]), 4)(exact, nearest)
    assert none < 1e-5
    assert torch.autograd.grad(none, exact)[0].isfinite().all()


def test_codes_follow_the_rows_that_take_them():
    book = Codebook(5, 3, 0.8)
    torch.testing.assert_close(book.codes.norm(dim=1), torch.ones(5))
    before = book.codes.clone()
    book.codes[0] *= 2  # its length does not matter
    rows = torch.cat([3 * before[2:3] + 0.01, before[2:3], -before[2:3].abs() * 1e-3 + before[1:2]]).requires_grad_()
    unit = F.normalize(rows.detach())
    nearest = (unit @ before.T).argmax(1)
    expected = before.clone()
    for code in nearest.unique():
        mean = unit[nearest == code].mean(0)
        expected[code] = 0.8 * before[code] + 0.2 * mean / mean.norm()
    expected[0] = 0.8 * 2 * before[0] + 0.2 * before[0]
    taken, found = book(rows)
    assert torch.equal(found, nearest)
    assert torch.equal(taken, before[nearest]), "the codes as they were"
    (taken * torch.arange(9.0).view(3, 3)).sum().backward()
    assert torch.equal(rows.grad, torch.arange(9.0).view(3, 3)), "as if a code were its row"
    torch.testing.assert_close(book.codes, expected)
    still = book.eval().codes.clone()
    book(rows)
    assert torch.equal(book.codes, still)


@pytest.mark.parametrize("at_once", [1, 11, 20, 10_000])
def test_products_are_computed_in_parts(monkeypatch, at_once):
    monkeypatch.setattr(vqgraph, "_PRODUCTS_AT_ONCE", at_once)
    rows, codes = torch.randn(7, 3), torch.randn(5, 3)
    parts = [(part.clone(), part.numel()) for part in vqgraph.products(rows, codes)]
    torch.testing.assert_close(torch.cat([part for part, _ in parts]), rows @ codes.T)
    assert max(numbers for _, numbers in parts) <= max(at_once, len(codes))
    book = Codebook(5, 3, 0.8)
    assert torch.equal(book.eval()(rows)[1], (rows @ book.codes.T).argmax(1))
    low, span = EdgeError.range(rows, torch.arange(7))
    torch.testing.assert_close((low, low + span), ((rows @ rows.T).min().item(), (rows @ rows.T).max().item()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_first_of_equal_codes_is_the_nearest(dtype):
    nan, infinity = float("nan"), float("inf")
    odd = [[1, nan, 2, nan], [3, 1, 3, 3], [nan] * 4, [-infinity] * 4, [0.0, -0.0, 0.0, -1.0]]
    rows = torch.cat([torch.tensor(odd, dtype=dtype), torch.randint(0, 3, (100, 4)).to(dtype)])
    assert torch.equal(vqgraph.argmax(rows), rows.argmax(-1))
    assert vqgraph.argmax(rows[:5]).tolist() == [1, 0, 0, 0, 0]


def test_codes_start_as_rows_of_the_graph(split):
    book = Codebook(5, 3, 0.8)
    before = book.codes.clone()
    rows = torch.tensor([[0.0, 3.0, 4.0], [0.0, 0.0, 0.0], [2.0, 0.0, 0.0]])
    book.start_from(rows)
    assert sorted(book.codes[:2].tolist()) == sorted(F.normalize(rows[[0, 2]]).tolist()), "a row of zeros is none"
    assert torch.equal(book.codes[2:], before[2:])
    rows = torch.randn(40, 3)
    book.start_from(rows)
    assert not torch.equal(book.codes, F.normalize(rows[:5])), "neighbouring rows of a file may be alike"
    torch.testing.assert_close(book.codes.norm(dim=1), torch.ones(5))
    taken = {start: len(tokenizer_of(split, code_start=start).tokens()[0].nearest.unique()) for start in START}
    assert taken["rows"] == SMALL["codebook_size"] > taken["random"], "each code is a row, which takes it"


def test_codes_start_as_rows_without_dropout(split):
    torch.manual_seed(3)
    config = TokenizerConfig(**SMALL | {"dropout": 0.5})
    ours = TokenizerTrainer(Tokenizer(6, 4, config), split, config)
    start = ours.model.codebook.codes.clone()
    assert ours.model.training
    first, again = (ours.model(split.observed.x, ours.adjacency).rows for _ in range(2))
    assert not torch.equal(first, again)
    rows = F.normalize(ours.model.eval()(split.observed.x, ours.adjacency).rows)
    distances = torch.cdist(start, rows).amin(1)
    torch.testing.assert_close(distances, torch.zeros(SMALL["codebook_size"]), atol=1e-3, rtol=0)


@pytest.mark.parametrize("layers", [1, 3])
def test_an_epoch_has_a_pass_on_codes_before_glnns(split, twin, layers):
    teaching = tokenizer_of(split)
    teaching.model.eval()
    seen, logits = teaching.tokens()
    codes = teaching.model.codebook.codes * torch.linspace(0.3, 2.0, SMALL["codebook_size"])[:, None]
    book = torch.cat([codes, torch.randn(3, 5)])  # three codes that no node has
    config = VQGraphConfig(batch_size=100, label_weight=0.4, code_weight=0.7, code_temperature=0.5, dropout=0.0)
    model = MLPStudent(6, 8, 4, num_layers=layers, norm="layer")
    ours = VQGraphTrainer(model, split, seen, logits, book, config)
    projection = copy.deepcopy(ours.projection)
    other, optimizer = twin(model, config, *projection.parameters())
    loss = ours.train_epoch(0)
    x, y, nodes = split.observed.x, split.observed.y, split.observed.train_mask

    def step(loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    codes = F.normalize(book[seen.nearest.unique()])
    a = (F.normalize(seen.rows) @ codes.T / 0.5).softmax(-1)
    hidden = x
    for layer, norm in zip(other.layers, other.norms, strict=False):
        hidden = norm(hidden @ layer.weight.T + layer.bias).relu()
    u = projection(hidden if layers > 1 else other(x))
    b = (F.normalize(u) @ codes.T / 0.5).softmax(-1)
    total = step(0.7 * 0.25 * (a * (a / b).log()).sum(-1).mean())
    total += step(0.4 * F.cross_entropy(other(x[nodes]), y[nodes]))
    p, q = seen.logits.softmax(-1), other(x).softmax(-1)
    total += step(0.6 * (p * (p / q).log()).sum(-1).mean())
    assert loss == pytest.approx(total, rel=1e-4)
    for mine, plain in zip(ours.model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(ours.projection.weight, projection.weight, atol=1e-5, rtol=1e-4)


def test_the_phases_have_settings_of_their_own_and_the_tokenizer_a_seed(split, teacher_outputs, monkeypatch):
    config = Config().updated({"vqgraph": {"hidden_channels": 8, "tokenizer": {**SMALL, "decay": 0.3}}})
    task = DistillationTask(split, teacher_outputs, config, 4, lambda section: None, None, Progress(None))
    settings, starts = {}, []

    def fit(phase, trainer, network):
        settings[phase] = network
        if phase == "vqgraph-tokenizer":
            assert trainer.model.codebook.decay == 0.3
            starts.append(trainer.model.first.lin.weight.clone())
        return {}

    monkeypatch.setattr(task, "fit", fit)
    train_vqgraph(task)
    assert settings == {"vqgraph-tokenizer": config.vqgraph.tokenizer, "vqgraph": config.vqgraph}
    train_vqgraph(task)  # other random numbers were drawn before
    assert torch.equal(*starts)


def test_without_a_weight_codes_have_no_pass(split, monkeypatch):
    """A step without a gradient would still move the weights, by Adam's momentum and the weight decay."""
    teaching = tokenizer_of(split)
    config = VQGraphConfig(code_weight=0.0)
    ours = VQGraphTrainer(MLPStudent(6, 8, 4), split, *teaching.tokens(), teaching.model.codebook.codes, config)
    monkeypatch.setattr(ours.projection, "forward", None)
    assert torch.tensor(ours.train_epoch(0)).isfinite()


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_pass_on_codes_updates_running_statistics_once_per_step(split, share):
    teaching = tokenizer_of(split)
    teaching.model.eval()
    config = VQGraphConfig(batch_size=100, label_weight=0.4, code_weight=0.7, norm="batch", dropout=share)
    model = MLPStudent(6, 8, 4, num_layers=3, norm="batch")
    ours = VQGraphTrainer(model, split, *teaching.tokens(), teaching.model.codebook.codes, config)
    hidden = model.layers[0](split.observed.x)
    hidden = model.layers[1](F.batch_norm(hidden, None, None, training=True).relu())
    expected = F.batch_norm(hidden, None, None, training=True).relu()
    given = []
    ours.projection.register_forward_hook(lambda _, rows, __: given.append(rows[0]))
    ours.batch_loss(ours.observed_nodes, ours.code_loss)
    assert [int(norm.num_batches_tracked) for norm in model.norms] == [1, 1]
    torch.testing.assert_close(model.norms[1].running_mean, 0.1 * hidden.mean(0))
    kept = given[0] != 0
    assert (kept.sum() < 0.8 * (expected != 0).sum()) == (share > 0)
    torch.testing.assert_close(given[0][kept], expected[kept] / (1 - share), atol=1e-5, rtol=1e-4)


def test_a_tokenizer_answers_for_unseen_nodes_and_learns(directed_graph):
    split = split_graph(directed_graph, "inductive", unseen_fraction=0.4)
    ours = tokenizer_of(split, lr=0.05, edge_weight=0.5)
    ours.model.train()
    losses = [ours.train_epoch(epoch) for epoch in range(12)]
    assert losses[-1] < 0.8 * losses[0]
    ours.model.eval()
    seen, logits = ours.tokens()
    assert (len(seen.logits), len(logits)) == (split.observed.num_nodes, 40)
    spread = propagation(directed_graph.edge_index, 40)
    dense = spread.to_sparse_csr()
    torch.testing.assert_close(logits, ours.model(directed_graph.x, dense).logits, atol=1e-5, rtol=1e-4)


def test_a_graph_without_edges(directed_graph):
    directed_graph.edge_index = torch.empty(2, 0, dtype=torch.int64)
    ours = tokenizer_of(split_graph(directed_graph))
    assert torch.tensor(ours.train_epoch(0)).isfinite()
