"""The layer at inference compared with a dense linear layer of equal cost, from one row to 1,024; checks limits.

A dense ``torch.nn.Linear`` with ``k * N`` outputs does as many multiplications as the layer's chosen experts, without
routing. Both take turns in one process, and the minimum over the turns counts, because it is the least disturbed by the
system and other processes. A row's metric contains the number of threads and the vector size in bytes.

``pytest benchmarks/test_few_rows.py --benchmark-only --seconds 2 --results benchmarks/results/cpu.csv`` on an
otherwise idle machine; then again with a build of ``-DRBM_MOST_VECTOR_BYTES=32`` in ``rbm_kernels/lib``, for AVX2.
"""

import time
from collections.abc import Callable

import pytest
import torch

from benchmarks.measure.device import HERE, threads
from benchmarks.measure.harness import Results, vector_bytes
from benchmarks.measure.pace import SMOKE
from benchmarks.measure.shapes import Shape
from rbm import FusedRbMLayer

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# Maximum ratio to the time of the dense layer, by features and outputs of the layer.
BARS = {(256, 256): 1.15, (767, 128): 1.15, (128, 10): 1.3}
# Shorter calls are repeated within a turn, because the clock takes a tenth of a microsecond.
TURN_SECONDS = 2e-4


def least_seconds(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """The minimum time of one call of each, alternating for ``seconds``, at least three times."""
    least, repeats = {}, {}
    for name, call in calls.items():
        call()
        least[name] = clocked(call, 1)
        repeats[name] = max(1, min(50, int(TURN_SECONDS / least[name])))
    end, turn = time.perf_counter() + seconds, 0
    while turn < 3 or time.perf_counter() < end:
        for name, call in calls.items():
            call()  # reload what the other call evicted from the caches
            least[name] = min(least[name], clocked(call, repeats[name]))
        turn += 1
    return least


def clocked(call: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


@pytest.mark.skipif(HERE.is_gpu, reason="kernels for the CPU")
@pytest.mark.parametrize("number", [1, 2], ids=["1 thread", "2 threads"])
@pytest.mark.parametrize(("features", "outputs"), BARS, ids=[f"D={d} N={n}" for d, n in BARS])
def test_few_rows(benchmark, results: Results, seconds: float, number: int, features: int, outputs: int):
    shape = Shape(1, features, outputs)
    layer = FusedRbMLayer(features, outputs, shape.experts, shape.top_k).eval()
    dense = torch.nn.Linear(features, shape.top_k * outputs)
    how = f"{number} thread{'s' * (number > 1)}, vectors of {vector_bytes()} bytes: least seconds"
    missed = []

    def measure() -> None:
        for rows in ROWS:
            x = torch.randn(rows, features)
            # Thousands of turns for microseconds; ``seconds`` also suffice for slower calls.
            times = least_seconds({"rbm": lambda x=x: layer(x), "torch.nn.Linear, k N": lambda x=x: dense(x)}, seconds)
            for name, least in times.items():
                results.add("few rows", str(Shape(rows, features, outputs)), name, how, least)
            ratio = times["rbm"] / times["torch.nn.Linear, k N"]
            if ratio > BARS[features, outputs]:
                missed.append(f"{rows} rows: {ratio:.2f}")

    with threads(number), torch.inference_mode():
        benchmark.pedantic(measure)
    if seconds >= SMOKE:
        assert not missed, f"over {BARS[features, outputs]} times the dense layer at {', '.join(missed)}"
