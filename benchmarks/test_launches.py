"""Host time of the launches in a training step, all of it Python. Needs no GPU.

Tensors are on the CPU, the Triton operators are registered for the CPU's dispatch key, and nothing is launched:
``triton.runtime.JITFunction.run`` is replaced by a function that does nothing. The rest is the host's work: the layer,
autograd, the dispatcher, argument checks, configurations, allocation of outputs, and the calls of ``run`` with all
their arguments. Not included are the query of the current CUDA device and Triton's own work inside ``run`` (argument
binding, the key of its cache, the driver's call), which ``test_tritons_own_launcher`` times separately. On a GPU, only
the first launch for each shape goes through ``run``; later ones pass the compiled kernel to the driver
(:mod:`rbm_kernels._launching`), so their host time is another. The two operators of the memory update, which are C++ on
a GPU, are replaced by Python functions that allocate their outputs.

Seconds are CPU time of the thread, so a busy machine has little effect. Shapes are tiny, so that PyTorch's own
operators (folding, running sums) take no longer than their launches would.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.measure.device import Call, Device, threads
from benchmarks.measure.harness import Results, Timing, interleave
from benchmarks.measure.shapes import Shape
from rbm import FusedRbMLayer
from rbm.nn import scaled_experts
from rbm_kernels import cosine_topk, expert_matmul, expert_order, routed_matmul
from rbm_kernels._library import TRITON_OPERATORS
from rbm_kernels.ops.expert_matmul import config
from rbm_kernels.ops.expert_matmul import op as expert_matmul_op

triton = pytest.importorskip("triton")
from triton.runtime.interpreter import GridExecutor  # noqa: E402

# Tiny features, for the reason above. So few rows are not put in order, but listed for the weight's gradient.
SHAPE = Shape(1025, 16, 16)


# Launches of Triton kernels by number of rows at D = N = 256, E = 8, k = 3: for an inference call, and for a forward
# and backward pass. One row, a served batch, Cora, and enough rows for an order in several launches, as 169,343 are.
# Not counted are PyTorch's own kernels (a running sum, casts), folding, which takes one launch each way, and the
# memory update, which librbm_cuda serves if it was built.
METRICS = ("launches of an inference call", "launches of a training step")
COUNTED = {1: (1, 4), 64: (1, 4), 2708: (3, 8), 20_000: (5, 10)}


class Processor(Device):
    """The CPU, timed by the CPU time of the thread: other work on the machine is not counted."""

    def seconds(self, turn: Call) -> float:
        """The CPU time of the turn."""
        start = time.thread_time()
        turn()
        return time.thread_time() - start


CPU = Processor()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with threads(1):
        yield


class Operators:
    """The operators as registered for CUDA, on CPU tensors, with a launcher that only counts its calls.

    While ``idle``, they return their first results again; the remaining time of a step is not due to launches.
    """

    def __init__(self) -> None:
        self.launches = 0
        self.idle = False
        self._returned: dict[str, tuple[Tensor, ...] | Tensor | None] = {}

    @contextmanager
    def serving(self) -> Iterator["Operators"]:
        library = torch.library.Library("rbm", "IMPL")
        try:
            for name, implementation in TRITON_OPERATORS.items():
                if not name.startswith("memory_"):  # served by librbm_cuda, if it was built
                    library.impl(name, self._switched(name, implementation), "CPU")
            library.impl("memory_statistics", _memory_statistics, "CPU")
            library.impl("memory_update_", lambda *_, **__: None, "CPU")
            with (
                mock.patch.object(expert_matmul_op, "_kernels_serve", lambda x: x.dtype != torch.float64),
                mock.patch.object(scaled_experts, "_few", return_value=False),  # as on a GPU
                mock.patch.object(triton.runtime.JITFunction, "run", self._launch_nothing),
                mock.patch.object(GridExecutor, "__call__", self._launch_nothing),  # tests use Triton's interpreter
            ):
                yield self
        finally:
            library._destroy()

    def _launch_nothing(self, *args, **kwargs) -> None:
        self.launches += 1

    def _switched(self, name: str, implementation: Callable) -> Callable:
        def call(*args, **kwargs):
            if self.idle:
                return _aliases(self._returned[name])
            result = implementation(*args, **kwargs)
            if name not in self._returned:
                self._returned[name] = result
            return result

        return call


def count_launches(shape: Shape, *, training: bool) -> int:
    """Launches of the layer's forward and backward pass, or of its forward pass in inference mode."""
    layer = FusedRbMLayer(shape.features, shape.outputs, shape.experts, shape.top_k).train(training)
    x = torch.zeros(shape.rows, shape.features, requires_grad=training)
    with Operators().serving() as operators:
        if training:
            grad = torch.zeros(1, shape.outputs).expand(shape.rows, -1)
            torch.autograd.grad(layer(x), [x, *layer.parameters()], grad)
        else:
            # What the layer calls on a GPU. On a CPU it calls the operator of packed weights.
            with torch.inference_mode():
                routed_matmul(x, layer.memory, layer.weight, layer.bias, shape.top_k)
    return operators.launches


