"""The C++ of csrc/cpu as operators: derivatives on both paths, contracts, memory of odd shapes, callers' mistakes."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cpu_problems import FEW, all_operators, all_operators_in_eager, assert_as_good_as_eager, problem, wide
from torch.autograd import gradcheck

from rbm_kernels import cosine_topk, expert_matmul
from rbm_kernels.ops.cosine_topk import reference as routing
from rbm_kernels.ops.expert_order import reference as ordering

pytestmark = pytest.mark.native
ops = torch.ops.rbm

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("rows", [7, FEW + 1])
def test_gradients(rows):
    """One random direction per tensor: the whole Jacobian of many rows takes minutes."""
    x, weight, bias, gates, experts, _, memory = problem((rows, 5, 4, 6, 3), torch.float64)
    differentiable = [t.requires_grad_() for t in (x, weight, bias, gates)]
    assert gradcheck(lambda *tensors: expert_matmul(*tensors, experts), differentiable, fast_mode=True)

    def layer(x, weight, bias):
        gates, chosen, cosines = cosine_topk(x, memory, 3, temperature=0.5)
        return expert_matmul(x, weight, bias, gates, chosen), gates, cosines

    assert gradcheck(layer, (x, weight, bias), fast_mode=True)


@pytest.mark.parametrize("rows", [0, 9, FEW + 9])
def test_opcheck(rows):
    x, weight, bias, gates, experts, grad, memory = problem((rows, 6, 5, 4, 2), torch.float32)
    routed = ops.cosine_topk(x, memory, 2)
    for operator, arguments in (
        (ops.cosine_topk, (x, memory, 2)),
        (ops.cosine_topk_backward, (gates, None, x, memory, *routed)),
        (ops.cosine_topk_backward, (None, gates, x.bfloat16(), memory, *routed)),
        (ops.expert_order, (experts, 4, 16)),
        (ops.expert_matmul, (x, weight, bias, gates, experts)),
        (ops.expert_matmul_backward_input, (grad, x, weight, None, gates, experts)),
        (ops.expert_matmul_backward_input, (grad, x, weight, bias, gates, experts, False)),
        (ops.expert_matmul_backward_weight, (grad, x, gates, experts, 4)),
        (ops.expert_matmul_backward_weight, (grad, x, gates, experts, 4, False)),
    ):
        torch.library.opcheck(operator.default, arguments)


def test_fullgraph_with_any_number_of_rows():
    """One graph for few and for many rows: the path is chosen inside the operator."""
    _, weight, bias, *_, memory = problem((0, 6, 5, 4, 2), torch.float32)
    weight.requires_grad_()

    def layer(x):
        gates, experts, cosines = cosine_topk(x, memory, 2)
        return expert_matmul(x, weight, bias, gates, experts).square().sum() + cosines.sum()

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, FEW + 5):
        x = torch.randn(rows, 6, requires_grad=True)
        grads = torch.autograd.grad(compiled(x), (x, weight))
        for got, expected in zip(grads, torch.autograd.grad(layer(x), (x, weight)), strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_any_dtype_against_a_float64_memory(dtype):
    h, *_, memory = problem((50, 19, 1, 6, 3), dtype)
    memory = memory.double()
    got, expected = ops.cosine_topk(h, memory, 3), routing.cosine_topk(h, memory, 3)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs)
    grads = torch.randn(2, 50, 3, dtype=torch.float64)
    arguments = (*grads, h, memory, *expected)
    exact = routing.backward(*wide(*arguments))
    theirs = routing.backward(*arguments)
    assert_as_good_as_eager((ops.cosine_topk_backward(*arguments),), (theirs,), (exact,), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_without_direction_as_in_the_reference(dtype):
    h, *_, memory = problem((8, 9, 1, 5, 2), dtype)
    for row, value in ((0, NAN), (1, INF), (2, -INF)):
        h[row, 4] = value
    h[3] = 0
    h[4] = h[4].sign() * 1e-13  # shorter than EPS: cosines of a tenth of their size
    got, expected = ops.cosine_topk(h, memory, 2), routing.cosine_topk(h, memory, 2)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert got[0][:3].isnan().all()
    assert (got[2][3] == 0).all()
    assert 0 < got[2][4].abs().max() < 0.5

    grads = torch.ones_like(got[0]), torch.ones_like(got[0])
    back = ops.cosine_topk_backward(*grads, h, memory, *expected)
    torch.testing.assert_close(back, routing.backward(*grads, h, memory, *expected), equal_nan=True)
    assert torch.equal(back[[0, 3, 4]], torch.zeros(3, 9, dtype=dtype))
    assert back[1:3].isnan().all()


@pytest.mark.parametrize("rows", [8, FEW + 8])
def test_numbers_that_are_not_finite_spread_as_in_the_reference(rows):
    """Every row uses every expert, as all do in the reference: a gate of zero times infinity is NaN in both."""
    x, weight, bias, gates, experts, grad, _ = problem((rows, 6, 5, 3, 3), torch.float32)
    gates[0, 1] = 0
    x[0, 0], x[1, 2], x[2, 3] = INF, NAN, -INF
    bias[1, 4], weight[2, 3, 1], gates[4, 0], grad[5, 2] = INF, NAN, NAN, INF
    arguments = (x, weight, bias, gates, experts, grad)
    for got, expected in zip(all_operators(*arguments), all_operators_in_eager(*arguments), strict=True):
        assert torch.equal(got.isnan(), expected.isnan())
        torch.testing.assert_close(got.nan_to_num(), expected.nan_to_num(), rtol=1e-4, atol=1e-4)


def test_the_lowest_of_equal_experts_across_a_tile():
    """Memory vectors 3, 4 and 5 are equal, and a tile takes four: rows that stand along them choose 3 and 4."""
    memory = torch.randn(7, 33)
    memory[3:6] = torch.ones(33)
    for rows in (1, 2, 3, 4, 5, 9):
        h = torch.ones(rows, 33) * torch.linspace(0.1, 7, rows)[:, None]
        _, experts, cosines = ops.cosine_topk(h, memory, 2)
        assert torch.equal(experts, torch.tensor([[3, 4]], dtype=torch.int32).expand(rows, 2))
        assert torch.equal(cosines[:, 0], cosines[:, 1])


@pytest.mark.parametrize(("features", "outputs"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("rows", [0, 3, FEW + 3])
def test_tensors_without_memory(rows, features, outputs):
    """A tensor without elements has a null address, to which no offset may be added."""
    experts = torch.arange(rows * 2, dtype=torch.int32).view(rows, 2) % 4
    arguments = (
        torch.zeros(rows, features),
        torch.zeros(4, outputs, features),
        torch.ones(4, outputs),
        torch.ones(rows, 2),
        experts,
        torch.ones(rows, outputs),
    )
    for got, expected in zip(all_operators(*arguments), all_operators_in_eager(*arguments), strict=True):
        torch.testing.assert_close(got, expected)
    h, memory = arguments[0], torch.zeros(4, features)
    routed = ops.cosine_topk(h, memory, 2)
    for got, expected in zip(routed, routing.cosine_topk(h, memory, 2), strict=True):
        torch.testing.assert_close(got, expected)
    assert ops.cosine_topk_backward(arguments[3], None, h, memory, *routed).shape == (rows, features)


@pytest.mark.parametrize("rows", [3, FEW + 3])
@pytest.mark.parametrize("num_experts", [0, 4])
def test_rows_that_use_no_expert(rows, num_experts):
    x, weight, bias, *_, grad, _ = problem((rows, 6, 5, 4, 2), torch.float32)
    gates, experts = torch.ones(rows, 0), torch.ones(rows, 0, dtype=torch.int32)
    weight, bias = weight[:num_experts], bias[:num_experts]
    assert torch.equal(ops.expert_matmul(x, weight, bias, gates, experts), torch.zeros(rows, 5))
    grad_x, grad_gates = ops.expert_matmul_backward_input(grad, x, weight, bias, gates, experts)
    assert torch.equal(grad_x, torch.zeros(rows, 6))
    assert grad_gates.shape == (rows, 0)
    for grads in ops.expert_matmul_backward_weight(grad, x, gates, experts, 4):
        assert (grads == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_of_the_routing_backward(dtype):
    h, *_, memory = problem((30, 11, 1, 5, 3), dtype)
    routed = ops.cosine_topk(h, memory, 3)
    grads = torch.randn_like(routed[0]), torch.randn_like(routed[0])
    expected = ops.cosine_topk_backward(*grads, h, memory, *routed)
    plain = (*grads, h, memory, *routed)
    for laid in (
        [t.T.contiguous().T for t in plain],
        [torch.cat([t, t, t], 1)[:, t.shape[1] : 2 * t.shape[1]] for t in plain],
        [t.repeat_interleave(3, 0)[::3] for t in plain],
    ):
        assert torch.equal(ops.cosine_topk_backward(*laid), expected)
    one = torch.ones(1, 1).expand(30, 3)  # like the gradient of a sum, with strides of zero
    got = ops.cosine_topk_backward(one, one, h, memory, *routed)
    assert torch.equal(got, ops.cosine_topk_backward(one.contiguous(), one.contiguous(), h, memory, *routed))


def test_rows_more_than_two_to_the_31_elements_apart():
    """Untouched pages cost nothing, so this needs 4 GiB of address space but little memory."""
    x, weight, bias, gates, experts, grad, memory = problem((2, 24, 12, 5, 2), torch.bfloat16)
    try:
        store = torch.empty(2**31 + 64, dtype=torch.bfloat16)
    except RuntimeError:
        pytest.skip("4 GiB of addresses are not to be had")
    far, far_grad = (store.as_strided(size, (2**31, 1), start) for size, start in (((2, 24), 0), ((2, 12), 32)))
    far.copy_(x)
    far_grad.copy_(grad)
    plain = all_operators(x, weight, bias, gates, experts, grad)
    for got, expected in zip(all_operators(far, weight, bias, gates, experts, far_grad), plain, strict=True):
        assert torch.equal(got, expected)
    for got, expected in zip(ops.cosine_topk(far, memory, 2), ops.cosine_topk(x, memory, 2), strict=True):
        assert torch.equal(got, expected)


def test_callers_on_several_threads():
    problems = [problem((FEW - 40 + 20 * i, 30, 20, 5, 3), torch.float32, seed=i)[:-1] for i in range(6)]
    alone = [all_operators(*arguments) for arguments in problems]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda arguments: all_operators(*arguments), problems * 3))
    for got, expected in zip(together, alone * 3, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_tiles_taller_than_any_batch():
    experts = torch.rand(50, 6).argsort(-1)[:, :2].int()
    for got, expected in zip(
        ops.expert_order(experts, 6, 2**63 - 1), ordering.expert_order(experts, 6, 50), strict=True
    ):
        assert torch.equal(got, expected)


def test_bad_arguments_are_named():
    """Through torch.ops.rbm, without the Python functions: a RuntimeError that names the argument, never a crash."""
    x, weight, bias, gates, experts, grad, memory = problem((4, 6, 5, 2, 2), torch.float32)
    routed = ops.cosine_topk(x, memory, 2)
    good = {
        ops.cosine_topk: {"h": x, "memory": memory, "k": 2},
        ops.cosine_topk_backward: dict(
            zip(
                ("grad_gates", "grad_cosines", "h", "memory", "gates", "experts", "cosines"),
                (gates, gates, x, memory, *routed),
                strict=True,
            )
        ),
        ops.expert_order: {"experts": experts, "num_experts": 2, "block_m": 16},
        ops.expert_matmul: {"x": x, "weight": weight, "bias": bias, "gates": gates, "experts": experts},
        ops.expert_matmul_backward_input: {
            "grad": grad, "x": x, "weight": weight, "bias": bias, "gates": gates, "experts": experts
        },
        ops.expert_matmul_backward_weight: {
            "grad": grad, "x": x, "gates": gates, "experts": experts, "num_experts": 2
        },
    }  # fmt: skip
    numbers = {"k": (-1, 0, 4), "block_m": (-(2**63), 0), "num_experts": (-1, 0, 1, 2**31, 2**62)}
    for operator, arguments in good.items():
        operator(**arguments)
        for name, value in arguments.items():
            if not torch.is_tensor(value):
                bad = numbers[name]
            else:
                # No dimension, one more, one less, a size too large, no dtype of any operator.
                larger = torch.ones([size + 1 for size in value.shape], dtype=value.dtype)
                bad = (value[(0,) * value.dim()], value[None], value[0], larger, value.bool())
            for wrong in bad:
                with pytest.raises(RuntimeError, match=f"rbm::{operator.__name__}: ") as raised:
                    operator(**{**arguments, name: wrong})
                assert any(f" {other} " in f" {raised.value} " for other in arguments), raised.value


def test_integers_instead_of_rows_and_gradient():
    """The two have one dtype, so each by itself was right: integers were read as float32."""
    rows, gates, experts = torch.ones(4, 3, dtype=torch.int32), torch.ones(4, 1), torch.zeros(4, 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="rbm::expert_matmul_backward_weight: x has dtype int32, expected float64"):
        ops.expert_matmul_backward_weight(rows, rows, gates, experts, 1)
