"""The routed matmul's kernel, in Triton's interpreter without a GPU, and as compiled code."""

import pytest
import torch
from known_triton import MOST_SPILLED
from matmul_problems import check_error

pytest.importorskip("triton")

from benchmarks.compiled.cases import ARCHITECTURES, CASES
from benchmarks.compiled.everywhere import compiled_everywhere
from rbm_kernels import cosine_topk, expert_matmul
from rbm_kernels._launching import Machine
from rbm_kernels.ops.routed_matmul import config, launch, op, reference

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Each shape exists for a reason: (B, D, N, E, k)
SHAPES = {
    "usual": (40, 32, 48, 8, 3),
    "one row": (1, 40, 20, 8, 3),
    "a row more than a tile": (17, 16, 16, 5, 2),
    "as many rows as it serves": (64, 24, 20, 8, 3),
    "prime width, several slices": (3, 1433, 7, 4, 3),
    "widths below a tile": (9, 5, 7, 4, 2),
    "one output": (6, 3, 1, 3, 2),
    "all experts": (19, 8, 9, 3, 3),
    "one expert": (6, 20, 9, 1, 1),
    "one expert too many for a power of two": (18, 33, 17, 33, 5),
    "most experts": (20, 20, 9, 128, 8),
}


def problem(shape, dtype, device):
    b, d, n, e, k = shape
    x, weight, bias = (torch.randn(*size).to(device, dtype) for size in ((b, d), (e, n, d), (e, n)))
    return x, torch.randn(e, d, device=device), weight, bias, k


def check(y, x, memory, weight, bias, k, temperature=1.0) -> None:
    wide = [None if a is None else a.double() for a in (x, memory, weight, bias)]
    exact = reference.routed_matmul(*wide, k, temperature)
    check_error("y", y, exact, reference.routed_matmul(x, memory, weight, bias, k, temperature))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.usefixtures("poisoned_empty")
def test_against_reference(shape, dtype, device):
    arguments = problem(shape, dtype, device)
    check(launch.routed_matmul(*arguments, 0.7), *arguments, 0.7)


@pytest.mark.usefixtures("poisoned_empty")
def test_without_bias(device):
    x, memory, weight, _, k = problem((20, 16, 20, 5, 2), torch.float32, device)
    check(launch.routed_matmul(x, memory, weight, None, k), x, memory, weight, None, k)


@pytest.mark.parametrize(("processors", "block_n"), [(2, 16), (1, 32)])
@pytest.mark.usefixtures("poisoned_empty")
def test_wider_tiles_on_a_smaller_machine(processors, block_n, device, monkeypatch):
    monkeypatch.setattr(launch, "machine_of", lambda device: Machine(90, processors))
    arguments = problem((10, 150, 50, 4, 2), torch.float32, device)
    assert config.choose_tile(10, 150, 50, 4, torch.float32, Machine(90, processors)).block_n == block_n
    check(launch.routed_matmul(*arguments), *arguments)


@pytest.mark.parametrize("shape", [(0, 7, 4, 3, 2), (3, 7, 0, 3, 2)], ids=["no rows", "no outputs"])
def test_nothing_to_write(shape, device):
    assert launch.routed_matmul(*problem(shape, torch.float32, device)).shape == (shape[0], shape[2])


def test_no_features_leave_the_bias(device):
    x, memory, weight, bias, k = problem((3, 0, 4, 3, 2), torch.float32, device)
    torch.testing.assert_close(launch.routed_matmul(x, memory, weight, bias, k), bias[:2].mean(0).expand(3, 4))


