"""The vanilla mixture of experts: its layer equals a loop over experts, and training follows the configuration."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import rbm
from rbm.datasets.splits import split_graph
from rbm.distillation.methods.moe import MoETrainer
from rbm.nn.dropout import dropout
from rbm.nn.moe import MoELayer, MoEStudent, balance_loss
from rbm.nn.parameters import count_parameters
from rbm.nn.rbm_layer import Routing
from rbm.nn.sparse_rows import SparseRows
from rbm.teachers.outputs import outputs_from_logits

EXPERTS, ROWS = 5, 23


def make(top_k=2, **options) -> MoELayer:
    layer = MoELayer(6, 4, EXPERTS, top_k, router_features=7, **{"noise": 0.0, **options})
    with torch.no_grad():  # away from their initial values, so that each of them matters
        layer.log_temperature.fill_(1.3)
        layer.log_scale.fill_(0.4)
        layer.addresses.mul_(100)
    return layer


def plain(layer, h, noise=0.0):
    """Every expert's output for every row, times its gate. Returns outputs and gates ``[B, E]``."""
    z = F.normalize(h @ layer.router.weight.T + layer.router.bias, dim=-1)
    logits = layer.log_temperature.exp() * z @ F.normalize(layer.addresses, dim=0) + noise
    chosen = torch.zeros_like(logits).scatter(-1, logits.topk(layer.top_k).indices, 1.0).bool()
    if layer.gates_over == "selected":
        gates = logits.masked_fill(~chosen, -torch.inf).softmax(-1)
    else:
        gates = logits.softmax(-1) * chosen
    answers = [gates[:, e, None] * (h @ layer.weight[e].T + layer.bias[e]) for e in range(EXPERTS)]
    return layer.log_scale.exp() * sum(answers), gates


