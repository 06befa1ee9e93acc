"""The routing kernels, in Triton's interpreter without a GPU, and as compiled code."""

import pytest
import torch
from known_triton import CHOSEN_WITH, MOST_SPILLED
from torch.nn.functional import normalize

pytest.importorskip("triton")

from benchmarks.compiled.cases import ARCHITECTURES, CASES, Case
from benchmarks.compiled.everywhere import compiled_everywhere
from rbm_kernels._launching import Machine
from rbm_kernels.ops.cosine_topk import launch, op, reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Each shape exists for a reason: (B, D, E, k)
SHAPES = {
    "usual": (70, 32, 8, 3),
    "prime width, several tiles": (9, 1433, 4, 3),
    "width below a tile": (17, 7, 5, 2),
    "tile and one": (5, 65, 3, 3),
    "one row": (1, 40, 3, 2),
    "one feature": (10, 1, 3, 2),
    "one expert": (6, 20, 1, 1),
    "one expert too many for a power of two": (18, 33, 33, 5),
    "many experts": (20, 48, 64, 8),
    "most experts": (3, 20, 128, 8),
}


def random_problem(shape, dtype, device):
    b, d, e, k = shape
    return torch.randn(b, d).to(device, dtype), torch.randn(e, d, device=device), k


def error(got, exact) -> float:
    return float((got.double() - exact).abs().max())


