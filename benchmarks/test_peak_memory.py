"""Memory of a large batch beyond what the mathematics needs, measured in a separate process."""

import json
import subprocess
import sys

import pytest

from benchmarks.measure.device import Device
from benchmarks.measure.harness import Results
from benchmarks.measure.shapes import Shape

ROWS, FEATURES, CPU = 65536, 256, Device()

# The highest resident size before and after. A small batch runs first, so that libraries have allocated their buffers.
MEASURE = """
import json, pathlib, sys
import torch
from rbm import FusedRbMLayer

def peak():  # not getrusage: that begins with what the parent process held
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])

training, rows, features = sys.argv[1] == "training", int(sys.argv[2]), int(sys.argv[3])
layer = FusedRbMLayer(features, features).train(training)
with torch.set_grad_enabled(training):
    y = layer(torch.randn(512, features, requires_grad=training))
    if training:
        y.sum().backward()
        layer.zero_grad(set_to_none=True)
    del y
    x = torch.randn(rows, features, requires_grad=training)
    grad = torch.randn(rows, features) if training else None
    before = peak()
    y = layer(x)
    if training:
        y.backward(grad)
    grown = peak() - before
parameters = sum(p.numel() for p in layer.parameters()) * 4
print(json.dumps({"grown": grown, "rows": x.numel() * 4, "parameters": parameters}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak resident size as Linux counts it")
@pytest.mark.parametrize("mode", ["serving", "training"])
def test_peak_memory(benchmark, results: Results, mode: str):
    command = [sys.executable, "-c", MEASURE, mode, str(ROWS), str(FEATURES)]
    run = benchmark.pedantic(lambda: subprocess.run(command, capture_output=True, text=True, check=True))
    measured = json.loads(run.stdout.splitlines()[-1])
    shape = str(Shape(ROWS, FEATURES, FEATURES))
    if mode == "serving":
        extra = measured["grown"] - measured["rows"]  # y has the size of x
        results.add("layer", shape, "rbm", "forward extra memory / (x + y)", extra / (2 * measured["rows"]), device=CPU)
    else:
        needed = 4 * measured["rows"] + 2 * measured["parameters"]  # x, y, parameters, and the gradient of each
        held = 2 * measured["rows"] + measured["parameters"]  # x, the gradient of y, parameters: allocated before
        peak = (measured["grown"] + held) / needed
        results.add("layer", shape, "rbm", "forward + backward peak memory / needed", peak, device=CPU)