def _memory_statistics(h: Tensor, gates: Tensor, experts: Tensor, num_experts: int, **_) -> tuple[Tensor, Tensor]:
    return gates.new_empty(num_experts, h.shape[1]), gates.new_empty(num_experts)


def _aliases(tensors: tuple[Tensor, ...] | Tensor) -> tuple[Tensor, ...] | Tensor:
    if isinstance(tensors, tuple):
        return tuple([tensor.detach() for tensor in tensors])
    return tensors.detach()


@pytest.mark.parametrize("rows", COUNTED)
@pytest.mark.filterwarnings("ignore:.*verrid.*:UserWarning")
def test_launches(rows: int, results: Results):
    shape = Shape(rows, 256, 256)
    for metric, training, launches in zip(METRICS, (False, True), COUNTED[rows], strict=True):
        assert count_launches(shape, training=training) == launches
        _add(results, metric, launches, shape=shape)


@pytest.mark.filterwarnings("ignore:.*verrid.*:UserWarning")
def test_training_step(benchmark, results: Results, seconds: float):
    layer = FusedRbMLayer(SHAPE.features, SHAPE.outputs, SHAPE.experts, SHAPE.top_k)
    x = torch.randn(SHAPE.rows, SHAPE.features, requires_grad=True)
    grad = torch.randn(SHAPE.rows, SHAPE.outputs)
    inputs = [x, *layer.parameters()]

    def step(operators: Operators, idle: bool) -> tuple[Tensor, ...]:
        operators.idle = idle
        return torch.autograd.grad(layer(x), inputs, grad)

    with Operators().serving() as operators:
        step(operators, idle=False)
        _add(results, "launches of a training step", operators.launches)
        assert operators.launches == 7
        timings = _in_pairs(lambda: step(operators, False), lambda: step(operators, True), seconds)
        benchmark.pedantic(lambda: step(operators, False), rounds=3)
        for name, idle in (("rbm", False), ("no launches", True)):
            calls = _function_calls(partial(step, operators, idle))
            _add(results, "function calls of a training step", calls, name)
    whole, rest, launches = timings
    _add(results, "training step host seconds", whole)
    _add(results, "training step host seconds", rest, "no launches")
    _add(results, "training step launch host seconds", launches)


def _function_calls(call: Call) -> int:
    """Number of function calls of Python, including C functions: not affected by other programs on the machine."""
    count = 0

    def note(frame, event: str, argument) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def _in_pairs(whole: Call, rest: Call, seconds: float) -> list[Timing]:
    """Seconds of two calls and their difference, measured in pairs, so that disturbances affect both."""
    times: list[tuple[float, float, float]] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        one, other = CPU.seconds(whole), CPU.seconds(rest)
        times.append((one, other, one - other))
    return [Timing.of(list(column)) for column in zip(*times, strict=True)]