def check_forward(h, memory, k, temperature, outputs) -> None:
    """At most twice the error of eager PyTorch, plus a floor of a few float32 roundings."""
    exact_gates, _, exact_cosines = reference.cosine_topk(h.double(), memory.double(), k, temperature)
    eager_gates, _, eager_cosines = reference.cosine_topk(h, memory, k, temperature)
    gates, experts, cosines = outputs
    assert gates.dtype == cosines.dtype == torch.float32
    assert experts.dtype == torch.int32
    assert error(cosines, exact_cosines) <= 2 * error(eager_cosines, exact_cosines) + 3e-7
    assert error(gates, exact_gates) <= 2 * error(eager_gates, exact_gates) + 3e-7
    # Compare the cosines of the chosen experts, so that rounding among near-ties cannot fail the test.
    every = normalize(h.double(), dim=-1) @ normalize(memory.double(), dim=-1).T
    assert error(every.gather(1, experts.long()), exact_cosines) <= 3e-7
    assert all(len(set(row)) == k for row in experts.tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.usefixtures("poisoned_empty")
def test_forward_and_backward(shape, dtype, device):
    h, memory, k = random_problem(shape, dtype, device)
    outputs = launch.cosine_topk(h, memory, k, 0.7)
    check_forward(h, memory, k, 0.7, outputs)

    grads = torch.randn_like(outputs[0]), torch.randn_like(outputs[2])
    for grad_gates, grad_cosines in [grads, (grads[0], None), (None, grads[1])]:
        given = [None if grad is None else grad.double() for grad in (grad_gates, grad_cosines)]
        saved = outputs[0].double(), outputs[1], outputs[2].double()
        exact = reference.backward(*given, h.double(), memory.double(), *saved, 0.7)
        eager = reference.backward(grad_gates, grad_cosines, h, memory, *outputs, 0.7)
        got = launch.backward(grad_gates, grad_cosines, h, memory, *outputs, 0.7)
        assert got.dtype == dtype
        assert got.is_contiguous()
        size = float((grads[1] if grad_cosines is not None else grads[0]).abs().max() / h.float().norm(dim=-1).min())
        assert error(got, exact) <= 2 * error(eager, exact) + 5e-7 * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("poisoned_empty")
def test_one_program_takes_several_tiles(dtype, device, monkeypatch):
    monkeypatch.setattr(launch, "machine_of", lambda device: Machine(90, 1))
    h, memory, k = random_problem((71, 24, 6, 2), dtype, device)
    outputs = launch.cosine_topk(h, memory, k)
    check_forward(h, memory, k, 1.0, outputs)
    grad = torch.randn_like(outputs[0])
    expected = reference.backward(None, grad, h, memory, *outputs)
    torch.testing.assert_close(launch.backward(None, grad, h, memory, *outputs), expected)


@pytest.mark.parametrize("shape", [(0, 7, 4, 2), (3, 0, 4, 2)], ids=["no rows", "no features"])
def test_nothing_to_read(shape, device):
    h, memory, k = random_problem(shape, torch.float32, device)
    gates, experts, cosines = launch.cosine_topk(h, memory, k)
    assert gates.shape == experts.shape == cosines.shape == (shape[0], k)
    assert (cosines == 0).all()
    assert launch.backward(gates, cosines, h, memory, gates, experts, cosines).shape == h.shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_go_to_the_lower_expert(dtype, device):
    h, row = torch.randn(20, 40, device=device).to(dtype), torch.randn(40, device=device)
    _, experts, _ = launch.cosine_topk(h, row.expand(6, 40), 3)
    assert (experts == torch.tensor([0, 1, 2], device=device)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("poisoned_empty")
def test_zero_rows(dtype, device):
    h, memory, k = random_problem((20, 40, 5, 5), dtype, device)
    h[3], memory[2] = 0, 0
    gates, experts, cosines = launch.cosine_topk(h, memory, k)
    assert (cosines[3] == 0).all()
    assert experts[3].tolist() == [0, 1, 2, 3, 4]
    torch.testing.assert_close(gates[3], torch.full_like(gates[3], 0.2))
    assert (cosines[experts == 2] == 0).all()
    grad = launch.backward(gates, cosines, h, memory, gates, experts, cosines)
    assert (grad[3] == 0).all()
    assert (grad[4].abs().sum() > 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of the interpreter
def test_bad_rows_stay_alone(dtype, bad, device):
    h, memory, k = random_problem((20, 40, 5, 3), dtype, device)
    clean = launch.cosine_topk(h, memory, k)
    h[3, 7] = bad
    gates, experts, cosines = launch.cosine_topk(h, memory, k)
    assert gates[3].isnan().all()
    assert cosines[3].isnan().all()
    assert experts[3].tolist() == [0, 1, 2]
    others = torch.arange(20, device=device) != 3
    for got, expected in zip((gates, experts, cosines), clean, strict=True):
        assert torch.equal(got[others], expected[others])
    grad = torch.ones_like(gates)
    grad_h = launch.backward(None, grad, h, memory, gates, experts, cosines)
    expected = launch.backward(None, grad, h[others], memory, *(x[others] for x in clean))
    assert torch.equal(grad_h[others], expected)
    if bad != bad:
        assert (grad_h[3] == 0).all()


def test_a_bad_expert_ranks_first_as_in_the_reference(device):
    h, memory, k = random_problem((10, 40, 5, 3), torch.float32, device)
    memory[3, 0] = float("nan")
    for got, expected in zip(launch.cosine_topk(h, memory, k), reference.cosine_topk(h, memory, k), strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lengths_do_not_matter(dtype, device):
    h, memory, k = random_problem((20, 24, 7, 3), dtype, device)
    lengths = 2.0 ** torch.arange(-20, 20, 2, device=device)[:, None]
    scaled = launch.cosine_topk((h * lengths).to(dtype), memory * lengths[:7], k)
    for got, expected in zip(scaled, launch.cosine_topk(h, memory, k), strict=True):
        torch.testing.assert_close(got, expected)


STRIDES = {
    "sliced features": lambda x: x[:, 3:27],
    "every other row": lambda x: x[::2, :24],
    "every other feature": lambda x: x[:, ::2],
    "transposed": lambda x: x.T.contiguous().T,
    "one row for all": lambda x: x[:1].expand(9, -1),
}


@pytest.mark.parametrize("view", STRIDES.values(), ids=STRIDES.keys())
def test_strides(view, device):
    h = view(torch.randn(18, 48, device=device))
    memory = torch.randn(5, 2 * h.shape[1], device=device)[:, ::2]
    got = launch.cosine_topk(h, memory, 2)
    for a, b in zip(got, launch.cosine_topk(h.contiguous(), memory.contiguous(), 2), strict=True):
        assert torch.equal(a, b)
    grad = torch.randn(2, h.shape[0], device=device).T
    expected = launch.backward(grad.contiguous(), None, h.contiguous(), memory.contiguous(), *got)
    assert torch.equal(launch.backward(grad, None, h, memory, *got), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_every_run(dtype, device):
    h, memory, k = random_problem((40, 80, 8, 3), dtype, device)
    first = launch.cosine_topk(h, memory, k)
    grads = [launch.backward(first[0], first[2], h, memory, *first) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(first, launch.cosine_topk(h, memory, k), strict=True))
    assert torch.equal(*grads)


def test_a_row_does_not_depend_on_its_neighbours(device):
    h, memory, k = random_problem((40, 24, 8, 3), torch.float32, device)
    permutation = torch.randperm(40, device=device)
    for got, expected in zip(
        launch.cosine_topk(h[permutation], memory, k), launch.cosine_topk(h, memory, k), strict=True
    ):
        assert torch.equal(got, expected[permutation])


def test_registered_for_cuda_with_the_checks_of_the_eager_path(device):
    assert torch._C._dispatch_has_kernel_for_dispatch_key("rbm::cosine_topk", "CUDA")
    assert torch._C._dispatch_has_kernel_for_dispatch_key("rbm::cosine_topk_backward", "CUDA")
    h, memory, k = random_problem((4, 6, 5, 2), torch.float32, device)
    with pytest.raises(ValueError, match="k is 6, expected between 1 and the number of experts, 5"):
        op._cuda(h, memory, 6)
    for dtype in (torch.float32, torch.float64):
        got = op._cuda(h.to(dtype), memory, k)
        assert got[0].dtype == dtype
        expected = reference.cosine_topk(h.to(dtype), memory, k)
        torch.testing.assert_close(got[2], expected[2])
        grad = op._cuda_backward(got[0], None, h.to(dtype), memory, *got)
        torch.testing.assert_close(grad, reference.backward(got[0], None, h.to(dtype), memory, *got))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiled_code(architecture):
    rows = compiled_everywhere("cosine_topk")[architecture]
    assert len(rows) == 2 * sum(case.operator == "cosine_topk" for case in CASES)
    for case, row in rows:
        assert row.spilled_bytes <= MOST_SPILLED, row
        assert row.programs_claimed == 2, row
        assert row.programs_by_registers >= (2 if CHOSEN_WITH else 1), row
        assert row.programs_by_shared >= 1, row
        assert case.in_features % 8 or row.wide_loads > 0, row
        assert row.matrix_instructions or row.computes == "grad_h", row
        assert row.atomics == 0, row
        if case == Case("cosine_topk", "bfloat16") and architecture == 90:
            assert row.programs >= 2, "two programs share a multiprocessor, each with rows in flight"
