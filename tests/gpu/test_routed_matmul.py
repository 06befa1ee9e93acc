"""The whole layer in one operator, at inference, on a GPU: by its kernel up to 64 rows, by two operators beyond."""

import pytest
import torch
from on_gpu import (
    OperatorOnGpu,
    check_compiled,
    check_devices,
    check_peak,
    full_only,
    same_bits,
)
from routed_on_gpu import check

from rbm_kernels import routed_matmul
from rbm_kernels.ops.cosine_topk import reference as routing

DTYPES = {"bfloat16": torch.bfloat16, "ieee": torch.float32, "tf32": torch.float32, "float16": torch.float16}


def problem(gpu, shape, dtype=torch.float32, seed=0):
    """x, memory, weight and bias for ``(B, D, N, E)``."""
    b, d, n, e = shape
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (torch.randn(*s, generator=generator).to(gpu.name, dtype) for s in ((b, d), (e, n, d), (e, n)))
    return x, torch.randn(e, d, generator=generator).to(gpu.name), weight, bias


@pytest.mark.parametrize("precision", ["bfloat16", "ieee", *full_only("tf32", "float16")])
@pytest.mark.parametrize("rows", [8, *full_only(1, 64)])
@pytest.mark.parametrize("features", [256, 47, *full_only(1_433, 8_415)])
def test_widths(features, rows, precision, gpu):
    shape = (rows, features, gpu.size(256, 20), gpu.size(8, 4))
    check(*problem(gpu, shape, DTYPES[precision]), 3, 0.7, precision)


@pytest.mark.core
@pytest.mark.parametrize("precision", ["bfloat16", "ieee"])
def test_reference_width(precision, gpu):
    check(*problem(gpu, (gpu.size(64, 4), gpu.size(256, 20), gpu.size(256, 20), 8), DTYPES[precision]), 3)


# (B, D, N, E, k); in the rehearsal with fewer outputs.
SHAPES = {
    "one expert": (17, 100, 47, 1, 1),
    "33 experts": (18, 100, 256, 33, 5),
    "64 experts": (64, 256, 256, 64, 8),
    "128 experts": (20, 64, 40, 128, 8),
    "seven outputs": (40, 100, 7, 8, 3),
    "one output": (6, 3, 1, 3, 2),
    "no rows": (0, 7, 4, 3, 2),
    "no features": (3, 0, 4, 3, 2),
    "two operators": (65, 64, 40, 8, 3),
    "two operators, many rows": (20_000, 256, 256, 8, 3),
}
SLOW = ("64 experts", "128 experts", "seven outputs", "two operators, many rows")
CASES = [pytest.param(*shape, id=name, marks=[pytest.mark.gpu] * (name in SLOW)) for name, shape in SHAPES.items()]


@pytest.mark.parametrize("precision", ["bfloat16", *full_only("ieee", "tf32")])
@pytest.mark.parametrize(("rows", "features", "outputs", "num_experts", "k"), CASES)
def test_shapes(rows, features, outputs, num_experts, k, precision, gpu):
    shape = (rows, features, gpu.size(outputs, min(outputs, 10)), num_experts)
    x, memory, weight, bias = problem(gpu, shape, DTYPES[precision])
    check(x, memory, weight, bias, k, precision=precision)


@pytest.mark.parametrize("k", [8, *full_only(1, 2, 3, 4, 5, 6, 7)])
def test_top_k(k, gpu):
    check(*problem(gpu, (gpu.size(40, 9), 100, gpu.size(72, 10), 8), torch.bfloat16), k)


@pytest.mark.parametrize("precision", ["ieee", *full_only("bfloat16")])
def test_without_bias(precision, gpu):
    x, memory, weight, _ = problem(gpu, (20, 64, gpu.size(72, 10), 5), DTYPES[precision])
    check(x, memory, weight, None, 2)


@pytest.mark.parametrize("precision", ["ieee", *full_only("bfloat16")])
def test_strides(precision, gpu):
    x, memory, weight, bias = problem(gpu, (20, 24, 10, 4), DTYPES[precision])
    wide = torch.randn(40, 30, device=gpu.name).to(x.dtype)
    wide[::2, 5:29] = x
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    with torch.no_grad():
        expected = routed_matmul(x, memory, weight, bias, 2)
        same_bits([routed_matmul(wide[::2, 5:29], memory.T.contiguous().T, turned, bias, 2)], [expected], "rows")
        one = routed_matmul(x[:1].expand(20, -1), memory, weight, bias, 2)
    same_bits([one], [expected[:1].expand(20, -1)], "one row for all")


