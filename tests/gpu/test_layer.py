"""The layer on a GPU: training with its memory, inference, graphs, compilers, autocast, and moves between devices."""

import copy
from itertools import pairwise

import pytest
import torch
from on_gpu import check_graph, check_no_wait, check_peak, check_repeats, check_side_stream, full_only, same_bits
from torch.nn import functional as F

from rbm import FusedRbMLayer
from rbm.nn.dropout import dropout
from rbm.nn.reference import ReferenceRbMLayer

STEPS = 4
OPTIONS = {
    "defaults": {},
    "no bias, no attention": {"bias": False, "input_attention": False},
    "live gates": {"detach_gates": False},
    "temperature": {"gate_temperature": 0.3},
    "one expert": {"num_experts": 1, "top_k": 1},
    "64 experts": {"num_experts": 64, "top_k": 8},
}


def sizes(gpu):
    return gpu.size((600, 100, 47), (12, 10, 6))


def make(gpu, **options):
    _, features, outputs = sizes(gpu)
    torch.manual_seed(0)
    return FusedRbMLayer(features, outputs, **{"num_experts": gpu.size(8, 4), "top_k": 2, **options})


def rows_of(gpu, seed=0, dtype=torch.float32):
    rows, features, _ = sizes(gpu)
    return torch.randn(rows, features, generator=torch.Generator().manual_seed(seed)).to(gpu.name, dtype)


def train(layer, batches, lr=0.05):
    """Steps of gradient descent; losses, gates and the final state, on the CPU."""
    seen = []
    for rows in batches:
        layer.zero_grad()
        y, routing = layer(rows, return_routing=True)
        loss = y.square().mean() + (routing.gates * routing.cosines).mean()
        loss.backward()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter -= lr * parameter.grad
        seen.append(torch.cat([loss.detach()[None], routing.gates.detach().mean(0)]).cpu())
    return torch.stack(seen), {name: value.cpu() for name, value in layer.eval().state_dict().items()}


@pytest.mark.core
@pytest.mark.parametrize("options", ["defaults", *full_only(*list(OPTIONS)[1:])])
def test_trains_like_the_reference(options, gpu):
    """Twins, one in float64 on the CPU by the eager reference layer: losses, gates, parameters and memories."""
    layer = make(gpu, **OPTIONS[options])
    twin = ReferenceRbMLayer(
        layer.in_features,
        layer.out_features,
        layer.num_experts,
        layer.top_k,
        dtype=torch.float64,
        **{name: value for name, value in OPTIONS[options].items() if name not in ("num_experts", "top_k")},
    )
    twin.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    batches = [rows_of(gpu, seed) for seed in range(STEPS)]
    expected, state = train(twin, [rows.cpu().double() for rows in batches])
    got, found = train(layer.to(gpu.name), batches)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
    assert found.keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=1e-5, msg=name)
    start = make(gpu, **OPTIONS[options]).memory
    assert (found["memory"] - start).norm(dim=-1).max() > 0.01, "the memory moved"


@pytest.mark.parametrize("rows", [pytest.param(600, id="two operators"), pytest.param(40, id="one operator")])
def test_answers_like_the_reference(rows, gpu):
    """Inference, by the kernel of small batches and by the two operators; with experts that are kept folded."""
    layer = make(gpu).to(gpu.name).eval()
    twin = ReferenceRbMLayer(layer.in_features, layer.out_features, layer.num_experts, 2, dtype=torch.float64).eval()
    twin.load_state_dict({name: value.cpu().double() for name, value in layer.state_dict().items()})
    x = rows_of(gpu)[:rows]
    with torch.no_grad():
        first, second = layer(x), layer(x)
    same_bits([first], [second], "the second answer")
    torch.testing.assert_close(first.cpu().double(), twin(x.cpu().double()).detach(), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        layer.weight.mul_(2.0)
        assert not torch.equal(layer(x), first), "folded experts follow the parameters"
        leading = layer(x[:6].reshape(2, 3, -1))
    assert leading.shape == (2, 3, layer.out_features)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *full_only(torch.float16)], ids=str)
