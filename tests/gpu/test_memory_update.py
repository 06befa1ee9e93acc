"""The memory update on a GPU, by librbm_cuda and by Triton: properties of its kernels other than their results.

Results against float64, strides, bad rows and mistakes are tested on CPU and GPU alike, in
tests/rbm_kernels/test_memory_update.py. In the rehearsal librbm_cpu takes the place of librbm_cuda.
"""

import pytest
import torch
from on_gpu import (
    OperatorOnGpu,
    check_compiled,
    check_devices,
    check_peak,
    check_repeats,
    full_only,
)

from rbm_kernels import memory_statistics, memory_update_
from rbm_kernels.ops.memory_update import reference

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16]


@pytest.fixture(params=["librbm_cuda", "Triton"])
def implementation(request) -> str:
    """The implementation to use."""
    return request.param


@pytest.fixture
def gpu(bare_gpu, implementation):
    """The GPU or the rehearsal, with the memory update by one implementation and then by the other."""
    with bare_gpu.memory_update_by(implementation):
        yield bare_gpu


def drawn(gpu, rows, features, num_experts, k, dtype=torch.float32, seed=0):
    """Memory, rows, gates and experts."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (
        torch.randn(num_experts, features, generator=generator).to(gpu.name, wide),
        torch.randn(rows, features, generator=generator).to(gpu.name, dtype),
        torch.rand(rows, k, generator=generator).softmax(-1).to(gpu.name, wide),
        torch.rand(rows, num_experts, generator=generator).argsort(-1)[:, :k].int().contiguous().to(gpu.name),
    )


def step(memory, h, gates, experts):
    """Statistics and the updated memory; the caller's memory is not changed."""
    statistics = memory_statistics(h, gates, experts, memory.shape[0])
    moved = memory.clone()
    memory_update_(moved, *statistics, 0.9)
    return *statistics, moved


def assert_as_good_as_eager(got, h, gates, experts, num_experts):
    """At most twice the error of eager PyTorch in the same dtype against float64, and eight roundings.

    In float64 the exact sums are eager PyTorch's own, so the roundings of both are allowed: 64.
    """
    exact = reference.memory_statistics(h.double(), gates.double(), experts, num_experts)
    eager = reference.memory_statistics(h, gates, experts, num_experts)
    for value, truth, peer in zip(got, exact, eager, strict=True):
        assert value.dtype == peer.dtype
        floor = (
            (64 if value.dtype == torch.float64 else 8)
            * torch.finfo(value.dtype).eps
            * max(1.0, truth.abs().max().item())
        )
        assert (value - truth).abs().max() <= 2 * (peer - truth).abs().max() + floor


# (D, E, k) beside the paper's: one expert, the most that a block of threads holds at once, and more than those.
SHAPES = {
    "96 features": (96, 8, 3),
    "100 features": (100, 8, 3),
    "256 features": (256, 8, 3),
    "1,433 features": (1_433, 8, 3),
    "8,415 features": (8_415, 8, 3),
    "47 features": (47, 8, 3),
    "one expert": (64, 1, 1),
    "33 experts": (128, 33, 3),
    "64 experts": (256, 64, 8),
}
CASES = [
    pytest.param(*shape, id=name, marks=[pytest.mark.core] * (name in ("256 features", "1,433 features")))
    for name, shape in SHAPES.items()
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("features", "num_experts", "k"), CASES)
def test_same_bits_every_run(features, num_experts, k, dtype, gpu):
    features = gpu.size(features, min(features, 700))  # three tiles of the Triton kernel
    draw = lambda seed: drawn(gpu, gpu.size(5_000, 20), features, num_experts, k, dtype, seed)  # noqa: E731
    check_repeats(step, draw, gpu.size(20, 2))
    memory, *arguments = draw(0)
    assert_as_good_as_eager(step(memory, *arguments)[:2], *arguments, num_experts)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6, 7, 8])
def test_top_k(k, gpu):
    _, *arguments = drawn(gpu, gpu.size(5_000, 60), 64, 8, k)
    assert_as_good_as_eager(memory_statistics(*arguments, 8), *arguments, 8)


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reference_shape(dtype, gpu):
    _, *arguments = drawn(gpu, gpu.size(169_343, 300), 256, 8, 3, dtype)
    assert_as_good_as_eager(memory_statistics(*arguments, 8), *arguments, 8)