def test_writes_nothing_beyond_the_result(device, monkeypatch):
    arguments = problem((17, 8, 10, 4, 2), torch.float32, device)
    buffer = torch.full((64, 10), float("nan"), device=device)
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: buffer[:17])
    check(launch.routed_matmul(*arguments), *arguments)
    assert buffer[17:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_go_to_the_lower_expert(dtype, device):
    x, _, weight, bias, k = problem((20, 40, 9, 6, 3), dtype, device)
    memory = torch.randn(40, device=device).expand(6, 40)
    check(launch.routed_matmul(x, memory, weight, bias, k), x, memory, weight, bias, k)
    expected = (torch.einsum("bd,end->bn", x.double(), weight[:3].double()) + bias[:3].double().sum(0)) / 3
    y = launch.routed_matmul(x, memory, weight, bias, k)
    torch.testing.assert_close(y.double(), expected, atol=0.05, rtol=0.01)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_rows(dtype, device):
    x, memory, weight, bias, k = problem((20, 40, 9, 5, 5), dtype, device)
    x[3], memory[2] = 0, 0
    y = launch.routed_matmul(x, memory, weight, bias, k)
    check(y, x, memory, weight, bias, k)
    torch.testing.assert_close(y[3].double(), bias.double().mean(0), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("rows", [1, 17])
def test_experts_that_no_row_uses_are_not_read(rows, device):
    """Neither for the rows, nor for padding rows, which as zeros would choose the lowest experts."""
    x, memory, weight, bias, k = problem((rows, 12, 20, 6, 2), torch.float32, device)
    memory[[3, 5]] = x[:1] * torch.tensor([[1.0], [2.0]], device=device)
    x[:] = x[:1]
    weight[[0, 1, 2, 4]] = bias[[0, 1, 2, 4]] = float("nan")
    y = launch.routed_matmul(x, memory, weight, bias, k)
    expected = (torch.einsum("bd,end->bn", x, weight[[3, 5]]) + bias[[3, 5]].sum(0)) / 2
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of the interpreter
@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")
def test_bad_rows_stay_alone(bad, device):
    x, memory, weight, bias, k = problem((20, 40, 9, 5, 3), torch.float32, device)
    clean = launch.routed_matmul(x, memory, weight, bias, k)
    x[3, 7] = bad
    y = launch.routed_matmul(x, memory, weight, bias, k)
    others = torch.arange(20, device=device) != 3
    assert y[3].isnan().all()
    assert torch.equal(y[others], clean[others])


def test_strides(device):
    x, memory, weight, bias, k = problem((20, 12, 10, 4, 2), torch.float32, device)
    expected = launch.routed_matmul(x, memory, weight, bias, k)
    wide = torch.randn(40, 30, device=device)
    wide[::2, 5:17] = x
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    apart = torch.randn(4, 20, device=device)
    apart[:, ::2] = bias
    columns = memory.T.contiguous().T
    assert torch.equal(launch.routed_matmul(wide[::2, 5:17], columns, turned, apart[:, ::2], k), expected)
    assert torch.equal(launch.routed_matmul(x.T.contiguous().T, memory, weight, bias, k), expected)
    one = launch.routed_matmul(x[:1].expand(20, -1), memory, weight, bias, k)
    assert torch.equal(one, expected[:1].expand(20, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(dtype, device):
    """Bitwise: experts are summed in ascending order, and experts of other rows add zero."""
    x, memory, weight, bias, k = problem((40, 24, 9, 8, 3), dtype, device)
    y = launch.routed_matmul(x, memory, weight, bias, k)
    permutation = torch.randperm(40, device=device)
    assert torch.equal(launch.routed_matmul(x[permutation], memory, weight, bias, k), y[permutation])
    assert torch.equal(launch.routed_matmul(x[5:6], memory, weight, bias, k), y[5:6])


def test_registered_for_cuda_and_larger_batches_take_the_two_operators(device, monkeypatch):
    assert torch._C._dispatch_has_kernel_for_dispatch_key("rbm::routed_matmul", "CUDA")
    launched = []
    forward = launch.routed_matmul
    monkeypatch.setattr(launch, "routed_matmul", lambda *arguments: launched.append(arguments) or forward(*arguments))
    for rows, dtype, by_kernel in ((64, torch.float32, True), (65, torch.float32, False), (8, torch.float64, False)):
        x, memory, weight, bias, k = problem((rows, 6, 5, 4, 2), dtype, device)
        y = op._cuda(x, memory, weight, bias, k, temperature=0.5)
        gates, experts, _ = cosine_topk(x, memory, k, temperature=0.5)
        torch.testing.assert_close(y, expert_matmul(x, weight, bias, gates, experts))
        assert bool(launched) == by_kernel
        launched.clear()
    x, memory, weight, bias, _ = problem((4, 6, 5, 4, 2), torch.float32, device)
    with pytest.raises(ValueError, match="k is 5, expected between 1 and the number of experts, 4"):
        op._cuda(x, memory, weight, bias, 5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiled_code(architecture):
    rows = compiled_everywhere("routed_matmul")[architecture]
    assert len(rows) == sum(case.operator == "routed_matmul" for case in CASES)
    for case, row in rows:
        assert row.spilled_bytes <= MOST_SPILLED, row
        assert row.programs >= 1, row
        assert row.matrix_instructions, row
        # Weights are read 16 bytes at a time, unless rows of an odd width stand nowhere on four.
        assert case.in_features % 8 or row.wide_loads > 0, row
        assert row.atomics == 0, row
