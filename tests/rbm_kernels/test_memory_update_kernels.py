"""The Triton kernels of the memory update, in Triton's interpreter without a GPU, and as compiled code."""

import pytest
import torch
from known_triton import MOST_SPILLED

pytest.importorskip("triton")

from benchmarks.compiled.cases import ARCHITECTURES, CASES
from benchmarks.compiled.everywhere import compiled_everywhere
from rbm_kernels import _dispatch, _library, _native
from rbm_kernels._launching import Machine
from rbm_kernels.ops.memory_update import launch, op, reference

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Each shape exists for a reason: (B, D, E, k)
SHAPES = {
    "usual": (70, 32, 8, 3),
    "one row": (1, 40, 3, 2),
    "one of each": (1, 1, 1, 1),
    "tile and one": (33, 65, 3, 3),
    "several tiles of columns": (20, 300, 5, 2),
    "several tiles of experts": (40, 24, 70, 8),
    "more rows than a program's first tile": (2100, 12, 8, 3),
    "no rows": (0, 16, 8, 3),
    "no features": (7, 0, 4, 2),
    "no choice": (7, 6, 4, 0),
}


def drawn(shape, dtype, device):
    b, d, e, k = shape
    h = torch.randn(b, d).to(device, dtype)
    gates = torch.rand(b, k, dtype=torch.float64 if dtype == torch.float64 else torch.float32).to(device)
    return h, gates, torch.rand(b, e).argsort(-1)[:, :k].to(device, torch.int32), e


def check(got, h, gates, experts, e, normalize=True):
    """At most twice the error of eager PyTorch in the same dtype against float64, and a small floor."""
    exact = reference.memory_statistics(h.double(), gates.double(), experts, e, normalize)
    eager = reference.memory_statistics(h, gates, experts, e, normalize)
    for value, truth, peer in zip(got, exact, eager, strict=True):
        assert value.dtype == peer.dtype
        assert value.shape == truth.shape
        assert value.isfinite().all()
        if value.numel() > 0:
            floor = 8 * torch.finfo(value.dtype).eps * max(1.0, truth.abs().max().item())
            assert (value - truth).abs().max() <= 2 * (peer - truth).abs().max() + floor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.usefixtures("poisoned_empty")
