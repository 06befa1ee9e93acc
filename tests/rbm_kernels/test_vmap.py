"""``torch.func.vmap`` of the operators: the results of every slice, in one call if only rows are batched."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import rbm_kernels as kernels
from rbm import FusedRbMLayer
from rbm_kernels.ops.expert_matmul import op as matmul

SLICES, ROWS, D, N, E, K = 3, 5, 16, 4, 6, 2
# One changes its argument, the other reads a counter of the layer: a layer calls neither in a transformation.
WITHOUT_A_RULE = {"rbm::memory_update_", "rbm::is_first_forward", "rbm::flush_denormals"}


class Calls(TorchDispatchMode):
    """Counts the calls of our operators by name; ``check`` takes the arguments of those of the grouped matmul."""

    def __init__(self, check: Callable | None = None) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.check = check

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "rbm":
            name = operator._schema.name.removeprefix("rbm::")
            self.counts[name] = self.counts.get(name, 0) + 1
            if self.check is not None and name.startswith("expert_matmul"):
                self.check(*args)
        return operator(*args, **(kwargs or {}))


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape)


def choices(*leading: int) -> Tensor:
    return torch.rand(*leading, E).argsort(-1)[..., :K].int().contiguous()


MEMORY, WEIGHT, BIAS = draw(E, D), draw(E, N, D), draw(E, N)


def packed() -> Callable[[Tensor], Tensor]:
    experts = kernels.pack_experts(WEIGHT, BIAS)
    return lambda x: kernels.routed_matmul_packed(x, MEMORY, experts, N, K)


def packed_feed_forward() -> Callable[[Tensor], Tensor]:
    experts = [kernels.pack_experts(weight, None) for weight in (WEIGHT, WEIGHT.mT)]
    return lambda x: kernels.packed_feed_forward(x, MEMORY, *experts, N, D, K)


def quantised() -> Callable[[Tensor], Tensor]:
    experts = kernels.quantize_experts(WEIGHT, BIAS)
    return lambda x: kernels.routed_matmul_int8(x, MEMORY, experts, N, K)


def network() -> Callable[[Tensor], Tensor]:
    form = kernels.pack_network([kernels.NetworkLayer(WEIGHT[:1], BIAS[:1], N, D)])
    return lambda x: kernels.packed_network(x, form, N)


def routing_gradient() -> Callable[..., Tensor]:
    operator = torch.ops.rbm.cosine_topk_backward

    def call(grad_gates: Tensor, h: Tensor) -> Tensor:
        return operator(grad_gates, None, h, MEMORY, *kernels.cosine_topk(h, MEMORY, K))

    return call


BATCHES = {
    "cosine_topk": (lambda: lambda h: kernels.cosine_topk(h, MEMORY, K, temperature=0.5), (D,)),
    "cosine_topk_backward": (routing_gradient, (K,), (D,)),
    "routed_matmul": (lambda: lambda x: kernels.routed_matmul(x, MEMORY, WEIGHT, BIAS, K), (D,)),
    "routed_matmul_packed": (packed, (D,)),
    "packed_feed_forward": (packed_feed_forward, (D,)),
    "routed_matmul_int8": (quantised, (D,)),
    "packed_network": (network, (D,)),
}


def one_by_one(function: Callable, *batches: Tensor):
    """What a loop over the slices gives."""
    results = [function(*slices) for slices in zip(*batches, strict=True)]
    if isinstance(results[0], tuple):
        return tuple(torch.stack(each) for each in zip(*results, strict=True))
    return torch.stack(results)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("dim", [0, 1])
def test_rows_of_all_slices_are_in_one_call(name, dim):
    make, *widths = BATCHES[name]
    function, batches = make(), [draw(SLICES, ROWS, *width) for width in widths]
    with Calls() as calls:
        got = vmap(function, dim)(*(batch.movedim(0, dim) for batch in batches))
    assert calls.counts[name] == 1
    torch.testing.assert_close(got, one_by_one(function, *batches))


@pytest.mark.parametrize("shared", [(), (0,), (1,), (2,), (0, 1), (1, 2)])
def test_a_shared_row_argument_is_repeated(shared):
    """The operator with three tensors of rows, of which some are the same for all slices."""
    batches = [draw(SLICES, ROWS, D), torch.rand(SLICES, ROWS, K), choices(SLICES, ROWS)]
    batches = [batch[0] if i in shared else batch for i, batch in enumerate(batches)]
    dims = tuple(None if i in shared else 0 for i in range(3))
    repeated = [batch.expand(SLICES, *batch.shape) if i in shared else batch for i, batch in enumerate(batches)]

    def function(x, gates, experts):
        return kernels.expert_matmul(x, WEIGHT, BIAS, gates, experts)

    with Calls() as calls:
        got = vmap(function, dims)(*batches)
    assert calls.counts == {"expert_matmul": 1}
    torch.testing.assert_close(got, one_by_one(function, *repeated))


def test_the_gradient_of_rows_is_one_call_too():
    """As ``torch.autograd.functional.jacobian(vectorize=True)`` calls it: a batch of gradients, the same rows."""
    x, gates, experts, grads = draw(ROWS, D), torch.rand(ROWS, K), choices(ROWS), draw(SLICES, ROWS, N)

    def function(grad):
        return torch.ops.rbm.expert_matmul_backward_input(grad, x, WEIGHT, BIAS, gates, experts)

    with Calls() as calls:
        got = vmap(function)(grads)
    assert calls.counts == {"expert_matmul_backward_input": 1}
    torch.testing.assert_close(got, one_by_one(function, grads))


def test_without_gates_their_gradient_is_empty_for_each_slice():
    x, gates, experts, grads = draw(ROWS, D), torch.rand(ROWS, K), choices(ROWS), draw(SLICES, ROWS, N)

    def function(grad):
        return torch.ops.rbm.expert_matmul_backward_input(grad, x, WEIGHT, BIAS, gates, experts, False)

    _, empty = vmap(function)(grads)
    assert empty.shape == (SLICES, 0)


def test_no_rows():
    got = vmap(lambda x: kernels.routed_matmul(x, MEMORY, WEIGHT, BIAS, K))(draw(SLICES, 0, D))
    assert got.shape == (SLICES, 0, N)


def test_batches_of_batches():
    function, x = BATCHES["cosine_topk"][0](), draw(2, SLICES, ROWS, D)
    with Calls() as calls:
        got = vmap(vmap(function))(x)
    assert calls.counts == {"cosine_topk": 1}
    expected = tuple(part.reshape(2, SLICES, ROWS, K) for part in function(x.reshape(-1, D)))
    torch.testing.assert_close(got, expected)


def test_a_tangent_of_batches_of_batches():
    """PyTorch cannot ask a batch for its tangent, so each layer of them has to be taken off."""
    function, x, tangent = BATCHES["routed_matmul"][0](), draw(2, SLICES, ROWS, D), draw(2, SLICES, ROWS, D)
    got = jvp(vmap(vmap(function)), (x,), (tangent,))
    expected = jvp(function, (x.reshape(-1, D),), (tangent.reshape(-1, D),))
    torch.testing.assert_close(got, tuple(part.reshape(2, SLICES, ROWS, N) for part in expected))


@pytest.mark.parametrize("dim", [0, 1])
def test_other_weights_for_each_slice(dim):
    """An ensemble: each slice has a call of its own, with the shared rows."""
    x, memories, weights = draw(ROWS, D), draw(SLICES, E, D), draw(SLICES, E, N, D)

    def function(memory, weight):
        return kernels.routed_matmul(x, memory, weight, BIAS, K)

    with Calls() as calls:
        got = vmap(function, dim)(memories.movedim(0, dim), weights.movedim(0, dim))
    assert calls.counts == {"routed_matmul": SLICES}
    torch.testing.assert_close(got, one_by_one(function, memories, weights))


@pytest.mark.parametrize("bias", [draw(SLICES, E, N), None], ids=["bias", "no bias"])
def test_quantised_experts_of_each_slice(bias):
    """No operator, but a function with a condition on all numbers, which vmap refused."""
    weight, dims = draw(SLICES, E, N, D), (0, None if bias is None else 0)
    given = [weight, [None] * SLICES if bias is None else bias]
    expected = torch.stack([kernels.quantize_experts(*experts) for experts in zip(*given, strict=True)])
    assert torch.equal(vmap(kernels.quantize_experts, in_dims=dims)(weight, bias), expected)
    weight[1, 2, 3, 4] = float("nan")
    with pytest.raises(ValueError, match="weight holds numbers that are not finite"):
        vmap(kernels.quantize_experts, in_dims=dims)(weight, bias)


def test_other_memories_for_each_slice_with_a_temperature():
    """One call for each slice of an operator with a keyword argument and several results."""
    x, memories = draw(ROWS, D), draw(SLICES, E, D)

    def function(memory):
        return kernels.cosine_topk(x, memory, K, temperature=0.5)

    torch.testing.assert_close(vmap(function)(memories), one_by_one(function, memories))


def test_derivatives_of_batches_come_from_the_operators():
    """An ordinary backward pass through ``vmap`` is one call of each kernel, instead of the formulas of torch.func."""
    x = draw(SLICES, ROWS, D).requires_grad_()
    weight, grad = WEIGHT.clone().requires_grad_(), draw(SLICES, ROWS, N)

    def function(x):
        gates, experts, _ = kernels.cosine_topk(x, MEMORY, K)
        return kernels.expert_matmul(x, weight, BIAS, gates, experts)

    expected = torch.autograd.grad(one_by_one(function, x), [x, weight], grad)
    with Calls() as calls:
        got = torch.autograd.grad(vmap(function)(x), [x, weight], grad)
    torch.testing.assert_close(got, expected)
    assert set(calls.counts.values()) == {1}
    assert {"expert_matmul_backward_input", "expert_matmul_backward_weight", "cosine_topk_backward"} <= {*calls.counts}


def test_compiled_for_any_number_of_slices():
    function = BATCHES["routed_matmul"][0]()
    compiled = torch.compile(vmap(function), fullgraph=True, dynamic=True, backend="aot_eager")
    for slices in (3, 4, 7):
        x = draw(slices, ROWS, D)
        torch.testing.assert_close(compiled(x), one_by_one(function, x))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("compiles", [False, True])
def test_rows_of_kernels_that_need_an_order(compiles, shared, monkeypatch):
    """As on CUDA: no slice has an order of its own, and a compiler takes the question whether there are slices."""
    monkeypatch.setattr(matmul, "_kernels_serve", lambda x: True)
    monkeypatch.setattr(matmul.config, "is_small", lambda *_: False)

    def function(x, gates, experts):
        return kernels.expert_matmul(x, WEIGHT, BIAS, gates, experts)

    batches = draw(SLICES, ROWS, D), torch.rand(SLICES, ROWS, K), choices(SLICES, ROWS)
    if shared:
        batches = batches[0], *(batch[:1].expand_as(batch) for batch in batches[1:])
    expected = one_by_one(function, *batches)
    monkeypatch.setattr(matmul, "expert_order", None)
    mapped = vmap(function, (0, None, None) if shared else 0)
    call = torch.compile(mapped, fullgraph=True, backend="aot_eager") if compiles else mapped
    got = call(batches[0], *(batch[0] if shared else batch for batch in batches[1:]))
    torch.testing.assert_close(got, expected)


def test_an_order_of_one_slice_is_not_that_of_all():
    """Slices with the same routing have one order, but the call for all of them has more rows: CUDA refuses that."""
    gates, experts, x = torch.rand(ROWS, K), choices(ROWS), draw(SLICES, ROWS, D)
    order, grads = kernels.expert_order(experts, E), draw(SLICES, ROWS, N)

    def forward(x):
        return kernels.expert_matmul(x, WEIGHT, BIAS, gates, experts, order)

    def backward(grad):
        arguments = grad, x[0], WEIGHT, BIAS, gates, experts
        return torch.ops.rbm.expert_matmul_backward_input(*arguments, True, *order)

    for function, batch, check in ((forward, x, matmul._check), (backward, grads, matmul._check_backward_input)):
        expected = one_by_one(function, batch)
        with Calls(check) as calls:
            got = vmap(function)(batch)
        assert sum(count for name, count in calls.counts.items() if name.startswith("expert_matmul")) == 1
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("training", [True, False])
def test_the_layer(training):
    layer = FusedRbMLayer(D, N, E, K).train(training)
    layer.track_memory = False  # a transformation could not follow it
    x = draw(SLICES, ROWS, D)
    torch.testing.assert_close(vmap(layer)(x), layer(x))


def test_every_operator_has_a_rule():
    """PyTorch warns, in each call, of an operator without one."""
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("rbm::")}
    without = {n for n in names if not torch._C._dispatch_has_kernel_for_dispatch_key(n, "FuncTorchBatched")}
    assert without == WITHOUT_A_RULE
