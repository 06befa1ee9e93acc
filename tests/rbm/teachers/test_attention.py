"""RevGAT and DRGAT as modules: the convolution, the gate and the reversible blocks compared with plain loops."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rbm.nn.dropout import dropout
from rbm.nn.sparse_rows import as_rows
from rbm.teachers import DRGAT, GCN, RevGAT, build_teacher
from rbm.teachers.attention import AttentionConv, BatchNorm, Edges, draw_seed
from rbm.teachers.drgat import EvolvingGate

NODES = 20
KINDS = {"revgat": RevGAT, "drgat": DRGAT}
NO_EDGES = torch.empty(2, 0, dtype=torch.int64)


@pytest.fixture
def graph() -> tuple[torch.Tensor, torch.Tensor]:
    """A directed graph with a self-loop and a duplicate edge; nodes 18 and 19 are isolated."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(18, (2, 60), generator=generator)
    edges = edges[:, edges[0] != edges[1]]
    more = torch.stack([edges[:, 0], torch.tensor([3, 3])], dim=1)
    x = torch.randn(NODES, 7, generator=generator, dtype=torch.float64)
    return x, torch.cat([edges, more], dim=1)


def loops(
    conv: AttentionConv, x: torch.Tensor, edges: set[tuple[int, int]], kept: set[tuple[int, int]]
) -> torch.Tensor:
    """The convolution edge by edge: degrees count ``edges``, messages follow ``kept``."""
    width, rows = conv.out_channels, []
    sent_by = [sum(source == j for source, _ in edges) for j in range(NODES)]
    for i in range(NODES):
        senders = [source for source, target in kept if target == i]
        heads = []
        for head in range(conv.heads):
            part = slice(head * width, (head + 1) * width)
            message = {j: conv.lin.weight[part] @ x[j] / sent_by[j] ** 0.5 for j in senders}
            weight = {j: F.leaky_relu(conv.att[0, head] @ message[j], 0.2).exp() for j in senders}
            total = sum((weight[j] * message[j] for j in senders), torch.zeros(width, dtype=x.dtype))
            degree = sum(target == i for _, target in edges)
            mean = total / sum(weight.values()) if senders else total
            heads.append(degree**0.5 * mean + conv.residual.weight[part] @ x[i])
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def pairs(index: torch.Tensor) -> set[tuple[int, int]]:
    return set(map(tuple, index.T.tolist()))


