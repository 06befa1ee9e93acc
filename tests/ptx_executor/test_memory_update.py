"""The CUDA kernels of the memory update, from the library's own PTX, with all watchers."""

import pytest
import torch
from cuda_launches import LIBRARY, CudaLaunches

from rbm_kernels import _machine_code
from rbm_kernels.ops.memory_update import reference

pytestmark = [
    pytest.mark.skipif(not LIBRARY.exists(), reason="librbm_cuda was not built: nvcc is missing"),
    pytest.mark.skipif(_machine_code.find_cuobjdump() is None, reason="cuobjdump is missing"),
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def drawn(rows, features, num_experts, k, dtype):
    h = torch.randn(rows, features).to(dtype)
    gates = torch.rand(rows, k, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    return h, gates, torch.rand(rows, num_experts).argsort(-1)[:, :k].int().contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "features", "num_experts", "k"),
    [(50, 64, 8, 3), (33, 47, 5, 2), (5, 2100, 9, 2), (7, 1, 1, 1), (40, 320, 12, 6)],
    ids=["aligned", "odd width", "columns in several blocks", "one column", "two rounds of gates"],
)
def test_memory_update(rows, features, num_experts, k, dtype):
    """Twice, with two orders of blocks and warps: the same bits, and those of the reference within its rounding."""
    h, gates, experts = drawn(rows, features, num_experts, k, dtype)
    exact = reference.memory_statistics(h.double(), gates.double(), experts, num_experts)
    memory = torch.randn(num_experts, features, dtype=gates.dtype)
    moved = memory.double().clone()
    reference.memory_update_(moved, *exact, 0.9)
    tolerance = 1e-12 if dtype == torch.float64 else 3e-6
    results = []
    for seed in (0, 1):
        launches, changed = CudaLaunches(seed=seed), memory.clone()
        weighted_sum, total = launches.memory_statistics(h, gates, experts, num_experts)
        launches.memory_update_(changed, weighted_sum, total, 0.9)
        results.append((weighted_sum, total, changed))
        for got, wanted in zip(results[-1], (*exact, moved), strict=True):
            assert (got.double() - wanted).abs().max() <= tolerance * max(1.0, wanted.abs().max())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_bad_rows_and_unused_experts():
    """A row with a NaN is left out; an expert that nobody chose keeps its memory."""
    h, gates, experts = drawn(40, 32, 5, 2, torch.float32)
    h[3, 4], gates[7, 1] = float("nan"), float("inf")
    experts.clamp_(max=3)
    good = torch.ones(40, dtype=torch.bool)
    good[[3, 7]] = False
    weighted_sum, total = CudaLaunches().memory_statistics(h, gates, experts, 5)
    exact = reference.memory_statistics(h[good].double(), gates[good].double(), experts[good], 5)
    torch.testing.assert_close(weighted_sum.double(), exact[0], rtol=0, atol=1e-5)
    memory = torch.randn(5, 32)
    before = memory.clone()
    CudaLaunches().memory_update_(memory, weighted_sum, total, 0.9)
    assert torch.equal(memory[4], before[4])
    assert not torch.equal(memory[:4], before[:4])
