"""Memory updates: once per training forward, not repeated by recomputation, equal on every rank."""

import copy
import socket

import pytest
import torch
import torch.multiprocessing as mp
from kept_nodes import gradient_node_is_kept
from ranks import train_rank
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import rbm
from rbm import FusedRbMLayer


def expected_memory(layer, rows):
    """Eq. 4 by hand: a softmax over each expert's rows."""
    cosines = F.normalize(rows, dim=-1) @ F.normalize(layer.memory, dim=-1).T
    top, experts = cosines.topk(layer.top_k, dim=-1)
    gates = torch.softmax(top, dim=-1)
    memory = layer.memory.clone()
    for i in range(layer.num_experts):
        row, choice = (experts == i).nonzero(as_tuple=True)
        if len(row):
            share = torch.softmax(gates[row, choice], dim=0)
            target = (share[:, None] * F.normalize(rows[row], dim=-1)).sum(0)
            memory[i] = layer.decay * F.normalize(layer.memory[i], dim=0) + (1 - layer.decay) * target
    return memory


def make(**options):
    return FusedRbMLayer(6, 4, 5, 2, dtype=torch.float64, **options)


@pytest.mark.parametrize("backward", [True, False])
def test_a_step_keeps_no_part_of_its_graph(backward):
    layer, x = make().train(), torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    for _ in range(2):  # the memory that a pass moves is set in the next one
        y = layer(x)
        if backward:
            y.sum().backward()
    del y
    assert not [name for name, leaf in [*layer.named_parameters(), ("x", x)] if gradient_node_is_kept(leaf)]


@pytest.mark.parametrize(
    "trigger",
    [
        lambda layer: layer.eval(),
        lambda layer: layer.update_memory(),
        lambda layer: layer.state_dict(),
        lambda layer: layer(torch.empty(0, 6, dtype=torch.float64)),
        lambda layer: nn.Sequential(layer).eval(),
        lambda layer: nn.Sequential(layer).state_dict(),
    ],
    ids=["eval", "update_memory", "state_dict", "next forward", "parent's eval", "parent's state_dict"],
)
def test_follows_what_the_forward_recorded_once(trigger):
    layer, rows = make(), torch.randn(13, 6, dtype=torch.float64)
    expected, before = expected_memory(layer, rows), layer.memory.clone()
    layer(rows)
    assert torch.equal(layer.memory, before), "the forward itself only records"
    trigger(layer)
    torch.testing.assert_close(layer.memory, expected)
    layer.eval()
    layer.update_memory()
    torch.testing.assert_close(layer.memory, expected, msg="the second time there is nothing to follow")


def test_moves_once_a_training_forward():
    layer = make()
    for _ in range(3):
        rows = torch.randn(9, 6, dtype=torch.float64)
        layer.update_memory()
        expected = expected_memory(layer, rows)
        layer(rows)
    layer.eval()
    torch.testing.assert_close(layer.memory, expected)


def test_the_attribute_alone_ends_training_as_eval_does():
    """Code that freezes parts, or restores modes, sets it; the next answers were those before the last batch."""
    layer, rows = make(), torch.randn(9, 6, dtype=torch.float64)
    expected = expected_memory(layer, rows)
    layer(rows)
    layer.training = False
    torch.testing.assert_close(layer.memory, expected)


def test_eval_forward_moves_nothing():
    layer = make().eval()
    before = layer.memory.clone()
    layer(torch.randn(9, 6, dtype=torch.float64))
    layer.train().eval()
    assert torch.equal(layer.memory, before)


def test_expert_without_rows_and_bad_rows():
    layer = make()
    with torch.no_grad():
        layer.memory.copy_(-torch.eye(6, dtype=torch.float64)[:5])
        layer.memory[:2].abs_()
    rows = torch.zeros(8, 6, dtype=torch.float64)
    rows[:, :2] = torch.rand(8, 2, dtype=torch.float64) + 0.1
    poisoned = rows.clone()
    poisoned = torch.cat([poisoned, torch.full((1, 6), float("nan"), dtype=torch.float64)])
    twin = copy.deepcopy(layer)
    idle = layer.memory[2:].clone()
    layer(rows)
    twin(poisoned)
    layer.eval()
    twin.eval()
    assert torch.equal(layer.memory[2:], idle)
    torch.testing.assert_close(twin.memory, layer.memory)