def test_statistics(shape, dtype, device):
    arguments = drawn(shape, dtype, device)
    got = launch.memory_statistics(*arguments)
    check(got, *arguments)
    assert all(torch.equal(a, b) for a, b in zip(got, launch.memory_statistics(*arguments), strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("poisoned_empty")
def test_one_program_takes_several_tiles_without_normalization(dtype, device, monkeypatch):
    monkeypatch.setattr(launch, "machine_of", lambda device: Machine(90, 1))
    arguments = drawn((150, 24, 6, 2), dtype, device)
    check(launch.memory_statistics(*arguments, normalize=False), *arguments, normalize=False)


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
    _, gates, experts, e = drawn((h.shape[0], 1, 5, 2), torch.float32, device)
    got = launch.memory_statistics(h, gates.T.contiguous().T, experts.T.contiguous().T, e)
    check(got, h, gates, experts, e)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [24, 300])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter
def test_bad_rows_are_left_out_whole(width, dtype, device):
    h, gates, experts, e = drawn((60, width, 6, 3), dtype, device)
    h[0, 3], h[17, 0], h[50, -1] = float("nan"), float("inf"), float("-inf")
    h[25] = {torch.float64: 1e200, torch.float16: float("nan")}.get(dtype, 1e30)  # squares that overflow
    gates[40, 1], gates[59, 2], gates[5, 0] = float("nan"), float("-inf"), float("inf")
    good = torch.ones(60, dtype=torch.bool)
    good[[0, 5, 17, 25, 40, 50, 59]] = False
    got = launch.memory_statistics(h, gates, experts, e)
    good = good.to(device)
    check(got, h[good], gates[good], experts[good], e)


@pytest.mark.parametrize("width", [24, 300])
def test_zero_and_short_rows(width, device):
    h, gates, experts, e = drawn((40, width, 6, 3), torch.float32, device)
    h[:20] = 0
    h[20:30] *= 1e-14
    check(launch.memory_statistics(h, gates, experts, e), h, gates, experts, e)


def test_experts_out_of_range_are_skipped_and_others_may_repeat(device):
    h, gates, experts, e = drawn((40, 24, 5, 3), torch.float32, device)
    experts[5, 1], experts[6, 0], experts[7] = -1, 5, 2
    counted = experts.clone()
    counted[5, 1] = counted[6, 0] = 6
    exact = reference.memory_statistics(h.double(), gates.double(), counted, 7)
    for value, truth in zip(launch.memory_statistics(h, gates, experts, e), exact, strict=True):
        torch.testing.assert_close(value.double(), truth[:5], atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("layout", ["rows", "columns", "every other"])
def test_update(layout, normalize, dtype, device):
    memory = {
        "rows": lambda: torch.randn(6, 1100, dtype=dtype),
        "columns": lambda: torch.randn(37, 6, dtype=dtype).T,
        "every other": lambda: torch.randn(6, 74, dtype=dtype)[:, ::2],
    }[layout]().to(device)
    before, moved = memory.clone(), memory.double().clone()
    weighted_sum = torch.randn(memory.shape, dtype=dtype, device=device)
    total = torch.tensor([1.0, 0.0, 2.5, float("nan"), float("inf"), -1.0], dtype=dtype, device=device)
    launch.memory_update_(memory, weighted_sum, total, 0.9, normalize)
    reference.memory_update_(moved, weighted_sum.double(), total.double(), 0.9, normalize)
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(memory.double(), moved, atol=tolerance, rtol=tolerance)
    for i in (1, 3, 4, 5):
        assert torch.equal(memory[i], before[i]), "an expert that no row chose keeps its memory bit for bit"


@pytest.mark.parametrize("decay", [0.0, 1.0, 5e-324, 0.9])
def test_decay_keeps_all_its_bits(decay, device):
    """Triton treats a Python float as float32."""
    memory = torch.randn(2, 20, dtype=torch.float64, device=device)
    sums, total, moved = torch.randn_like(memory), torch.ones_like(memory[:, 0]), memory.clone()
    reference.memory_update_(moved, sums, total, decay)
    launch.memory_update_(memory, sums, total, decay)
    torch.testing.assert_close(memory, moved, atol=4e-16, rtol=4e-16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter: the first square overflows
def test_a_long_memory_moves_from_its_direction(dtype, device):
    memory = torch.nn.functional.normalize(torch.randn(4, 40, dtype=dtype), dim=1).to(device)
    lengths = torch.tensor([3e38 if dtype == torch.float32 else 1e308, 1e20, 2e15, 1e-11], dtype=dtype, device=device)
    far = memory * lengths[:, None]
    arguments = torch.randn(4, 40, dtype=dtype, device=device), torch.rand(4, dtype=dtype, device=device) + 0.5, 0.7
    launch.memory_update_(memory, *arguments)
    launch.memory_update_(far, *arguments)
    torch.testing.assert_close(far, memory)


def test_the_registered_functions_check_what_the_eager_ones_check(device):
    h, gates, experts, e = drawn((5, 6, 4, 2), torch.float32, device)
    with pytest.raises(ValueError, match="num_experts is 0, expected between 1"):
        op._cuda_statistics(h, gates, experts, 0)
    with pytest.raises(TypeError, match="experts has dtype int64, expected int32"):
        op._cuda_statistics(h, gates, experts.long(), e, normalize=False)
    memory = torch.randn(4, 6, device=device)
    statistics = op._cuda_statistics(h, gates, experts, e)
    with pytest.raises(ValueError, match=r"decay is 2\.0, expected between 0 and 1"):
        op._cuda_update(memory, *statistics, 2.0)
    with pytest.raises(ValueError, match="weighted_sum lies in the same memory as memory"):
        op._cuda_update(memory, memory, statistics[1], 0.5)


OPERATORS = ("memory_statistics", "memory_update_")


@pytest.mark.parametrize("loaded", [True, False])
def test_who_serves_is_told(loaded, monkeypatch):
    monkeypatch.setattr(_native, "status", lambda: {"cuda": {"loaded": loaded}})
    serving = _dispatch.implementations()
    assert {serving[operator]["CUDA"] for operator in OPERATORS} == {"CUDA (librbm_cuda)" if loaded else "Triton"}
    assert serving["cosine_topk"]["CUDA"] == "Triton"


@pytest.mark.parametrize("served", [True, False])
def test_triton_stands_in_where_the_library_does_not_serve(served, monkeypatch):
    bound = []
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: served)
    monkeypatch.setattr(_library.LIBRARY, "impl", lambda *what: bound.append(what))
    _library.bind_stand_ins()
    expected = [(operator, _library.TRITON_OPERATORS[operator], "CUDA") for operator in OPERATORS]
    assert bound == ([] if served else expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiled_code(architecture):
    rows = compiled_everywhere("memory_update")[architecture]
    # Norms where rows are wider than a tile, the sums, their addition, and the update.
    assert {row.kernel for _, row in rows} == {
        "memory_statistics_norms_kernel",
        "memory_statistics_kernel",
        "memory_statistics_reduce_kernel",
        "memory_update_kernel",
    }
    assert sum(row.kernel == "memory_statistics_kernel" for _, row in rows) == sum(
        case.operator == "memory_update" for case in CASES
    )
    for case, row in rows:
        assert row.spilled_bytes <= MOST_SPILLED, row
        assert row.atomics == 0, row
        assert row.programs >= (row.programs_claimed or 1), row
        if row.kernel == "memory_statistics_kernel":
            assert row.programs_claimed, row
            assert case.in_features % 8 or row.wide_loads > 0, row
            assert row.matrix_instructions or case.precision == "float64", row