def test_half_precision_keeps_a_float32_memory(dtype, gpu):
    """A row's output is rounded to the dtype, and so are the folded experts: 3 % of the largest."""
    layer = make(gpu).to(gpu.name)
    half = copy.deepcopy(layer).to(dtype)
    assert half.memory.dtype == torch.float32
    x = rows_of(gpu, dtype=dtype)
    y = half(x)
    y.float().square().mean().backward()
    assert y.dtype == half.weight.grad.dtype == dtype
    expected = layer(x.float())
    assert (y.float() - expected).abs().max() <= 0.03 * expected.abs().max()
    half.eval()
    layer.eval()
    torch.testing.assert_close(half.memory, layer.memory, rtol=1e-4, atol=1e-4)


def test_autocast(gpu):
    """The experts compute in bfloat16, the routing stays float32, parameters get float32 gradients."""
    layer = make(gpu).to(gpu.name).eval()
    x = rows_of(gpu)
    expected, routing = layer(x, return_routing=True)
    with torch.autocast(gpu.name, dtype=torch.bfloat16):
        y, inside = layer(x, return_routing=True)
        with torch.no_grad():
            answer = layer(x)
    assert y.dtype == answer.dtype == torch.bfloat16
    assert (y.float() - expected).abs().max() <= 0.03 * expected.abs().max()
    same_bits(inside, routing, "routing")
    with torch.autocast(gpu.name, dtype=torch.bfloat16):
        loss = layer.train()(x).float().square().mean()
    loss.backward()
    assert layer.weight.grad.dtype == torch.float32
    assert layer.weight.grad.isfinite().all()


def test_state_dict_across_devices(gpu):
    """Trained on the GPU, saved, loaded on the CPU and back: the same state, and the same outputs on the GPU."""
    layer = make(gpu).to(gpu.name)
    train(layer, [rows_of(gpu, 1)])
    state = {name: value.cpu() for name, value in layer.state_dict().items()}
    on_cpu = make(gpu).eval()
    on_cpu.load_state_dict(state)
    back = make(gpu).to(gpu.name).eval()
    back.load_state_dict(on_cpu.state_dict())
    x = rows_of(gpu)
    with torch.no_grad():
        same_bits([back(x)], [layer(x)], "loaded on the device")
        same_bits([copy.deepcopy(on_cpu).to(gpu.name)(x)], [layer(x)], "moved to the device")
        torch.testing.assert_close(on_cpu(x.cpu()), layer(x).cpu(), rtol=1e-4, atol=1e-4)


def training_step(gpu, **options):
    """A step that begins at given parameters and memory: ``call(rows, *state)``, and its ``draw``."""
    layer = make(gpu, **options).to(gpu.name)
    start = {name: value.clone() for name, value in layer.state_dict().items()}

    def call(rows, *state):
        with torch.no_grad():
            for value, given in zip((*layer.parameters(), layer.memory), state, strict=True):
                value.copy_(given)
            layer.pending_total.zero_()
        layer.zero_grad(set_to_none=True)
        h = rows.detach().requires_grad_()
        y = layer(h)
        grads = torch.autograd.grad(y, [h, *layer.parameters()], torch.ones_like(y))
        layer.update_memory()
        return y.detach(), *grads, layer.memory.clone()

    def draw(seed):
        torch.manual_seed(seed)
        drawn = [start[name] + 0.1 * torch.randn_like(start[name]) for name, _ in layer.named_parameters()]
        return rows_of(gpu, seed), *drawn, torch.randn_like(start["memory"])

    return call, draw


@pytest.mark.parametrize("options", ["live gates", *full_only("64 experts")])
class TestStep:
    """A whole training step: forward, gradients of rows and parameters, and the memory update."""

    @pytest.fixture
    def step(self, options, gpu):
        return training_step(gpu, **OPTIONS[options])

    def test_repeats(self, step, gpu):
        check_repeats(*step, gpu.size(20, 3))

    @pytest.mark.core
    def test_graph_with_new_inputs(self, step, gpu):
        check_graph(gpu, *step)

    @pytest.mark.core
    def test_waits_for_nothing(self, step, gpu):
        check_no_wait(gpu, *step)

    def test_side_stream(self, step, gpu):
        check_side_stream(gpu, *step)


