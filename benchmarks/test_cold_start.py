"""Time to the first answer of a new process that imports the package, builds a layer, and calls it once."""

import subprocess
import sys
import time

import pytest

from benchmarks.measure.device import HERE
from benchmarks.measure.harness import Results
from benchmarks.measure.pace import SMOKE, Pace
from benchmarks.measure.shapes import DEVICE, Shape

SHAPE = Shape(64)
# Factor by which a process may exceed the time of a comparison: compiling takes long.
STARTS = 6
START = "import torch; x = torch.randn({rows}, {features}, device='{device}', requires_grad={training}); "
LAYERS = {
    "rbm": "from rbm import FusedRbMLayer; f = FusedRbMLayer({features}, {outputs}, device='{device}')",
    "torch.nn.Linear": "f = torch.nn.Linear({features}, {outputs}, device='{device}')",
    "eager compiled": "from rbm.nn.reference import ReferenceRbMLayer; "
    "f = torch.compile(ReferenceRbMLayer({features}, {outputs}, device='{device}'))",
}
CALLS = {
    "forward": "; f.eval()\nwith torch.inference_mode(): f(x).sum().item()",
    "forward + backward": "; f(x).sum().backward(); x.grad.sum().item()",
}


@pytest.mark.parametrize("metric", CALLS)
@pytest.mark.parametrize("name", LAYERS)
def test_cold_start(
    benchmark, results: Results, seconds: float, pace: Pace, tmp_path, monkeypatch, name: str, metric: str
):
    if "compiled" in name and seconds < SMOKE:
        pytest.skip("a smoke run compiles nothing")
    if "compiled" in name and not pace.may_compile:
        pytest.skip("left out for time: the run is behind its --budget")
    # Empty caches, so that Triton and torch.compile find nothing that was compiled before.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    about = {"rows": SHAPE.rows, "features": SHAPE.features, "outputs": SHAPE.outputs, "device": DEVICE}
    program = (START + LAYERS[name] + CALLS[metric]).format(**about, training=metric != "forward")

    def run() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=limit)
        return time.perf_counter() - start

    limit = None if name == "rbm" or seconds < SMOKE else STARTS * pace.limit(seconds)
    try:
        took = benchmark.pedantic(run)
    except subprocess.TimeoutExpired:
        results.add("layer", str(SHAPE), name, f"cold {metric} too slow", limit)
        pytest.skip(f"no answer within {limit:.0f} s")
    results.add("layer", str(SHAPE), name, f"cold {metric} seconds", took)
    if HERE.is_gpu and name == "rbm":  # a second time, with Triton's cache filled
        results.add("layer", str(SHAPE), name, f"warm cache {metric} seconds", run())