@pytest.mark.parametrize("dtype", [torch.float32, *full_only(torch.bfloat16)], ids=str)
class TestOperator(OperatorOnGpu):
    test_repeats = None  # test_same_bits_every_run does this

    @pytest.fixture
    def call(self):
        return step

    @pytest.fixture
    def draw(self, dtype, gpu):
        return lambda seed: drawn(gpu, gpu.size(20_000, 60), 64, 8, 3, dtype, seed)

    @pytest.mark.core
    def test_graph_with_new_inputs(self, call, draw, gpu):
        super().test_graph_with_new_inputs(call, draw, gpu)

    def test_peak_memory(self, draw, gpu):
        """Sums, totals and a copy of the memory; partial sums of a wave of blocks, two a multiprocessor.

        At most 148 multiprocessors on the machines at hand but one.
        """
        memory, *_ = draw(0)
        sums = memory.nbytes + memory.itemsize * len(memory)
        check_peak(gpu, step, draw, sums + memory.nbytes + 2 * 148 * sums)

    def test_compiled(self, draw, gpu):
        def call(memory, h, gates, experts):
            return memory_statistics(h, gates, experts, 8)

        check_compiled(gpu, call, draw)


def test_update_in_a_graph_moves_the_memory_itself(gpu):
    """Replaying twice from the same start changes it like two calls."""
    memory, h, gates, experts = drawn(gpu, gpu.size(3_000, 60), 64, 8, 3)
    start = memory.clone()

    def move():
        memory_update_(memory, *memory_statistics(h, gates, experts, 8), 0.9)

    graph = gpu.capture([lambda: move() or memory])
    memory.copy_(start)
    move()
    move()
    expected = memory.clone()
    memory.copy_(start)
    graph.replay()
    graph.replay()
    assert torch.equal(memory, expected)


def test_experts_out_of_range_are_skipped(gpu, implementation):
    """The host would have to wait to report them; on the CPU they are an error."""
    _, h, gates, experts = drawn(gpu, 300, 32, 8, 3)
    experts[5], experts[6] = -1, 8
    if gpu.rehearses and implementation == "librbm_cuda":
        with pytest.raises(RuntimeError, match="experts holds -1 in row 5"):
            memory_statistics(h, gates, experts, 8)
        return
    got = memory_statistics(h, gates, experts, 8)
    good = ((experts >= 0) & (experts < 8)).all(-1)
    expected = reference.memory_statistics(h[good].double(), gates[good].double(), experts[good], 8)
    for value, truth in zip(got, expected, strict=True):
        torch.testing.assert_close(value.double(), truth, atol=1e-4, rtol=1e-5)


def test_beyond_31_bits(gpu):
    """Offsets past 2^31 elements: every row points along the first feature."""
    rows, features = gpu.size((2**24 + 5, 130), (200, 130))

    def work():
        h = torch.zeros(rows, features, device=gpu.name, dtype=torch.bfloat16)
        h[:, 0] = 1
        gates = torch.zeros(rows, 1, device=gpu.name)
        experts = (torch.arange(rows, device=gpu.name) % 8).int()[:, None]
        weighted_sum, total = memory_statistics(h, gates, experts, 8)
        counts = torch.bincount(experts.flatten(), minlength=8)
        torch.testing.assert_close(total.double(), counts.double(), rtol=1e-6, atol=0)
        torch.testing.assert_close(weighted_sum[:, 0].double(), counts.double(), rtol=1e-6, atol=0)

    gpu.with_memory(8 * rows * features, work)


def test_two_devices(gpu, implementation):
    """librbm_cuda looks for itself, and names the arguments alone; in the rehearsal the meta device would answer."""
    memory, h, gates, experts = drawn(gpu, 6, 16, 4, 2)
    named = implementation == "Triton"
    if gpu.rehearses and not named:
        pytest.skip("the dispatcher gives tensors of two devices to CUDA, and nothing else has this check")
    check_devices(gpu, "memory_statistics", dict(h=h, gates=gates, experts=experts, num_experts=4), named=named)
    weighted_sum, total = memory_statistics(h, gates, experts, 4)
    arguments = dict(memory=memory, weighted_sum=weighted_sum, total=total, decay=0.9)
    check_devices(gpu, "memory_update_", arguments, named=named)