@pytest.mark.parametrize("share", [0.0, 0.6])
@pytest.mark.parametrize("heads", [1, 3])
def test_convolution_equals_loops(graph, heads, share):
    x, edge_index = graph
    torch.manual_seed(1)
    conv = AttentionConv(7, 4, heads).double()
    edges = Edges.of(edge_index, NODES, torch.float64)
    whole = {(i, j) for i, j in pairs(edge_index) if i != j} | {(i, i) for i in range(NODES)}
    assert pairs(edges.index) == whole
    assert edges.index.shape[1] == len(whole), "each edge once"
    kept = edges.without(share, seed=5) if share else edges
    assert pairs(kept.index) <= whole
    got, expected = conv(x, kept), loops(conv, x, whole, pairs(kept.index))
    torch.testing.assert_close(got, expected)
    target = torch.linspace(-1, 1, got.numel(), dtype=torch.float64).view_as(got)
    gradients = [torch.autograd.grad((y * target).sum(), list(conv.parameters())) for y in (got, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_equal_attention_is_a_graph_convolution(graph):
    x, edge_index = graph
    loop_free = edge_index[:, edge_index[0] != edge_index[1]].unique(dim=1)
    both = torch.cat([loop_free, loop_free.flip(0)], dim=1).unique(dim=1)  # so that in- and outdegrees are equal
    conv = AttentionConv(7, 4).double()
    nn.init.zeros_(conv.att)
    expected = GCN.adjacency(both, NODES, torch.float64) @ conv.lin(x) + conv.residual(x)
    torch.testing.assert_close(conv(x, Edges.of(both, NODES, torch.float64)), expected)


def test_edges_are_left_out_at_random_and_again_the_same():
    edges = Edges.of(torch.randint(200, (2, 20_000)), 200)
    kept = edges.without(0.3, seed=7)
    assert kept.index.shape[1] == pytest.approx(0.7 * edges.index.shape[1], rel=0.02)
    assert torch.equal(kept.index, edges.without(0.3, seed=7).index)
    assert not torch.equal(kept.index, edges.without(0.3, seed=8).index)
    assert kept.send is edges.send
    assert kept.receive is edges.receive


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("norm", ["none", "batch", "layer"])
def test_loops_repeats_and_order_of_edges_make_no_difference(graph, name, norm):
    x, edge_index = graph
    teacher = build_teacher(name, 7, 3, hidden_channels=4, num_layers=4, norm=norm).double().eval()
    clean = edge_index[:, edge_index[0] != edge_index[1]].unique(dim=1)
    loops = torch.arange(0, NODES, 3).repeat(2, 2)
    messy = torch.cat([clean, loops, clean[:, :9]], dim=1)
    messy = messy[:, torch.randperm(messy.shape[1])]
    assert torch.equal(teacher(x, messy), teacher(x, clean))
    assert torch.equal(teacher(x, messy), teacher(x, teacher.adjacency(clean, NODES, torch.float64)))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("norm", ["none", "batch"])
def test_no_edges(graph, name, norm):
    x, _ = graph
    dropouts = {"dropout": 0.5, "input_dropout": 0.5, "edge_dropout": 0.9}
    teacher = build_teacher(name, 7, 3, hidden_channels=4, num_layers=4, norm=norm, **dropouts).double()
    teacher(x, NO_EDGES).square().sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in teacher.parameters())
    teacher.eval()
    alone = torch.cat([teacher(x[i : i + 1], NO_EDGES) for i in range(NODES)])
    torch.testing.assert_close(teacher(x, NO_EDGES), alone)


@pytest.mark.parametrize("name", KINDS)
def test_dropout_is_drawn_in_training_alone(graph, name):
    x, edge_index = graph
    for dropped in ("dropout", "input_dropout", "edge_dropout"):
        teacher = KINDS[name](7, 4, 3, 4, norm="none", **{dropped: 0.5}).double()
        again = [teacher(x, edge_index) for _ in range(2)]
        assert not torch.equal(*again), dropped
        teacher.eval()
        assert torch.equal(teacher(x, edge_index), teacher(x, edge_index)), "DRGAT's first state too"
        plain = KINDS[name](7, 4, 3, 4, norm="none").double().eval()
        plain.load_state_dict(teacher.state_dict())
        assert torch.equal(teacher(x, edge_index), plain(x, edge_index)), dropped


def test_sparse_features_are_projected_as_dense_ones(graph):
    x, edge_index = graph
    x = x * (x > 0)
    for kind in KINDS.values():
        teacher = kind(7, 4, 3, 4).double().eval()
        torch.testing.assert_close(teacher(x.to_sparse_csr(), edge_index), teacher(as_rows(x), edge_index))
        torch.testing.assert_close(teacher.embed(x.to_sparse_csr(), edge_index), teacher.embed(x, edge_index))


def gate_reference(gate: EvolvingGate, initial, h, state):
    """The gate, equation by equation; ``state [2, N]``."""
    z = (initial / initial.norm(dim=1, keepdim=True) * h / h.norm(dim=1, keepdim=True)) @ gate.lin.weight.T
    rnn, seen, new = gate.rnn, z + gate.lin.bias, []
    for layer in range(2):
        w, u = getattr(rnn, f"weight_ih_l{layer}"), getattr(rnn, f"weight_hh_l{layer}")
        b = getattr(rnn, f"bias_ih_l{layer}") + getattr(rnn, f"bias_hh_l{layer}")
        seen = torch.tanh(seen @ w.T + state[layer][:, None] @ u.T + b)
        new.append(seen[:, 0])
    return new[1].abs()[:, None], torch.stack(new)


def test_drgat_equals_its_definition(graph):
    x, edge_index = graph
    torch.manual_seed(2)
    teacher = DRGAT(7, 4, 3, num_layers=5, norm="layer").double().eval()
    edges = teacher.adjacency(edge_index, NODES, torch.float64)
    initial = h = teacher.first(x, edges)
    state, shares = torch.zeros(2, NODES, dtype=torch.float64), []
    for norm, conv in zip(teacher.norms, teacher.convs, strict=True):
        share, state = gate_reference(teacher.gate, initial, h, state)
        h = (1 - share) * conv(norm(h).relu(), edges) + share * initial
        shares.append(share)
    torch.testing.assert_close(teacher.embed(x, edge_index), h)
    torch.testing.assert_close(teacher(x, edge_index), teacher.last(teacher.norm(h).relu(), edges) + teacher.bias)
    assert all(share.min() >= 0 and share.max() < 1 for share in shares)
    assert not torch.allclose(shares[0], shares[1]), "it evolves"


def test_drgat_draws_its_first_state_in_training(graph):
    x, _ = graph
    gate = EvolvingGate(7, 4).double()
    for parameter in gate.parameters():
        nn.init.zeros_(parameter)
    for parameter in (gate.rnn.weight_hh_l1, gate.rnn.bias_ih_l1):
        nn.init.ones_(parameter)  # the share is tanh of one plus the second layer's initial state
    drawn = torch.cat([gate(x, x, None)[0] for _ in range(50)]).atanh().detach() - 1
    assert [float(drawn.min()), float(drawn.max())] == pytest.approx([-0.5, 0.5], abs=0.01), "4 ** -1/2"
    assert float(drawn.mean()) == pytest.approx(0.0, abs=0.04)
    assert float(gate.eval()(x, x, None)[0].detach().atanh().max()) == pytest.approx(1.0)


def dropping(kind, graph):
    """A teacher in training, the edges, and its output; its random draws are about to be repeated."""
    x, edge_index = graph
    teacher = kind(7, 4, 3, 4, 0.4, "layer", input_dropout=0.2, edge_dropout=0.3).double()
    edges = teacher.adjacency(edge_index, NODES, torch.float64)
    torch.manual_seed(5)
    found = teacher(x, edges)
    torch.manual_seed(5)
    return teacher, edges, found


def test_drgat_drops_hidden_channels_and_edges_of_each_convolution(graph):
    x, _ = graph
    teacher, edges, found = dropping(DRGAT, graph)
    initial = h = teacher.first(dropout(x, 0.2), edges.without(0.3, draw_seed()))
    state = None
    for norm, conv in zip(teacher.norms, teacher.convs, strict=True):
        share, state = teacher.gate(initial, h, state)
        h = (1 - share) * conv(dropout(norm(h).relu(), 0.4), edges.without(0.3, draw_seed())) + share * initial
    last = teacher.last(dropout(teacher.norm(h).relu(), 0.4), edges.without(0.3, draw_seed()))
    torch.testing.assert_close(found, last + teacher.bias)


def test_revgat_has_one_mask_for_all_layers_and_draws_the_edges_of_each(graph):
    x, _ = graph
    teacher, edges, found = dropping(RevGAT, graph)
    h = teacher.first(dropout(x, 0.2), edges.without(0.3, draw_seed()))
    masks = dropout(torch.ones_like(h), 0.4).chunk(2, dim=1)
    assert torch.cat(masks).unique().tolist() == pytest.approx([0.0, 1 / 0.6], rel=1e-4)
    for block in teacher.blocks:
        kept, parts = edges.without(0.3, draw_seed()), h.chunk(2, dim=1)
        outputs, given = [], parts[1]
        for part, mask, f in zip(parts, masks, block.convs, strict=True):
            given = part + f.conv(f.norm(given).relu() * mask, kept)
            outputs.append(given)
        h = torch.cat(outputs, dim=1)
    last = teacher.last(dropout(teacher.norm(h).relu(), 0.4), edges.without(0.3, draw_seed()))
    torch.testing.assert_close(found, last + teacher.bias)


def test_initialisation():
    conv = AttentionConv(300, 100, 2)
    for weight, fans in ((conv.lin.weight, 500), (conv.residual.weight, 500), (conv.att, 2 * 100 + 100)):
        expected = 2**0.5 * (2 / fans) ** 0.5
        assert float(weight.detach().std()) == pytest.approx(expected, rel=0.02 if weight.numel() > 1000 else 0.3)


def run(teacher: RevGAT, x, edge_index):
    """Logits, gradients and running statistics of one training step, from the same random state."""
    torch.manual_seed(3)
    logits = teacher(x, edge_index)
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    teacher.zero_grad()
    (logits * weights).sum().backward()
    return logits.detach(), [p.grad.clone() for p in teacher.parameters()], dict(teacher.named_buffers())


@pytest.mark.parametrize("norm", ["none", "batch", "layer"])
@pytest.mark.parametrize("groups", [2, 4])
def test_reversible_layers_equal_plain_ones(graph, groups, norm):
    x, edge_index = graph
    settings = {"groups": groups, "dropout": 0.4, "input_dropout": 0.2, "edge_dropout": 0.3}
    plain = RevGAT(7, 8, 3, num_layers=6, norm=norm, reversible=False, **settings).double()
    reversible = RevGAT(7, 8, 3, num_layers=6, norm=norm, **settings).double()
    reversible.load_state_dict(plain.state_dict())
    got, expected = run(reversible, x, edge_index), run(plain, x, edge_index)
    torch.testing.assert_close(got[0], expected[0])
    for one, other in zip(got[1], expected[1], strict=True):
        # Recomputed inputs have rounding errors relative to the size of the activations.
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9 * float(other.abs().max()))
    for name, statistic in got[2].items():
        torch.testing.assert_close(statistic, expected[2][name], msg=f"{name}: moved once a step")
    answer = reversible.eval()(x, edge_index)
    torch.testing.assert_close(answer, plain.eval()(x, edge_index))
    assert torch.equal(copy.deepcopy(reversible)(x, edge_index), answer)