@pytest.mark.parametrize("make_layer", [lambda: FusedRbMLayer(6, 4, 5, 2), lambda: rbm.RbMFeedForward(6, 4, 5, 2)])
def test_eval_of_an_average_of_models_ends_at_the_memory_of_the_model(make_layer):
    """AveragedModel copies buffers: the recorded statistics of a model that trains come to one in eval mode."""
    model = make_layer()
    average = AveragedModel(model).eval()
    for _ in range(3):
        model(torch.randn(9, 6))
        average.update_parameters(model)
    average.eval()
    assert torch.equal(average.module.memory, model.eval().memory)
    before = average.module.memory.clone()
    assert torch.equal(average.state_dict()["module.memory"], before), "nothing is left to apply"


def test_eval_of_a_layer_that_was_made_for_inference():
    with torch.inference_mode():
        layer = make().eval()
    before = layer.memory.clone()
    assert torch.equal(layer.eval().memory, before)


def test_what_a_layer_recorded_in_inference_mode_is_applied_outside():
    layer, x = make(), torch.randn(9, 6, dtype=torch.float64)
    with torch.inference_mode():
        made = [copy.deepcopy(layer) for _ in range(3)]
        for each in made:
            each(x)
    layer(x)
    made[0].eval()
    made[1].state_dict()
    made[2].update_memory()
    for each in made:
        torch.testing.assert_close(each.memory, layer.eval().memory)


def test_assigning_a_state_to_a_layer_that_was_made_in_inference_mode_makes_it_train():
    with torch.inference_mode():
        layer = make()
    layer.load_state_dict(make().state_dict(), assign=True)
    layer.track_usage = True
    layer(torch.randn(9, 6, dtype=torch.float64)).sum().backward()
    assert layer.usage.sum() == 18
    assert layer.pending_total.any()


@pytest.mark.parametrize("make_layer", [lambda: FusedRbMLayer(6, 4, 5, 2), lambda: rbm.RbMFeedForward(6, 4, 5, 2)])
@pytest.mark.parametrize(
    ("saved", "memory"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)],
)
def test_assigning_a_state_in_another_precision_keeps_a_memory_that_moves(make_layer, saved, memory):
    state = {name: value.to(saved) for name, value in make_layer().state_dict().items()}
    layer = make_layer()
    layer.load_state_dict(state, assign=True)
    assert layer.memory.dtype == layer.pending_sum.dtype == memory
    assert torch.equal(layer.memory, state["memory"].to(memory))
    rows = torch.randn(9, 6, dtype=saved)
    layer(rows).sum().backward()
    with torch.no_grad():
        assert layer.eval()(rows).isfinite().all()


def test_assigning_a_memory_of_float64_beside_weights_of_float32():
    layer = FusedRbMLayer(6, 4, 5, 2)
    state = layer.state_dict()
    layer.load_state_dict(state | {"memory": state["memory"].double()}, assign=True)
    assert layer(torch.randn(9, 6)).dtype == layer.memory.dtype == torch.float32


def test_loading_forgets_what_was_recorded():
    layer = make()
    saved = copy.deepcopy(layer.state_dict())
    layer(torch.randn(9, 6, dtype=torch.float64))
    layer.load_state_dict(saved)
    layer.eval()
    assert torch.equal(layer.memory, saved["memory"])


def test_loading_parameters_alone_keeps_what_was_recorded():
    layer = make()
    alone = {name: value for name, value in make().state_dict().items() if name != "memory"}
    layer(torch.randn(9, 6, dtype=torch.float64))
    recorded = copy.deepcopy(layer)
    layer.load_state_dict(alone, strict=False)
    assert torch.equal(layer.eval().memory, recorded.eval().memory)
    assert torch.equal(layer.weight, alone["weight"])


def test_reset_parameters_forgets_what_was_recorded_and_counted():
    layer = FusedRbMLayer(6, 4, 5, 2)
    rbm.track_usage(layer)
    layer(torch.randn(9, 6))
    layer.reset_parameters()
    drawn = layer.memory.clone()
    assert torch.equal(layer.eval().memory, drawn)
    assert not layer.usage.any()


