"""The routing of models of any nesting: records, auxiliary losses, and counts."""

import copy
import pickle

import pytest
import torch
from kept_nodes import gradient_node_is_kept
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import rbm
from rbm import FusedRbMLayer, RbMFeedForward
from rbm.config import RbMConfig
from rbm.nn import losses
from rbm.nn.routing_record import visit_router_inputs


class Block(nn.Module):
    """A residual block, so that a layer is nested three modules deep."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.norm, self.checkpointed = nn.LayerNorm(6), checkpointed
        self.experts = RbMFeedForward(6, 5, 4, 2)

    def forward(self, x):
        h = self.norm(x)
        return x + (checkpoint(self.experts, h, use_reentrant=False) if self.checkpointed else self.experts(h))


def model(**options):
    return nn.Sequential(nn.Linear(3, 6), nn.Sequential(Block(**options), nn.ReLU()), FusedRbMLayer(6, 2, 5, 3))


NAMES = ["1.0.experts", "2"]


@pytest.mark.parametrize("training", [True, False])
def test_every_layer_is_recorded_and_answers_as_ever(training):
    net, x = model().train(training), torch.randn(7, 4, 3)
    twin = copy.deepcopy(net)
    arrived = []
    net[2].register_forward_pre_hook(lambda layer, args: arrived.append(args[0]))
    with torch.set_grad_enabled(training):
        expected = twin(x)
        with rbm.record_routing(net) as routing:
            assert torch.equal(net(x), expected)
    assert list(routing) == NAMES
    assert routing["1.0.experts"].gates.shape == (7, 4, 2)
    torch.testing.assert_close(routing["2"], net[2].route(arrived[0]))
    assert routing["2"].gates.requires_grad == training
    with torch.no_grad():
        net(x)
    assert len(routing.calls["2"]) == 1, "the block has ended"
    assert not net[2]._forward_hooks


def test_what_return_routing_gives_is_what_is_recorded():
    layer, x = FusedRbMLayer(6, 2, 5, 3), torch.randn(9, 6)
    with rbm.record_routing(layer) as routing:
        first = layer(x, return_routing=True)[1]
        second = layer(h=x[:4], return_routing=True)[1]
        layer(h=x.view(3, 3, 6))
    assert routing.calls[""][:2] == [first, second]
    assert routing[""].experts.shape == (22, 3)
    assert torch.equal(routing[""].experts[9:13], second.experts)
    assert repr(routing) == "RoutingRecord('': 22 rows)"


@pytest.mark.parametrize("kind", [FusedRbMLayer, RbMFeedForward])
def test_a_subclass_or_a_hook_that_returns_another_tuple_is_recorded(kind):
    class WithNorm(kind):
        def forward(self, h):
            y = super().forward(h)
            return y, y.norm()

    class Alone(kind):
        def forward(self, h):
            return (super().forward(h),)

    hooked, x = kind(6, 3, 5, 2), torch.randn(9, 6)
    hooked.register_forward_hook(lambda layer, args, output: (output, {}))
    for layer in (WithNorm(6, 3, 5, 2), Alone(6, 3, 5, 2), hooked):
        with rbm.record_routing(layer) as routing:
            layer(x)
        torch.testing.assert_close(routing[""], layer.route(x))


def test_copies_and_pickles_made_inside_hear_nothing():
    net, x = model(), torch.randn(7, 3)
    with rbm.record_routing(net) as routing:
        for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            copied(x)
            assert [hook.record for hook in copied[2]._forward_hooks.values()] == [None]
        assert len(routing) == 0
        net.share_memory()(x)
    assert list(routing) == NAMES


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after the block"])
def test_checkpointed_layers_are_recorded_once_and_their_gradients_stay(inside):
    plain, net = model(), model(checkpointed=True)
    net.load_state_dict(plain.state_dict())
    rbm.track_usage(net)
    x = torch.randn(7, 3)
    for each in (plain, net):
        with rbm.record_routing(each) as routing:
            loss = each(x).square().sum() + rbm.auxiliary_loss(each)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        assert [len(calls) for calls in routing.calls.values()] == [1, 1]
    for p, q in zip(plain.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert rbm.expert_usage(net)["1.0.experts"].rows == 7


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_repeated_forward_is_neither_recorded_nor_counted(use_reentrant):
    layer, x = FusedRbMLayer(6, 2, 5, 3), torch.randn(7, 6, requires_grad=True)
    rbm.track_usage(layer)
    with torch.utils.checkpoint.set_checkpoint_early_stop(False), rbm.record_routing(layer) as routing:
        checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
    assert len(routing.calls[""]) == 1
    assert rbm.expert_usage(layer)[""].rows == 7


def test_a_record_keeps_no_part_of_its_graph_and_notices_rows_that_change():
    layer, x = FusedRbMLayer(6, 2, 5, 3), torch.randn(7, 6, requires_grad=True)
    with rbm.record_routing(layer) as routing:
        layer(x)
    del routing
    assert not gradient_node_is_kept(x)
    h = 2 * x
    with rbm.record_routing(layer) as routing:
        layer(h)
    h.detach().add_(1)
    with pytest.raises(RuntimeError, match=r"a tensor \[7, 6\] .* has been modified in place since"):
        routing[""].cosines.sum().backward()


def test_auxiliary_loss_has_the_weights_of_the_configuration():
    net, config = model(), RbMConfig()
    names = ("commitment_weight", "self_similarity_weight", "load_balance_weight")
    with rbm.record_routing(net) as routing:
        net(torch.randn(11, 3))
    expected = rbm.auxiliary_loss(net, routing, **{name: getattr(config, name) for name in names})
    torch.testing.assert_close(rbm.auxiliary_loss(net, routing), expected, rtol=0, atol=0)


def test_auxiliary_loss_is_the_sum_over_layers():
    net, x = model(), torch.randn(11, 3)
    weights = {"commitment_weight": 0.3, "self_similarity_weight": 0.2, "load_balance_weight": 0.1}
    with rbm.record_routing(net) as routing:
        net(x)
        inside = rbm.auxiliary_loss(net, **weights)
    expected = sum(
        0.3 * losses.commitment_loss(routing[name])
        + 0.2 * losses.self_similarity_loss(layer.memory)
        + 0.1 * losses.load_balance_loss(routing[name], layer.num_experts)
        for name, layer in (("1.0.experts", net[1][0].experts), ("2", net[2]))
    )
    torch.testing.assert_close(inside, expected)
    torch.testing.assert_close(rbm.auxiliary_loss(net, routing, **weights), expected)
    alone = rbm.auxiliary_loss(net[2], routing, **weights)
    of_the_last = 0.3 * losses.commitment_loss(routing["2"]) + 0.1 * losses.load_balance_loss(routing["2"], 5)
    torch.testing.assert_close(alone, of_the_last + 0.2 * losses.self_similarity_loss(net[2].memory))
    with rbm.record_routing(net), pytest.raises(ValueError, match="holds no forward of it"):
        rbm.auxiliary_loss(net)
    expected.backward()
    assert net[0].weight.grad.abs().sum() > 0
    assert rbm.auxiliary_loss(net, routing, **dict.fromkeys(weights, 0)) == 0
    with pytest.raises(ValueError, match=r"routing of the model is not recorded: call the model .* inside"):
        rbm.auxiliary_loss(net)


def test_auxiliary_loss_names_what_is_no_record():
    """Such as the routing of one layer, which its forward returns."""
    layer = rbm.FusedRbMLayer(6, 3, 4, 2)
    _, routing = layer(torch.randn(5, 6), return_routing=True)
    for given, kind in ((routing, "Routing"), ("a", "str")):
        with pytest.raises(TypeError, match=rf"^routing is a {kind}, expected what rbm\.record_routing\(model\)"):
            rbm.auxiliary_loss(layer, given)


@pytest.mark.parametrize("name", ["commitment_weight", "self_similarity_weight", "load_balance_weight"])
def test_auxiliary_loss_names_what_is_no_weight(name):
    layer = rbm.FusedRbMLayer(6, 3, 4, 2)
    with rbm.record_routing(layer):
        layer(torch.randn(5, 6))
        for given in ("a", None, True, -0.1, float("nan"), float("inf")):
            with pytest.raises((TypeError, ValueError), match=rf"^{name} is '?{given}'?, expected"):
                rbm.auxiliary_loss(layer, **{name: given})


def test_auxiliary_loss_takes_the_innermost_record_of_the_whole_model():
    net = model().eval()
    last = net[2]
    with rbm.record_routing(net) as outer:
        net(torch.randn(7, 3))
        with rbm.record_routing(last) as inner:
            net(torch.randn(5, 3))
            torch.testing.assert_close(rbm.auxiliary_loss(last), rbm.auxiliary_loss(last, inner))
            torch.testing.assert_close(rbm.auxiliary_loss(net), rbm.auxiliary_loss(net, outer))
        torch.testing.assert_close(rbm.auxiliary_loss(last), rbm.auxiliary_loss(last, outer))
    blocks = rbm.record_routing(net), rbm.record_routing(last)
    records = [block.__enter__() for block in blocks]
    blocks[0].__exit__(None, None, None)  # generators may end in any order
    net(torch.randn(5, 3))
    torch.testing.assert_close(rbm.auxiliary_loss(last), rbm.auxiliary_loss(last, records[1]))
    with pytest.raises(ValueError, match="is not recorded"):
        rbm.auxiliary_loss(net)
    blocks[1].__exit__(None, None, None)


def visited(model, inputs):
    found = []
    visit_router_inputs(model, inputs, lambda name, layer, rows: found.append((name, rows)))
    return found


def test_a_router_is_visited_once_with_the_rows_that_it_routes():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = FusedRbMLayer(6, 6, 5, 3)

        def forward(self, x):
            return self.layer(self.layer(h=x))

    x = torch.randn(7, 6)
    [(name, rows)] = visited(Twice(), x)
    assert (name, rows.equal(x)) == ("layer", True)
    layer = FusedRbMLayer(6, 2, 5, 3)
    layer.register_forward_pre_hook(lambda layer, args: (-args[0],))
    [(_, rows)] = visited(layer, x)
    assert torch.equal(rows, -x)
    for inputs in ((x[:, :2].to_sparse_csr(), x[:, 2:]), (x.to_sparse_csr(),)):
        [(_, rows)] = visited(FusedRbMLayer(6, 2, 5, 3), inputs)
        assert torch.equal(rows.to_dense(), x)
    assert [(name, rows.requires_grad) for name, rows in visited(model(), x[:, :3])] == [
        (name, False) for name in NAMES
    ]


def test_models_without_such_layers_and_transformations_are_refused():
    with (
        pytest.raises(ValueError, match="model is a Linear without a layer that routes by memory"),
        rbm.record_routing(nn.Linear(2, 2)),
    ):
        pass
    layer, x = FusedRbMLayer(6, 2, 5, 3).eval(), torch.randn(3, 2, 6)
    expected = torch.func.vmap(layer)(x)
    with rbm.record_routing(layer), pytest.raises(RuntimeError, match="recorded inside a transformation"):
        torch.func.vmap(layer)(x)
    rbm.track_usage(layer)
    with pytest.raises(RuntimeError, match="set track_usage = False on the layer before"):
        torch.func.vmap(layer)(x)
    rbm.track_usage(layer, False)
    torch.testing.assert_close(torch.func.vmap(layer)(x), expected)


@pytest.mark.parametrize("training", [True, False])
def test_counts_are_those_of_the_routing_and_answers_stay(training):
    net, x = model().train(training), torch.randn(50, 3)
    twin = copy.deepcopy(net)
    rbm.track_usage(net)
    with torch.set_grad_enabled(training), rbm.record_routing(net) as routing:
        assert torch.equal(net(x), twin(x))
    usage = rbm.expert_usage(net)
    for name, experts in (("1.0.experts", 4), ("2", 5)):
        counts = torch.bincount(routing[name].experts.flatten(), minlength=experts)
        assert torch.equal(usage[name].counts, counts)
        assert usage[name].rows == 50
        assert usage[name].dead == [e for e in range(experts) if counts[e] == 0]
    copied = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    copied(x)
    assert rbm.expert_usage(copied)["2"].rows == 100
    assert rbm.expert_usage(net)["2"].rows == 50
    rbm.track_usage(net)
    assert rbm.expert_usage(net)["2"].rows == 0
    assert "usage" not in str(list(net.state_dict()))


def test_counts_stay_when_counting_stops_and_usage_is_a_snapshot():
    layer, x = FusedRbMLayer(6, 2, 5, 3), torch.randn(7, 6)
    rbm.track_usage(layer)
    layer(x)
    first = rbm.expert_usage(layer)[""]
    layer(x)
    assert first.rows == 7
    rbm.track_usage(layer, False)
    layer(x)
    assert rbm.expert_usage(layer)[""].rows == 14


def test_the_table_and_its_measures():
    from rbm.nn.usage import ExpertUsage, LayerUsage

    usage = ExpertUsage(first=LayerUsage(torch.tensor([10, 0, 10]), 2), second=LayerUsage(torch.tensor([4, 0]), 1))
    unused = LayerUsage(torch.tensor([0, 0]), 1)
    assert (unused.rows, unused.shares.tolist(), unused.evenness, unused.dead) == (0, [0.0, 0.0], 1.0, [0, 1])
    assert usage["first"].rows == 10
    assert usage["first"].shares.tolist() == [1.0, 0.0, 1.0]
    assert usage["first"].evenness == pytest.approx(0.63093, abs=1e-5)
    assert usage["second"].evenness == 0.0
    assert LayerUsage(torch.tensor([5]), 1).evenness == 1.0, "the only expert"
    assert LayerUsage(torch.tensor([1, 0]), 1).dead == [1]
    assert str(usage).splitlines() == [
        "layer         rows experts  least   most evenness  dead",
        "first           10       3   0.0% 100.0%     0.63     1",
        "second           4       2   0.0% 100.0%     0.00     1",
    ]
    with pytest.raises(ValueError, match="usage of the model is not counted"):
        rbm.expert_usage(model())


@pytest.mark.compiler
def test_compiled_models_count_and_accumulate_in_one_graph_and_are_recorded():
    net, x = nn.Sequential(FusedRbMLayer(6, 2, 5, 3)), torch.randn(8, 6)
    twin = copy.deepcopy(net)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    rbm.track_usage(compiled)
    with rbm.accumulate_memory(compiled):
        compiled(x[:4])
        with rbm.record_routing(compiled) as routing:
            compiled(x[4:])
    assert routing["0"].experts.shape == (4, 3)
    assert rbm.expert_usage(compiled)["0"].rows == 8
    twin(x)
    torch.testing.assert_close(net.eval()[0].memory, twin.eval()[0].memory)


@pytest.mark.compiler
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_record_inside_a_compiled_function_is_refused(fullgraph):
    net, x = model(), torch.randn(7, 3)

    def loss(x):
        with rbm.record_routing(net):
            return net(x).sum() + rbm.auxiliary_loss(net)

    expected = copy.deepcopy(net)(x)
    with pytest.raises(RuntimeError, match=r"read inside a compiled function.*: compile the model instead"):
        torch.compile(loss, backend="aot_eager", fullgraph=fullgraph)(x)
    torch.testing.assert_close(net(x), expected)


@pytest.mark.compiler
def test_the_last_block_to_end_lets_compiled_models_run_compiled_again():
    """Threads of a process end their blocks in any order."""
    graphs = CompileCounter()
    compiled = torch.compile(model(), backend=graphs)
    blocks = rbm.record_routing(compiled), rbm.record_routing(compiled)
    records = [block.__enter__() for block in blocks]
    compiled(torch.randn(7, 3))
    blocks[0].__exit__(None, None, None)
    compiled(torch.randn(7, 3))
    assert [len(record.calls["2"]) for record in records] == [1, 2]
    blocks[1].__exit__(None, None, None)
    assert graphs.frame_count == 0
    compiled(torch.randn(7, 3))
    assert graphs.frame_count == 1


def test_compiled_models_are_visited():
    net, x = nn.Sequential(nn.Linear(6, 6), FusedRbMLayer(6, 2, 5, 3)).eval(), torch.randn(8, 6)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager").eval()
    with torch.no_grad():
        compiled(x)  # in the mode of the visit, which compiles nothing then
    assert [name for name, _ in visited(compiled, x)] == ["1"]
