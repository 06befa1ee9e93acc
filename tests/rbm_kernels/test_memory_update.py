"""The memory update: meaning, skipped rows, determinism, additivity, contracts of an operator, and the GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize as unit

from rbm_kernels import memory_statistics, memory_update_
from rbm_kernels.ops.memory_update import reference

# Each shape exists for a reason: (B, D, E, k)
SHAPES = {
    "usual": (300, 64, 8, 3),
    "no rows": (0, 16, 8, 3),
    "one row": (1, 5, 3, 2),
    "one of each": (1, 1, 1, 1),
    "prime width": (40, 1433, 8, 3),
    "several shares and tiles": (2100, 12, 8, 3),
    "wider than a block of the GPU": (70, 2056, 3, 2),
    "an odd width of that kind": (33, 2051, 9, 2),
    "more experts than rows": (20, 24, 64, 8),
    "no features": (7, 0, 4, 2),
    "no choice": (7, 6, 4, 0),
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[gpu, needs_gpu])]


def make(shape, dtype=torch.float32, device="cpu"):
    """Rows, gates and experts as the routing makes them: different experts in a row, gates that sum to one."""
    b, d, e, k = shape
    h = torch.randn(b, d).to(device, dtype)
    gates = torch.rand(b, k, dtype=torch.float64 if dtype == torch.float64 else torch.float32).softmax(-1).to(device)
    experts = torch.rand(b, e).argsort(-1)[:, :k].to(device, torch.int32)
    return h, gates, experts, e


def assert_as_good_as_eager(got, h, gates, experts, e, **options):
    """At most twice the error of eager PyTorch in the same dtype against float64, and a small floor."""
    exact = reference.memory_statistics(h.double(), gates.double(), experts, e, **options)
    eager = reference.memory_statistics(h, gates, experts, e, **options)
    for value, truth, peer in zip(got, exact, eager, strict=True):
        assert value.dtype == peer.dtype
        assert value.shape == truth.shape
        if value.numel() == 0:
            continue
        floor = 8 * torch.finfo(value.dtype).eps * max(1.0, truth.abs().max().item())
        error = (value - truth).abs().max().item()
        assert error <= 2 * (peer - truth).abs().max().item() + floor


def test_reference_is_the_equation():
    """Eq. 4, row by row: the softmax runs over the rows that chose the expert."""
    h, gates, experts, e = make((30, 5, 4, 2), torch.float64)
    memory, decay = torch.randn(e, 5, dtype=torch.float64), 0.9
    expected = memory.clone()
    for i in range(e):
        chose = (experts == i).any(-1)
        weights = torch.softmax(gates[experts == i], 0)
        expected[i] = decay * unit(memory[i], dim=0) + (1 - decay) * (weights[:, None] * unit(h[chose], dim=1)).sum(0)

    reference.memory_update_(memory, *reference.memory_statistics(h, gates, experts, e), decay)
    torch.testing.assert_close(memory, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_statistics_against_float64(shape, dtype, device):
    arguments = make(shape, dtype, device)
    assert_as_good_as_eager(memory_statistics(*arguments), *arguments)


@pytest.mark.parametrize("device", DEVICES)
def test_without_normalization(device):
    arguments = make((200, 32, 8, 3), device=device)
    assert_as_good_as_eager(memory_statistics(*arguments, normalize=False), *arguments, normalize=False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "layout", ["wide rows", "wide rows, unaligned", "every second row", "columns first", "one row repeated"]
)
def test_strides(layout, dtype, device):
    h, gates, experts, e = make((90, 96, 8, 3), dtype, device)
    h = {
        "wide rows": lambda: h[:, 16:80],
        "wide rows, unaligned": lambda: h[:, 3:67],
        "every second row": lambda: h[::2],
        "columns first": lambda: h.T.contiguous().T,
        "one row repeated": lambda: h[:1].expand(90, 96),
    }[layout]()
    gates, experts = gates[: h.shape[0]], experts.T.contiguous().T[: h.shape[0]]
    assert_as_good_as_eager(memory_statistics(h, gates, experts, e), h, gates, experts, e)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [64, 2051])
def test_bad_rows_are_left_out_whole(width, device):
    h, gates, experts, e = make((500, width, 8, 3), device=device)
    bad = [0, 17, 250, 400, 499]
    h[0, 3], h[17, 0], h[250] = float("nan"), float("inf"), 1e30  # the square of the last one overflows
    gates[400, 1], gates[499, 2] = float("nan"), float("-inf")
    good = torch.ones(500, dtype=torch.bool)
    good[bad] = False
    good = good.to(device)

    got = memory_statistics(h, gates, experts, e)
    expected = reference.memory_statistics(h[good].double(), gates[good].double(), experts[good], e)
    for value, truth in zip(got, expected, strict=True):
        torch.testing.assert_close(value.double(), truth, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_zero_rows_count_and_point_nowhere(device):
    _, gates, experts, e = make((50, 8, 4, 2), device=device)
    weighted_sum, total = memory_statistics(torch.zeros(50, 8, device=device), gates, experts, e)
    assert (weighted_sum == 0).all()
    assert (total > 0).all()


@pytest.mark.native
def test_thread_count_does_not_matter(threads):
    arguments = make((3000, 37, 8, 3))
    memory = torch.randn(8, 37)
    results = []
    for count in (1, 2, 3, 7):
        threads(count)
        statistics = memory_statistics(*arguments)
        moved = memory.clone()
        memory_update_(moved, *statistics, 0.9)
        results.append((*statistics, moved))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 400),
    split=st.floats(0, 1),
    d=st.integers(1, 40),
    e=st.integers(1, 20),
    data=st.data(),
)
def test_sums_add_over_parts_of_a_batch(rows, split, d, e, data):
    h, gates, experts, _ = make((rows, d, e, data.draw(st.integers(1, e))), torch.float64)
    cut = int(split * rows)
    whole = memory_statistics(h, gates, experts, e)
    first = memory_statistics(h[:cut], gates[:cut], experts[:cut], e)
    second = memory_statistics(h[cut:], gates[cut:], experts[cut:], e)
    for value, a, b in zip(whole, first, second, strict=True):
        torch.testing.assert_close(value, a + b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("transposed", [False, True])
def test_update(transposed, normalize, dtype, device):
    memory = torch.randn(6, 37, dtype=dtype, device=device)
    memory = memory.T.contiguous().T if transposed else memory
    before = memory.clone()
    weighted_sum = torch.randn(6, 37, dtype=dtype, device=device)
    total = torch.tensor([1.0, 0.0, 2.5, float("nan"), float("inf"), -1.0], dtype=dtype, device=device)
    memory_update_(memory, weighted_sum, total, 0.8, normalize=normalize)

    expected = before.double()
    reference.memory_update_(expected, weighted_sum.double(), total.double(), 0.8, normalize=normalize)
    torch.testing.assert_close(memory.double(), expected, atol=1e-6, rtol=1e-6)
    for i in (1, 3, 4, 5):
        assert torch.equal(memory[i], before[i]), "an expert that no row chose must keep its memory bit for bit"


def test_extreme_decay_and_zero_memory():
    weighted_sum, total = torch.randn(3, 5), torch.ones(3)
    memory = torch.zeros(3, 5)
    memory_update_(memory, weighted_sum, total, 0.0)
    torch.testing.assert_close(memory, weighted_sum)
    memory_update_(memory, weighted_sum * 7, total, 1.0)
    torch.testing.assert_close(memory, unit(weighted_sum, dim=-1))


STATISTICS_MISTAKES = {
    "dtype of h": (dict(h=torch.zeros(4, 6, dtype=torch.int64)), "h has dtype int64, expected float64 or float32"),
    "dtype of gates": (dict(gates=torch.zeros(4, 3).double()), "gates has dtype float64, expected float32"),
    "dtype of experts": (dict(experts=torch.zeros(4, 3).long()), "experts has dtype int64, expected int32"),
    "dimensions of h": (dict(h=torch.zeros(4)), r"h has shape \[4\], expected \[\*, \*\] \(rows by features\)"),
    "rows of gates": (
        dict(gates=torch.zeros(5, 3)),
        r"gates has shape \[5, 3\], expected \[4, \*\] \(one row for each row",
    ),
    "shape of experts": (dict(experts=torch.zeros(4, 2).int()), r"experts has shape \[4, 2\], expected \[4, 3\]"),
    "no experts": (dict(num_experts=0), "num_experts is 0, expected between 1"),
}
UPDATE_MISTAKES = {
    "dtype of memory": (dict(memory=torch.zeros(4, 6).half()), "memory has dtype float16, expected"),
    "dtype of weighted_sum": (
        dict(weighted_sum=torch.zeros(4, 6).double()),
        "weighted_sum has dtype float64, expected",
    ),
    "dtype of total": (dict(total=torch.zeros(4).double()), "total has dtype float64, expected float32"),
    "shape of memory": (dict(memory=torch.zeros(4)), r"memory has shape \[4\], expected \[\*, \*\]"),
    "shape of weighted_sum": (
        dict(weighted_sum=torch.zeros(4, 5)),
        r"weighted_sum has shape \[4, 5\], expected \[4, 6\]",
    ),
    "shape of total": (
        dict(total=torch.zeros(3)),
        r"total has shape \[3\], expected \[4\] \(one for each row of memory\)",
    ),
    "decay above one": (dict(decay=1.5), "decay is 1.5, expected between 0 and 1"),
    "decay not a number": (dict(decay=float("nan")), "decay is nan, expected between 0 and 1"),
}


@pytest.mark.parametrize("device", ["meta", *DEVICES])
@pytest.mark.parametrize(("change", "message"), STATISTICS_MISTAKES.values(), ids=STATISTICS_MISTAKES.keys())
def test_wrong_statistics_arguments(change, message, device):
    arguments = dict(h=torch.zeros(4, 6), gates=torch.zeros(4, 3), experts=torch.zeros(4, 3).int(), num_experts=8)
    assert_refused("memory_statistics", memory_statistics, arguments | change, message, device)


@pytest.mark.parametrize("device", ["meta", *DEVICES])
@pytest.mark.parametrize(("change", "message"), UPDATE_MISTAKES.values(), ids=UPDATE_MISTAKES.keys())
def test_wrong_update_arguments(change, message, device):
    arguments = dict(memory=torch.zeros(4, 6), weighted_sum=torch.zeros(4, 6), total=torch.zeros(4), decay=0.9)
    assert_refused("memory_update_", memory_update_, arguments | change, message, device)


def assert_refused(op, function, arguments, message, device):
    """Refused by the function, and with the same message by its operator: C++ on cpu and cuda, the fake on meta."""
    arguments = {name: a.to(device) if isinstance(a, torch.Tensor) else a for name, a in arguments.items()}
    message = f"^rbm::{op}: {message}"
    with pytest.raises(TypeError if "dtype" in message else ValueError, match=message):
        function(**arguments)
    with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
        getattr(torch.ops.rbm, op)(**arguments)


@pytest.mark.parametrize("expert", [-1, 4, 2**31 - 1])
def test_expert_out_of_range_on_the_cpu(expert):
    h, gates, experts, e = make((10, 5, 4, 3))
    experts[7, 2] = expert
    message = f"^rbm::memory_statistics: experts holds {expert} in row 7, expected between 0 and 3"
    with pytest.raises(RuntimeError, match=message):
        memory_statistics(h, gates, experts, e)


@pytest.mark.parametrize("device", DEVICES)
def test_outputs_never_require_a_gradient(device):
    h, gates, experts, e = make((10, 6, 4, 2), device=device)
    weighted_sum, total = memory_statistics(h.requires_grad_(), gates.requires_grad_(), experts, e)
    assert not weighted_sum.requires_grad
    assert not total.requires_grad


def test_autograd_notices_that_the_memory_moved():
    memory, weight = torch.randn(4, 6), torch.randn(6, requires_grad=True)
    product = (memory * weight).sum()
    memory_update_(memory, torch.randn(4, 6), torch.ones(4), 0.9)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype, device):
    h, gates, experts, e = make((40, 12, 4, 2), dtype, device)
    torch.library.opcheck(torch.ops.rbm.memory_statistics.default, (h, gates, experts, e))
    torch.library.opcheck(
        torch.ops.rbm.memory_statistics.default, (h.requires_grad_(), gates, experts, e), {"normalize": False}
    )
    statistics = memory_statistics(h, gates, experts, e)
    memory = torch.randn_like(statistics[0])
    torch.library.opcheck(torch.ops.rbm.memory_update_.default, (memory, *statistics, 0.9))


@pytest.mark.parametrize("device", DEVICES)
def test_compile(device):
    def step(memory, h, gates, experts):
        memory_update_(memory, *memory_statistics(h, gates, experts, memory.shape[0]), 0.9)
        return memory.norm(dim=-1)

    h, gates, experts, e = make((60, 16, 4, 2), device=device)
    compiled_memory = torch.randn(e, 16, device=device)
    memory = compiled_memory.clone()
    norms = torch.compile(step, fullgraph=True, backend="aot_eager")(compiled_memory, h, gates, experts)
    torch.testing.assert_close(norms, step(memory, h, gates, experts))
    assert torch.equal(compiled_memory, memory)