def test_conversion_keeps_what_was_recorded_and_counted():
    layer, rows = FusedRbMLayer(6, 4, 5, 2), torch.randn(9, 6)
    rbm.track_usage(layer)
    layer(rows)
    twin = copy.deepcopy(layer)
    layer.double().float()
    assert torch.equal(layer.usage, twin.usage)
    assert layer.usage.any()
    assert torch.equal(layer.eval().memory, twin.eval().memory)


@pytest.mark.parametrize("convert", [nn.Module.double, nn.Module.half, nn.Module.share_memory])
def test_a_trained_memory_stays_the_tensor_that_its_optimizer_holds(convert):
    layer = FusedRbMLayer(6, 4, 5, 2)
    memory = layer.memory.requires_grad_()
    optimizer = torch.optim.SGD([memory], lr=0.1)
    rbm.nn.losses.self_similarity_loss(layer.memory).backward()
    convert(layer)
    assert layer.memory is memory
    assert layer.memory.is_leaf
    before = memory.detach().clone()
    rbm.nn.losses.self_similarity_loss(layer.memory).backward()
    optimizer.step()
    assert not torch.equal(layer.memory, before)
    assert copy.deepcopy(layer).memory.requires_grad
    layer.to("meta").to_empty(device="cpu")
    assert layer.memory.requires_grad
    assert layer.memory.is_leaf


def test_a_state_that_is_assigned_to_a_layer_on_the_meta_device_leaves_counts_that_work():
    layer = FusedRbMLayer(6, 4, 5, 2, device="meta")
    layer.load_state_dict(FusedRbMLayer(6, 4, 5, 2).state_dict(), assign=True)
    rbm.track_usage(layer)
    layer(torch.randn(9, 6))
    assert rbm.expert_usage(layer)[""].rows == 9


@pytest.mark.parametrize(
    "make_layer", [lambda: FusedRbMLayer(6, 4, device="meta"), lambda: rbm.RbMFeedForward(6, 4, device="meta")]
)
def test_a_layer_from_the_meta_device_starts_without_statistics(make_layer):
    """``to_empty`` leaves any bytes, and neither parameters nor a state_dict replace the buffers that are not saved."""
    torch.use_deterministic_algorithms(True)  # memory that is not initialised holds NaN and the largest integers
    try:
        layer = nn.Sequential(make_layer()).to_empty(device="cpu")[0]
    finally:
        torch.use_deterministic_algorithms(False)
    assert layer.memory.isnan().all()
    for buffer in (layer.pending_sum, layer.pending_total, layer.usage):
        assert not buffer.any()