@pytest.mark.parametrize("gates_over", ["selected", "all"])
@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
def test_equals_a_loop_over_experts(top_k, gates_over):
    layer, h = make(top_k, gates_over=gates_over), torch.randn(ROWS, 6, requires_grad=True)
    upstream = torch.randn(ROWS, 4)
    y, routing = layer(h, return_routing=True)
    expected, gates = plain(layer, h)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(routing.gates, gates.gather(-1, routing.experts.long()))
    cosines = F.normalize(layer.router(h), dim=-1) @ F.normalize(layer.addresses, dim=0)
    torch.testing.assert_close(routing.cosines, cosines.gather(-1, routing.experts.long()))

    leaves = {"h": h, **dict(layer.named_parameters())}
    ours = torch.autograd.grad((y * upstream).sum(), list(leaves.values()))
    theirs = torch.autograd.grad((expected * upstream).sum(), list(leaves.values()))
    for name, mine, other in zip(leaves, ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        routed = name.startswith(("router", "addresses", "log_temperature"))
        assert mine.abs().max() > (1e-3 if not routed or (top_k, gates_over) != (1, "selected") else -1), name


def test_gates():
    h = torch.randn(ROWS, 6)
    selected = make()(h, return_routing=True)[1].gates
    torch.testing.assert_close(selected.sum(-1), torch.ones(ROWS))
    shares = make(gates_over="all")(h, return_routing=True)[1].gates
    assert (shares.sum(-1) < 1 - 1e-3).all()
    everything = make(EXPERTS, gates_over="all")(h, return_routing=True)[1].gates
    torch.testing.assert_close(everything.sum(-1), torch.ones(ROWS))


@pytest.mark.parametrize("gates_over", ["selected", "all"])
def test_sparse_rows_give_the_results_of_dense_rows(gates_over):
    layer = make(gates_over=gates_over)
    features, positions = F.dropout(torch.randn(ROWS, 4), 0.6), torch.randn(ROWS, 2)
    outcomes = []
    for rows in (torch.cat([features, positions], dim=1), SparseRows(features.to_sparse_csr(), positions)):
        y, routing = layer(rows, return_routing=True)
        gradients = torch.autograd.grad(y.square().sum(), list(layer.parameters()))
        outcomes.append((y, *routing, *gradients))
    torch.testing.assert_close(*outcomes)
    for pretrain in ("first", "proportional"):
        layer.pretrain = pretrain
        torch.testing.assert_close(layer.expert_forward(rows), layer.expert_forward(rows.to_dense()))


def test_noise_is_for_training_alone():
    layer, h = make(noise=3.0), torch.randn(ROWS, 6)
    torch.manual_seed(1)
    y = layer(h)
    torch.manual_seed(1)
    noise = 3.0 / EXPERTS * torch.randn(ROWS, EXPERTS)
    torch.testing.assert_close(y, plain(layer, h, noise)[0])
    assert not torch.allclose(y, plain(layer, h)[0])
    torch.testing.assert_close(layer.eval()(h), plain(layer, h)[0])
    layer.noise, before = 0.0, torch.get_rng_state()
    layer.train()(h)
    assert torch.equal(torch.get_rng_state(), before), "without noise, nothing is drawn"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_in_half_precision(dtype):
    """The router computes in float32, as under autocast, and so do its gates."""
    layer, h = make(EXPERTS).to(dtype), torch.randn(ROWS, 6).to(dtype)
    y, routing = layer(h, return_routing=True)
    assert (y.dtype, routing.gates.dtype) == (dtype, torch.float32)
    exact = make(EXPERTS).double()
    exact.load_state_dict(layer.state_dict())
    expected, gates = plain(exact, h.double())
    torch.testing.assert_close(y.double(), expected, rtol=0.05, atol=0.05)
    torch.testing.assert_close(routing.gates.double(), gates.gather(-1, routing.experts.long()), rtol=0.05, atol=0.01)
    y.sum().backward()
    assert layer.addresses.grad.isfinite().all()


def test_dropout_leaves_the_router_alone():
    layer, h = make(dropout=0.5), torch.randn(ROWS, 6)
    (dropped, routing), (clean, calm) = layer(h, return_routing=True), layer.eval()(h, return_routing=True)
    assert not torch.allclose(dropped, clean)
    assert torch.equal(routing.gates, calm.gates)
    sparse = h.to_sparse_csr()
    torch.testing.assert_close(layer(sparse), clean)
    assert not torch.allclose(layer.train()(sparse), clean)


@pytest.mark.parametrize("pretrain", ["first", "proportional"])
def test_dropout_applies_in_pretraining(pretrain):
    layer, h = make(dropout=0.5, pretrain=pretrain), torch.randn(ROWS, 6)
    torch.manual_seed(3)
    found = layer.expert_forward(h)
    torch.manual_seed(3)
    torch.testing.assert_close(found, layer.eval().expert_forward(dropout(h, 0.5)))


def test_temperature_and_scale_are_cut_at_a_hundred():
    layer, h = make(), torch.randn(ROWS, 6)
    with torch.no_grad():
        layer.log_scale.fill_(50.0)
        layer.log_temperature.fill_(50.0)
    capped = layer(h)
    with torch.no_grad():
        layer.log_scale.fill_(np.log(100.0))
        layer.log_temperature.fill_(np.log(100.0))
    torch.testing.assert_close(capped, plain(layer, h)[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", [ROWS, EXPERTS, 2])
def test_pretraining(rows):
    h = torch.randn(rows, 6)
    layer = make(pretrain="first")
    torch.testing.assert_close(layer.expert_forward(h), F.linear(h, layer.weight[0], layer.bias[0]))
    layer = make(pretrain="proportional")
    expert = [next(e for e in range(EXPERTS) if row < rows * (e + 1) // EXPERTS) for row in range(rows)]
    expected = torch.stack([layer.weight[e] @ h[row] + layer.bias[e] for row, e in enumerate(expert)])
    torch.testing.assert_close(layer.expert_forward(h), expected)


def test_clones():
    layer = make()
    weight, bias = layer.weight[0].clone(), layer.bias[0].clone()
    assert not torch.allclose(layer.weight[1], weight)
    layer.clone_expert()
    assert all(torch.equal(layer.weight[e], weight) and torch.equal(layer.bias[e], bias) for e in range(EXPERTS))


def test_initial_values():
    """Cosines do not depend on the length of the addresses, but the first steps do."""
    layer = MoELayer(6, 400, router_features=400)
    assert layer.addresses.std().item() == pytest.approx(0.01, rel=0.1)
    for parameter in (layer.weight, layer.bias):
        assert parameter.abs().max().item() == pytest.approx(6**-0.5, rel=0.01), "as in torch.nn.Linear"
    assert layer.log_temperature.exp().item() == layer.log_scale.exp().item() == pytest.approx(2.0)


def test_too_many_experts_a_row():
    with pytest.raises(ValueError, match="top_k is 6, expected between 1 and num_experts=5"):
        make(6)


@pytest.fixture
def trainer(small_graph, quick):
    """Two epochs of pretraining, without randomness."""

    def make(**options) -> MoETrainer:
        options = {"pretrain_epochs": 2, "pretrain": "first", "dropout": 0.0, "noise": 0.0, **options}
        config = quick.updated({"moe": options})
        split = split_graph(small_graph)
        model = MoEStudent(12, 8, 3, num_experts=4, top_k=2, noise=0.0, pretrain=options["pretrain"])
        return MoETrainer(model, split, outputs_from_logits(torch.randn(60, 3), split), config, None)

    return make


@pytest.mark.parametrize("pretrain", ["first", "proportional"])
def test_routing_begins_after_pretraining(trainer, pretrain):
    ours = trainer(pretrain=pretrain)
    optimizer, routers = ours.optimizer, [layer.router.weight.clone() for layer in ours.model.layers]
    for epoch in range(2):
        ours.train_epoch(epoch)
        assert ours.model.pretraining
    before = [layer.weight.detach().clone() for layer in ours.model.layers]
    ours.begin_epoch(2)
    assert not ours.model.pretraining
    for layer, weight, router in zip(ours.model.layers, before, routers, strict=True):
        expected = weight[:1].expand_as(weight) if pretrain == "first" else weight
        assert torch.equal(layer.weight, expected)
        assert torch.equal(layer.router.weight, router), "nobody asked the router"
    assert (ours.optimizer is optimizer) == (pretrain == "proportional"), "clones start with a new one"
    ours.train_epoch(2)
    assert not torch.equal(ours.model.layers[0].router.weight, routers[0])
    resumed = trainer(pretrain=pretrain)
    for epoch in (2, 3):  # the first epoch of routing begins with clones, whose preparation is not repeated later
        resumed.resume_at(epoch)
        assert resumed.model.pretraining == (epoch == 2)


def variation(numbers) -> float:
    return np.var(numbers, ddof=1) / (np.mean(numbers) ** 2 + 1e-10)


def expected_balance(routing, num_experts) -> float:
    gates, experts = routing.gates.detach().numpy(), routing.experts.numpy()
    importance = [gates[experts == e].sum() for e in range(num_experts)]
    return variation(importance) + variation([(experts == e).sum() for e in range(num_experts)])


def test_balance_loss():
    routing = make(gates_over="all")(torch.randn(ROWS, 6), return_routing=True)[1]
    loss = balance_loss(routing, EXPERTS)
    assert loss.item() == pytest.approx(expected_balance(routing, EXPERTS), rel=1e-5)
    assert loss.requires_grad
    rows = torch.arange(10)[:, None]
    even = Routing(torch.full((10, 1), 0.3), rows % 5, None)
    assert balance_loss(even, 5).item() == pytest.approx(0, abs=1e-6)


def test_balance_is_part_of_the_loss(trainer):
    def loss_of(weight, pretrain_epochs=0) -> tuple[float, float]:
        torch.manual_seed(0)
        ours = trainer(load_balance_weight=weight, pretrain_epochs=pretrain_epochs)
        with torch.no_grad():
            routings = ours.model(ours.observed_x, return_trace=True)[1].routings
        return ours.train_epoch(0), sum(expected_balance(routing, 4) for routing in routings)

    without, balance = loss_of(0.0)
    assert balance > 0.1
    assert loss_of(0.3)[0] == pytest.approx(without + 0.3 * balance, rel=1e-4)
    assert loss_of(0.3, 2)[0] == loss_of(0.0, 2)[0], "nothing is routed in pretraining"


def test_further_experts_are_active_ones(small_graph, quick):
    def run(**options):
        config = quick.updated({"moe": {"max_epochs": 2, "pretrain_epochs": 1, **options}})
        return rbm.distill(small_graph, config=config, methods=["moe"], measure_latency=False)

    plain_run, wider = run(), run(extra_experts=1, gates_over="all", pretrain="proportional")
    assert [layer.top_k for layer in plain_run.student.layers] == [2, 2]
    assert [layer.top_k for layer in wider.student.layers] == [3, 3]
    assert {layer.gates_over for layer in wider.student.layers} == {"all"}
    one_expert = sum(layer.weight[0].numel() + layer.bias[0].numel() for layer in wider.student.layers)
    summaries = [result.summary["moe"] for result in (plain_run, wider)]
    assert summaries[0]["parameters"] == summaries[1]["parameters"]
    assert summaries[1]["active_parameters"] - summaries[0]["active_parameters"] == one_expert
    for summary in summaries:
        assert summary["epochs"] == 3
        assert summary["best_epoch"] > 0, "an epoch of pretraining is not selected"


def test_counted_parameters():
    student = MoEStudent(6, 8, 3, num_layers=1, num_experts=4, top_k=2)
    router = 6 * 8 + 8 + 8 * 4 + 2  # addresses have the hidden width
    assert count_parameters(student) == (router + 4 * (6 * 3 + 3), router + 2 * (6 * 3 + 3))