@pytest.mark.parametrize("rows", [40, *full_only(600)])
def test_inference_in_a_graph(rows, gpu):
    layer = make(gpu).to(gpu.name).eval()

    def call(x):
        with torch.no_grad():
            return (layer(x),)

    check_graph(gpu, call, lambda seed: (rows_of(gpu, seed)[:rows],))
    check_no_wait(gpu, call, lambda seed: (rows_of(gpu, seed)[:rows],))


def test_peak_memory_of_a_step(gpu):
    """At the reference shape in bfloat16, where a tensor of a row for each pair would take 260 MB.

    Rows and outputs of B D and B N elements: ``y``, its gradient, the gradient of the rows, and the rows once more for
    dropout's; the folded experts, their gradients and the parameters' (six times the weights, three of them float32);
    8 bytes of lists, 12 of routing, 12 of its gradients and 4 of the memory's weights for each row and choice; an order
    of 144 bytes a row; partial sums, of the weight's gradient (see test_expert_matmul) and of the memory.
    """
    rows, features, outputs = gpu.size((169_343, 256, 256), (12, 10, 6))
    layer = FusedRbMLayer(features, outputs, 8, 3, device=gpu.name, dtype=torch.bfloat16)

    def call(h):
        y = layer(h)
        y.backward(torch.ones_like(y))
        return ()

    def draw(seed):
        return (torch.randn(rows, features, device=gpu.name).to(torch.bfloat16).requires_grad_(),)

    experts = 8 * outputs * (features + 1)
    of_rows = 2 * rows * (2 * features + 2 * outputs)
    routed = rows * (3 * (8 + 12 + 12 + 4) + 144)
    partial = 4 * (4 * 148 * 128 * 256 + experts) + 4 * 2 * 148 * 8 * (features + 1)
    check_peak(gpu, call, draw, of_rows + routed + 18 * experts + partial)


def test_compiled_trains_like_eager(gpu):
    """``torch.compile(fullgraph=True)``, memory included; fused elementwise code may round otherwise."""
    torch._dynamo.reset()
    eager = make(gpu, detach_gates=False).to(gpu.name)
    compiled = torch.compile(copy.deepcopy(eager), fullgraph=True, backend=gpu.compiler)
    for seed in range(3):
        for layer in (eager, compiled):
            layer.zero_grad()
            layer(rows_of(gpu, seed)).square().mean().backward()
        torch.testing.assert_close(compiled.weight.grad, eager.weight.grad, rtol=1e-4, atol=1e-5, msg=f"step {seed}")
    states = [layer.eval().state_dict() for layer in (eager, compiled._orig_mod)]
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=1e-4, atol=1e-5, msg=name)
    torch._dynamo.reset()


def test_empty_batch_trains_and_moves_nothing(gpu):
    layer = make(gpu).to(gpu.name)
    before = layer.memory.clone()
    layer(rows_of(gpu)[:0]).sum().backward()
    layer.eval()
    assert torch.equal(layer.memory, before)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in layer.parameters())


def test_checkpointed_gradients_are_the_same(gpu):
    """A forward that the backward pass repeats sees the memory of the first, on the device too."""
    from torch.utils.checkpoint import checkpoint

    layer = make(gpu, detach_gates=False).to(gpu.name)
    twin = copy.deepcopy(layer)
    for seed in (0, 1):
        grads = []
        for module, forward in ((layer, layer), (twin, lambda h: checkpoint(twin, h, use_reentrant=False))):
            module.zero_grad()
            forward(rows_of(gpu, seed).requires_grad_()).square().mean().backward()
            grads.append([p.grad.clone() for p in module.parameters()])
        same_bits(*grads, f"step {seed}")
    assert torch.equal(layer.eval().memory, twin.eval().memory)


def test_dropout_draws_as_pytorch_does(gpu):
    """Unlike on the CPU, where several entries share one draw."""
    x = torch.randn(100, 10, device=gpu.name)
    torch.manual_seed(0)
    y = dropout(x, 0.5)
    torch.manual_seed(0)
    if gpu.rehearses:
        torch.testing.assert_close(y[y != 0], 2 * x[y != 0])
    else:
        assert torch.equal(y, F.dropout(x, 0.5))
    layer = make(gpu, dropout=0.5).to(gpu.name)
    masks = [layer(rows_of(gpu)) for _ in range(2)]
    assert all(not torch.equal(a, b) for a, b in pairwise(masks))