def test_reversible_layer_equals_its_equations(graph):
    x, edge_index = graph
    teacher = RevGAT(7, 6, 3, num_layers=3, groups=3).double().eval()
    edges = teacher.adjacency(edge_index, NODES, torch.float64)
    x_1, x_2, x_3 = teacher.first(x, edges).chunk(3, dim=1)
    f_1, f_2, f_3 = (lambda h, f=f: f(h, edges, None, None) for f in teacher.blocks[0].convs)
    y_1 = x_1 + f_1(x_2 + x_3)
    y_2 = x_2 + f_2(y_1)
    y_3 = x_3 + f_3(y_2)
    torch.testing.assert_close(teacher.embed(x, edge_index), torch.cat([y_1, y_2, y_3], dim=1))


def bytes_for_backward(teacher: nn.Module, x, edge_index) -> int:
    """Bytes held between forward and backward: saved by autograd, and held by reversible blocks themselves."""
    held, nodes = [], []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        nodes.append(teacher(x, edge_index).sum().grad_fn)
    seen = set()
    while nodes:
        node = nodes.pop()
        if node in seen or node is None:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        for part in itertools.chain(*getattr(node, "inputs", ()), *getattr(node, "outputs", ())):
            if isinstance(part, Edges):
                held += [part.index, part.send, part.receive]
            elif isinstance(part, torch.Tensor):
                held.append(part)
    own = {p.untyped_storage().data_ptr() for p in teacher.parameters()}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return sum(size for place, size in storages.items() if place not in own)


