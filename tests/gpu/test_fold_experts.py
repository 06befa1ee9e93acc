"""Attention and scale folded into the experts, on a GPU: both results and all four gradients."""

import pytest
import torch
from folded_problems import check, problem, results
from on_gpu import (
    OperatorOnGpu,
    check_compiled,
    check_devices,
    check_peak,
    full_only,
    same_bits,
)

from rbm_kernels import fold_experts
from rbm_kernels.ops.fold_experts import launch

DTYPES = [torch.float32, torch.bfloat16, *full_only(torch.float16)]
# (E, N, D) on the GPU and in the rehearsal, which leaves out what has no shape there.
SHAPES = {
    "reference": ((8, 256, 256), (4, 40, 48)),
    "1,433 features": ((8, 256, 1_433), (3, 20, 133)),
    "8,415 features": ((5, 256, 8_415), None),
    "47 features and outputs": ((8, 47, 47), (3, 47, 47)),
    "1,024 features and outputs": ((8, 1_024, 1_024), None),
    "64 experts": ((64, 130, 100), (33, 6, 5)),
    "one output": ((8, 1, 100), (3, 1, 70)),
    "one feature": ((8, 300, 1), None),
    "two features": ((8, 300, 2), (3, 300, 2)),
    "one of each": ((1, 1, 1), (1, 1, 1)),
    "no outputs": ((3, 0, 4), (3, 0, 4)),
    "no features": ((3, 5, 0), (3, 5, 0)),
}
CORE = ("reference", "1,433 features")
CASES = [
    pytest.param(*shapes, id=name, marks=[pytest.mark.core] * (name in CORE) + [pytest.mark.gpu] * (shapes[1] is None))
    for name, shapes in SHAPES.items()
]


def folded(*arguments):
    """Results and gradients of a problem by the operator."""
    return results(fold_experts, *arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("full", "small"), CASES)
def test_shapes(full, small, dtype, gpu):
    arguments = problem(gpu.size(full, small), dtype, device=gpu.name)
    check(folded(*arguments), *arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("attention", [True, False], ids=["attention", "no attention"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_options(bias, attention, dtype, gpu):
    shape = gpu.size((5, 300, 100), (2, 20, 70))
    arguments = problem(shape, dtype, bias=bias, attention=attention, device=gpu.name)
    check(folded(*arguments), *arguments)


@pytest.mark.core
@pytest.mark.parametrize("narrow", [torch.bfloat16, *full_only(torch.float16)], ids=str)
def test_parameters_of_float32_under_autocast(narrow, gpu):
    """As the layer folds them there; autocast itself changes nothing."""
    arguments = problem(gpu.size((8, 256, 256), (3, 20, 40)), folded=narrow, device=gpu.name)
    got = results(fold_experts, *arguments, dtype=narrow)
    check(got, *arguments, dtype=narrow)
    with torch.autocast(gpu.name, dtype=torch.bfloat16):
        same_bits(results(fold_experts, *arguments, dtype=narrow), got, "autocast")


def test_float64(gpu):
    arguments = problem(gpu.size((8, 100, 100), (3, 20, 40)), torch.float64, device=gpu.name)
    check(folded(*arguments), *arguments)


def test_strides(gpu):
    arguments = [t.mT.contiguous().mT if t.dim() > 1 else t for t in problem((3, 37, 40), device=gpu.name)]
    expected = folded(*(t.contiguous() for t in arguments))
    same_bits(folded(*arguments), expected, "transposed")
    arguments[4], arguments[5] = arguments[4][:1].expand(3, -1, -1), arguments[5][:, :1].expand(-1, 37)
    same_bits(folded(*arguments), folded(*(t.contiguous() for t in arguments)), "expanded gradients")


def test_expanded_gradient(gpu):
    """``sum().backward()`` sends one number with strides of zero, and none to the result that it does not use."""
    weight, bias, attention, log_scale, *grads = problem((3, 37, 40), device=gpu.name)
    leaves = [t.requires_grad_() for t in (weight, bias, attention, log_scale)]
    got = torch.autograd.grad(sum(t.sum() for t in fold_experts(*leaves)), leaves)
    ones = [torch.ones_like(t) for t in grads]
    same_bits(got, folded(weight, bias, attention, log_scale, *ones)[2:], "sum of both")
    got = torch.autograd.grad(fold_experts(*leaves)[0].sum(), leaves)
    ones[1].zero_()
    wanted = folded(weight, bias, attention, log_scale, *ones)[2:]
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)


@pytest.mark.core
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of the interpreter
def test_clamped_logarithms_and_nan(gpu):
    arguments = problem((3, 37, 40), device=gpu.name)
    attention, log_scale = arguments[2:4]
    attention[0, 3], attention[1, 39], attention[2, 7] = 5.0, float("inf"), float("-inf")
    got = folded(*arguments)
    check(got, *arguments)
    assert (got[4][[0, 1, 2], [3, 39, 7]] == 0).all()
    attention[1, 5] = float("nan")
    got = folded(*arguments)
    check(got, *arguments)
    assert got[0].isnan().sum() == 37
    attention[1, 5] = 0
    log_scale.fill_(5.0)
    got = folded(*arguments)
    check(got, *arguments)
    assert got[5].item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, *full_only(torch.bfloat16)], ids=str)
