"""RbMFeedForward at inference on a CPU, compared with PyTorch and with the experts of two servers of language models.

The width of the shape's outputs is the hidden width. There are no biases. Every peer gets the gates and experts of our
own routing kernel, which is faster than PyTorch's operators, and is timed together with it.
"""

from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks.measure.device import HERE
from benchmarks.measure.shapes import CORA, DEVICE, LARGE, PRECISIONS, Problem, Shape, Workload
from benchmarks.peers import ffn_peers
from benchmarks.peers.cpu_servers import prepared
from benchmarks.peers.ffn import cost_forward
from rbm import RbMFeedForward
from rbm.nn.reference import ReferenceRbMFeedForward
from rbm_kernels import cosine_topk

pytestmark = pytest.mark.skipif(HERE.is_gpu, reason="test_ffn.py measures the products on a GPU")

ROWS = (1, 8, 64, CORA)
WORKLOADS = [Workload(shape, precision) for precision in PRECISIONS for shape in (*map(Shape, ROWS), *LARGE)]


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_feed_forward(suite, workload: Workload):
    run, shape = suite("feed_forward", workload), workload.shape
    problems = run.buffers(lambda: Problem.of(workload), lambda p: p.x.nbytes)
    sizes = (shape.features, shape.outputs, shape.experts, shape.top_k)
    options = {"activation": "swiglu", "bias": False, "device": DEVICE}
    layer = RbMFeedForward(*sizes, dtype=run.dtype, **options).eval()
    layer.memory.copy_(problems[0].memory)
    exact = ReferenceRbMFeedForward(*sizes, dtype=torch.float64, **options).eval()
    exact.load_state_dict(layer.state_dict())

    def routed(function, x: Tensor) -> Tensor:
        gates, experts, _ = cosine_topk(x, layer.memory, shape.top_k)
        return function(x, gates, experts)

    def plain(function, x: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
        return function(x, layer.weight_in, layer.weight_out, gates, experts)

    functions = {name: partial(plain, f) for name, f in ffn_peers(compiled=run.compiles).items() if "rbm" not in name}
    functions |= prepared(layer.weight_in, layer.weight_out)
    implementations = {"rbm": layer} | {name: partial(routed, f) for name, f in functions.items()}
    with torch.inference_mode():
        expected = exact(problems[0].x.double())
        right = run.check("forward", implementations, lambda f, p: (f(p.x),), problems[0], (expected,))
        run.time("forward", right, lambda f, p: f(p.x), problems, cost_forward(shape.rows, *sizes, run.dtype))