@pytest.mark.core
@pytest.mark.parametrize("rows", [20, *full_only(64, 2_000)])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of the interpreter
@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")
def test_bad_rows_ties_and_unread_experts(rows, gpu):
    x, memory, weight, bias = problem(gpu, (rows, 40, 12, 6))
    with torch.no_grad():
        clean = routed_matmul(x, memory, weight, bias, 3)
        spoilt, others = x.clone(), torch.arange(rows, device=gpu.name) != 3
        spoilt[3, 7] = float("nan")
        y = routed_matmul(spoilt, memory, weight, bias, 3)
        assert y[3].isnan().all()
        same_bits([y[others]], [clean[others]], "other rows")
        # Of equal experts the lower ones; what nobody chose is not read.
        weight[3:] = bias[3:] = float("nan")
        y = routed_matmul(x, memory[:1].expand(6, -1), weight, bias, 3)
    expected = (torch.einsum("bd,end->bn", x.double(), weight[:3].double()) + bias[:3].double().sum(0)) / 3
    torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", *full_only("nothing")])
def test_gradients_take_the_two_operators(wanted, gpu):
    """Equal to those of the reference in float64, which are autograd's own."""
    arguments = dict(zip(("x", "memory", "weight", "bias"), problem(gpu, (gpu.size(40, 9), 24, 10, 4)), strict=True))
    exact = {name: t.double() for name, t in arguments.items()}
    if wanted == "nothing":
        assert not routed_matmul(*arguments.values(), 2).requires_grad
        return
    for tensors in (arguments, exact):
        tensors[wanted].requires_grad_()
    grads = []
    for tensors in (arguments, exact):
        y = routed_matmul(*tensors.values(), 2)
        grads.append(torch.autograd.grad(y.sum(), tensors[wanted])[0].double())
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


# (B, D, N, E): the kernel, and the two operators.
DRAWN = [
    pytest.param((8, 256, 256, 8), id="kernel", marks=pytest.mark.core),
    pytest.param((2_000, 256, 256, 8), id="two operators", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("shape", DRAWN)
@pytest.mark.parametrize("precision", ["bfloat16", *full_only("ieee")])
class TestOperator(OperatorOnGpu):
    @pytest.fixture
    def draw(self, shape, precision, gpu):
        return lambda seed: problem(gpu, gpu.size(shape, (5, 16, 12, 4)), DTYPES[precision], seed)

    @pytest.fixture
    def call(self):
        def call(*arguments):
            with torch.no_grad():
                return (routed_matmul(*arguments, 3),)

        return call

    def test_peak_memory(self, call, draw, gpu):
        """Up to 64 rows the result alone; beyond, the routing (12 bytes a choice) and the order of rows beside it."""
        x, _, weight, _ = draw(0)
        routed = 0 if len(x) <= 64 else len(x) * (12 * 3 + 200)
        check_peak(gpu, call, draw, len(x) * weight.shape[1] * x.itemsize + routed)


@pytest.mark.parametrize("rows", [8, *full_only(2_000)])
def test_compiled(rows, gpu):
    def call(*arguments):
        with torch.no_grad():
            return (routed_matmul(*arguments, 3),)

    check_compiled(gpu, call, lambda seed: problem(gpu, (gpu.size(rows, 5), 16, 12, 4), seed=seed))


def test_autocast_changes_nothing(gpu):
    arguments = problem(gpu, (8, 64, 20, 5))
    with torch.no_grad():
        expected = routed_matmul(*arguments, 2)
        with torch.autocast(gpu.name, dtype=torch.bfloat16):
            same_bits([routed_matmul(*arguments, 2)], [expected], "autocast")


def test_opcheck(gpu):
    torch.library.opcheck(torch.ops.rbm.routed_matmul.default, (*problem(gpu, (4, 12, 5, 4)), 2))


def test_two_devices(gpu):
    x, memory, weight, bias = problem(gpu, (6, 16, 8, 4))
    check_devices(gpu, "routed_matmul", dict(x=x, memory=memory, weight=weight, bias=bias, k=2))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("rows", [20, *full_only(64)])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of the interpreter
def test_bad_experts_do_not_reach_other_rows(rows, bad, gpu):
    """Infinity and NaN in an expert's weight and bias stay with the rows that chose it, up to 64 rows."""
    x, memory, weight, bias = problem(gpu, (rows, 40, 12, 6))
    experts = routing.cosine_topk(x, memory, 2)[1]
    others = (experts != 4).all(-1)
    with torch.no_grad():
        clean = routed_matmul(x, memory, weight, bias, 2)
        weight[4, 3, 7] = bias[4, 5] = bad
        got = routed_matmul(x, memory, weight, bias, 2)
    assert 0 < others.sum() < rows
    torch.testing.assert_close(got[others], clean[others], rtol=1e-6, atol=1e-6)
    assert not got[~others][:, [3, 5]].isfinite().any()