@pytest.mark.filterwarnings("ignore:.*verrid.*:UserWarning")
def test_operators(results: Results, seconds: float):
    """Each operator as a training step calls it, without a derivative. The rows' order is measured separately."""
    x, grad = torch.randn(SHAPE.rows, SHAPE.features), torch.randn(SHAPE.rows, SHAPE.outputs)
    memory = torch.randn(SHAPE.experts, SHAPE.features)
    weight = torch.randn(SHAPE.experts, SHAPE.outputs, SHAPE.features)
    bias = torch.randn(SHAPE.experts, SHAPE.outputs)
    gates = torch.rand(SHAPE.rows, SHAPE.top_k)
    experts = torch.zeros(SHAPE.rows, SHAPE.top_k, dtype=torch.int32)
    height = config.tile_rows(SHAPE.rows)
    ops = torch.ops.rbm
    with Operators().serving():
        order = expert_order(experts, SHAPE.experts, height)
        arguments = (x, weight, bias, gates, experts)
        variants = {
            "cosine_topk": lambda: cosine_topk(x, memory, SHAPE.top_k),
            "expert_order": lambda: expert_order(experts, SHAPE.experts, height),
            "expert_matmul": lambda: expert_matmul(*arguments, order),
            "expert_matmul_backward_input": lambda: ops.expert_matmul_backward_input(grad, *arguments, False, *order),
            "expert_matmul_backward_weight": lambda: ops.expert_matmul_backward_weight(
                grad, x, gates, experts, SHAPE.experts, True
            ),
        }
        for name, timing in interleave(variants, seconds=seconds, device=CPU).items():
            _add(results, f"{name} host seconds", timing)


# Binding the arguments, the key of the cache of compiled kernels, and everything up to the C code of the driver's call.
TRITONS_OWN = """
import json, time
import torch, triton
from triton.compiler import CompiledKernel
from benchmarks.measure.harness import interleave
from benchmarks.test_launches import CPU
from rbm_kernels._ahead_of_time import AbsentGpu
from rbm_kernels.ops.expert_matmul import launch

def nothing(*args): pass

def not_loaded(kernel):
    kernel._run, kernel.function = nothing, 0

triton.runtime.driver.set_active(AbsentGpu(90))
CompiledKernel._init_handles = not_loaded
run, made = triton.runtime.JITFunction.run, []

def noted(self, *args, **kwargs):
    made.append((self, args, kwargs))
    return run(self, *args, **kwargs)

triton.runtime.JITFunction.run = noted
x, weight = torch.randn(1025, 16), torch.randn(8, 16, 16)
bias, gates, experts = torch.randn(8, 16), torch.rand(1025, 3), torch.zeros(1025, 3, dtype=torch.int32)
launch.expert_matmul(x, weight, bias, gates, experts, experts[:, 0].contiguous(), experts[:65], experts[:65, 0], 16)
triton.runtime.JITFunction.run = run
(kernel, args, kwargs), = made
timing = interleave({"": lambda: kernel.run(*args, **kwargs)}, seconds=SECONDS, device=CPU)[""]
print(json.dumps(vars(timing)))
"""


def test_tritons_own_launcher(results: Results, seconds: float):
    """``JITFunction.run`` of the forward kernel, compiled for sm_90, without the driver's call."""
    if seconds < 0.5:
        pytest.skip("a smoke run compiles nothing")
    program = TRITONS_OWN.replace("SECONDS", str(seconds))
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    _add(results, "Triton's own launcher host seconds a launch", Timing(**json.loads(ran.stdout)))


def _add(results: Results, metric: str, value, implementation: str = "rbm", shape: Shape = SHAPE) -> None:
    results.add("launches", str(shape), implementation, metric, value, device=CPU)