def test_loading_under_inference_mode_leaves_a_layer_that_trains():
    layer, rows = make(), torch.randn(9, 6, dtype=torch.float64)
    with torch.inference_mode():
        layer.load_state_dict(copy.deepcopy(layer.state_dict()))
    expected = expected_memory(layer, rows)
    layer(rows).sum().backward()
    torch.testing.assert_close(layer.eval().memory, expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_gives_equal_gradients_and_memory(use_reentrant):
    plain = nn.Sequential(make(dropout=0.3), nn.ReLU(), FusedRbMLayer(4, 4, 5, 2, dtype=torch.float64))
    twin = copy.deepcopy(plain)
    for _ in range(3):
        x = torch.randn(20, 6, dtype=torch.float64)
        gradients = []
        for model, checkpointed in ((plain, False), (twin, True)):
            torch.manual_seed(3)
            model.zero_grad()
            rows = x.clone().requires_grad_()
            y = rows
            for module in model:
                y = checkpoint(module, y, use_reentrant=use_reentrant) if checkpointed else module(y)
            y.square().sum().backward()
            gradients.append([rows.grad, *(p.grad for p in model.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    a, b = plain.state_dict(), twin.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", [FusedRbMLayer, rbm.RbMFeedForward])
def test_a_checkpointed_layer_that_is_called_several_times_inside_accumulate_memory(kind):
    plain = kind(6, 6, num_experts=5, top_k=1, dtype=torch.float64, decay=0.1)
    twin = copy.deepcopy(plain)
    for _ in range(2):
        x, gradients = torch.randn(9, 6, dtype=torch.float64), []
        for layer in (plain, twin):
            layer.zero_grad()
            with layer.accumulate_memory():
                y = x
                for _ in range(3):
                    y = y + (layer(y) if layer is plain else checkpoint(layer, y, use_reentrant=False))
                y.square().sum().backward()
            gradients.append([p.grad for p in layer.parameters() if p.grad is not None])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert torch.equal(plain.eval().memory, twin.eval().memory)


@pytest.mark.compiler
@pytest.mark.parametrize("outside", [True, False], ids=["of a compiled block", "inside a compiled model"])
def test_checkpointing_and_compilation_together_move_the_memory_once(outside):
    """Compiled code cannot read Python's state: it checks at run time whether it is a recomputed forward."""
    plain = nn.Sequential(make(decay=0.3), nn.ReLU(), FusedRbMLayer(4, 4, 5, 2, dtype=torch.float64, decay=0.3))
    rbm.track_usage(plain)
    twin = copy.deepcopy(plain)

    def by_blocks(rows):
        return checkpoint(twin, rows, use_reentrant=False)

    if outside:
        twin.compile(backend="aot_eager")
        checkpointed = by_blocks
    else:
        checkpointed = torch.compile(by_blocks, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        gradients = []
        rows = torch.randn(9, 6, dtype=torch.float64)
        for model, call in ((plain, plain), (twin, checkpointed)):
            model.zero_grad()
            call(rows).square().sum().backward()
            gradients.append([p.grad for p in model.parameters()])
        for got, expected in zip(*reversed(gradients), strict=True):
            torch.testing.assert_close(got, expected)
    for layer, expected in ((twin[0], plain[0]), (twin[2], plain[2])):
        torch.testing.assert_close(layer.eval().memory, expected.eval().memory)
        assert torch.equal(layer.usage, expected.usage)


def test_two_forwards_before_one_backward():
    """The backward of the first forward must not be affected by the later memory update."""
    layer, x = make(detach_gates=False), torch.randn(12, 6, dtype=torch.float64)
    alone = copy.deepcopy(layer)
    alone(x).sum().backward()
    first = layer(x).sum()
    second = layer(torch.randn(12, 6, dtype=torch.float64)).sum() * 0.0
    (first + second).backward()
    torch.testing.assert_close(layer.attention.grad, alone.attention.grad)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_ranks_agree_with_each_other_and_with_one_process():
    layer = make()
    state = copy.deepcopy(layer.state_dict())
    batches = [torch.randn(rows, 6, dtype=torch.float64) for rows in (12, 7, 9)]
    with mp.get_context("spawn").Manager() as manager:
        results = manager.dict()
        mp.spawn(train_rank, (2, _free_port(), state, batches, results), nprocs=2)
        ranks = dict(results)
    for batch in batches:
        layer.zero_grad()
        layer(batch).square().sum().backward()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter -= 0.01 * parameter.grad
    assert ranks[0] == ranks[1]
    for name, value in layer.eval().state_dict().items():
        torch.testing.assert_close(torch.tensor(ranks[0][name], dtype=torch.float64), value, msg=name)


@pytest.mark.compiler
@pytest.mark.parametrize("make_layer", [lambda: FusedRbMLayer(6, 4, 5, 2), lambda: rbm.RbMFeedForward(6, 4, 5, 2)])
def test_an_annealed_decay_compiles_no_graph_for_each_value(make_layer):
    layer, x, counter = make_layer(), torch.randn(12, 6), CompileCounterWithBackend("aot_eager")
    twin = copy.deepcopy(layer)
    compiled = torch.compile(twin, fullgraph=True, backend=counter)
    for step in range(12):
        layer.decay = twin.decay = 0.5 + 0.04 * step
        torch.testing.assert_close(compiled(x), layer(x))
    torch.testing.assert_close(twin.eval().memory, layer.eval().memory)
    assert counter.frame_count <= 2, "one graph for the first value and one for all others"