def test_memory_does_not_grow_with_depth():
    x, edge_index = torch.randn(500, 7), torch.randint(500, (2, 3000))
    dropouts = {"dropout": 0.5, "edge_dropout": 0.3}

    def held(layers: int, reversible: bool) -> int:
        return bytes_for_backward(RevGAT(7, 16, 3, layers, reversible=reversible, **dropouts), x, edge_index)

    plain, reversible = ([held(layers, kind) for layers in (3, 12)] for kind in (False, True))
    hidden_layer = 500 * 3 * 16 * 4
    assert reversible[1] - reversible[0] < hidden_layer / 100, "of nine layers more"
    assert plain[1] - plain[0] > 9 * 5 * hidden_layer
    assert reversible[0] < plain[0]


def test_batch_norm_looks_without_moving():
    norm, x = BatchNorm(3), torch.randn(10, 3) + 5
    with torch.no_grad():
        seen = norm(x)
    assert not norm.running_mean.any()
    assert int(norm.num_batches_tracked) == 0
    assert torch.equal(seen, norm(x))
    assert norm.running_mean.all()


def test_modules_stand_alone(small_graph):
    """They work like any PyG module, without the rest of this package."""
    teacher = build_teacher("revgat", 12, 3, hidden_channels=8, num_layers=4, dropout=0.2, edge_dropout=0.2)
    optimizer = torch.optim.Adam(teacher.parameters(), lr=0.01)
    for _ in range(30):
        optimizer.zero_grad()
        logits = teacher(small_graph.x, small_graph.edge_index)[small_graph.train_mask]
        F.cross_entropy(logits, small_graph.y[small_graph.train_mask]).backward()
        optimizer.step()
    found = teacher.eval()(small_graph.x, small_graph.edge_index).argmax(-1)
    assert (found == small_graph.y)[small_graph.test_mask].float().mean() > 0.7


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (RevGAT, {"groups": 3}, "groups: got 3, expected at least 2 and a divisor of hidden_channels=8"),
        (RevGAT, {"groups": 1}, "groups: got 1"),
        (DRGAT, {"heads": 0}, "heads: got 0, expected at least 1"),
        (DRGAT, {"num_layers": 1}, "num_layers: got 1, expected at least 2"),
        (DRGAT, {"edge_dropout": 1.0}, r"edge_dropout: got 1\.0"),
        (RevGAT, {"input_dropout": -0.1}, r"input_dropout: got -0\.1"),
        (RevGAT, {"norm": "graph"}, "norm: got 'graph'"),
    ],
)
def test_bad_settings(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        kind(7, 8, 3, **changes)