class TestOperator(OperatorOnGpu):
    @pytest.fixture
    def call(self):
        return folded

    @pytest.fixture
    def draw(self, dtype, gpu):
        shape = gpu.size((8, 256, 256), (3, 20, 40))
        return lambda seed: problem(shape, dtype, device=gpu.name, seed=seed)

    @pytest.mark.core
    def test_graph_with_new_inputs(self, call, draw, gpu):
        super().test_graph_with_new_inputs(call, draw, gpu)

    def test_peak_memory(self, call, draw, gpu):
        """Both results, the four gradients and the parts of the scale's: nothing as large as the weights between."""
        weight, bias, attention, _, *_ = draw(0)
        check_peak(gpu, call, draw, 2 * (weight.nbytes + bias.nbytes) + attention.nbytes)

    def test_compiled(self, draw, gpu):
        def call(*tensors):
            return fold_experts(*tensors[:4])

        check_compiled(gpu, call, draw)


def test_the_kernels_serve_it(gpu, monkeypatch):
    calls, forward, backward = [], launch.fold_experts, launch.backward
    monkeypatch.setattr(launch, "fold_experts", lambda *given: calls.append("forward") or forward(*given))
    monkeypatch.setattr(launch, "backward", lambda *given: calls.append("backward") or backward(*given))
    folded(*problem((3, 20, 40), device=gpu.name))
    assert calls == ["forward", "backward"]


def test_beyond_31_bits(gpu):
    """Offsets past 2^31 elements: the last expert's weights are as exact as the first's."""
    num_experts, outputs, features = gpu.size((3, 2**16 + 3, 2**14), (3, 40, 16))

    def work():
        weight = torch.ones(num_experts, outputs, features, device=gpu.name, dtype=torch.bfloat16)
        weight[-1] = 3
        attention = torch.zeros(num_experts, features, device=gpu.name, dtype=torch.bfloat16)
        log_scale = torch.zeros(1, device=gpu.name, dtype=torch.bfloat16)
        made, _ = torch.ops.rbm.fold_experts(weight, None, attention, log_scale)
        assert torch.equal(made, weight)
        del made
        grads = torch.ops.rbm.fold_experts_backward(weight, None, weight, None, attention, log_scale)
        assert torch.equal(grads[0], weight)
        torch.testing.assert_close(grads[2][0], torch.full_like(grads[2][0], outputs))
        torch.testing.assert_close(grads[2][-1], torch.full_like(grads[2][-1], 9 * outputs))

    gpu.with_memory(3 * 2 * num_experts * outputs * features, work)


def test_opcheck(gpu):
    arguments = problem((3, 5, 4), device=gpu.name)
    torch.library.opcheck(torch.ops.rbm.fold_experts.default, arguments[:4])
    torch.library.opcheck(torch.ops.rbm.fold_experts_backward.default, (*arguments[4:], *arguments[:4]))


def test_two_devices(gpu):
    weight, bias, attention, log_scale, grad_weight, grad_bias = problem((3, 5, 4), device=gpu.name)
    parameters = dict(weight=weight, bias=bias, attention=attention, log_scale=log_scale)
    check_devices(gpu, "fold_experts", parameters)
    check_devices(gpu, "fold_experts_backward", dict(grad_weight=grad_weight, grad_bias=grad_bias) | parameters)
