"""Where suites and GPU tests run: on the CPU, on a GPU, or in a rehearsal with CPU tensors instead of GPU tensors.

Suites, the tuner and the GPU tests use a :class:`Device` for everything that CUDA offers in addition to tensors:
clocks, graphs, counters, streams. A rehearsal provides all of this on CPU tensors, so that every line that will run on
a GPU can be tested without one; its times have no meaning. ``RBM_REHEARSE=1`` makes a process rehearse.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], object]
REHEARSES = os.environ.get("RBM_REHEARSE") == "1"


class Device:
    """The CPU. ``name`` is the device of tensors; ``is_gpu`` tells whether GPU code paths are used."""

    name = "cpu"
    is_gpu = False
    # For measuring the ceilings: sizes of square products, and how many float32 numbers are copied.
    product_sizes: tuple[int, ...] = (512, 1024, 2048)
    copied_numbers = 64 << 22

    def synchronize(self) -> None:
        """Wait for everything that was launched."""

    def seconds(self, turn: Call) -> float:
        """Duration of a call, by the device's own clock."""
        start = time.perf_counter()
        turn()
        return time.perf_counter() - start


class Gpu(Device):
    """An NVIDIA GPU, the current CUDA device."""

    name = "cuda"
    is_gpu = True
    product_sizes = (4096, 8192)

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize()

    def seconds(self, turn: Call) -> float:
        """By CUDA events around the call."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        turn()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def architecture(self) -> int:
        """Compute capability, such as 90."""
        major, minor = torch.cuda.get_device_capability()
        return 10 * major + minor

    def cache_bytes(self) -> int:
        """Size of the L2 cache in bytes."""
        return torch.cuda.get_device_properties("cuda").L2_cache_size

    def free_bytes(self) -> int:
        """Free GPU memory in bytes."""
        return torch.cuda.mem_get_info()[0]

    def graph_pool(self) -> object:
        """Memory pool that several graphs may share."""
        return torch.cuda.graph_pool_handle()

    def capture(self, calls: Sequence[Call], pool: object = None) -> "Graph":
        """Capture all calls in one CUDA graph. Graphs whose results are not read may share a memory pool."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compilation and first allocations must happen before the capture
            for call in (*calls, calls[0]):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            results = [call() for call in calls]
        return Graph(graph.replay, results)

    def side_stream(self) -> AbstractContextManager[object]:
        """A stream that runs in parallel with the current one; they are synchronised at both ends."""
        return _side_stream()

    @contextmanager
    def without_synchronisation(self) -> Iterator[None]:
        """Raise RuntimeError if the host would wait for the GPU."""
        self.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def synchronizations(self, call: Call) -> int:
        """How often a call makes the host wait for the GPU, according to PyTorch's own check."""
        call()
        self.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                call()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)

    def launches(self, call: Call) -> int:
        """Number of kernels, copies and fills that a call launches."""
        call()
        self.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            call()
            self.synchronize()
        on_gpu = torch.autograd.DeviceType.CUDA
        return sum(event.device_type == on_gpu and not event.is_user_annotation for event in profile.events())

    def peak_bytes(self, call: Call) -> int:
        """Peak GPU memory of a call, beyond what was allocated before, including its result."""
        call()
        self.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        self.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def profiled(self, call: Call) -> None:
        """Make a call within the range that a profiler records (``ncu --profile-from-start off``)."""
        self.synchronize()
        torch.cuda.profiler.start()
        call()
        self.synchronize()
        torch.cuda.profiler.stop()


class Graph:
    """A captured call. :meth:`replay` runs it again, on the same tensors; ``results`` is what it returned."""

    def __init__(self, replay: Call, results: list) -> None:
        self.replay = replay
        self.results = results


class Rehearsal(Gpu):
    """CPU tensors instead of GPU tensors: all GPU code paths are taken, but no figure is meaningful.

    If the whole process rehearses, the name is ``cpu:0``, which PyTorch treats as the CPU. Code that names no device,
    or ``cpu``, does not use this name, so :mod:`benchmarks.gpu.devices` can tell which tensors would be on the GPU.
    """

    name = "cpu:0" if REHEARSES else "cpu"
    product_sizes = (16, 32)
    copied_numbers = 1 << 10

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def seconds(self, turn: Call) -> float:
        """Always one second, so that no time of a rehearsal can be mistaken for a measurement."""
        turn()
        return 1.0

    def architecture(self) -> int:
        """The architecture that the operators' launch functions assume for CPU tensors."""
        return 90

    def cache_bytes(self) -> int:
        """A cache of one kilobyte, so that several sets of tensors are used in turn."""
        return 1 << 10

    def free_bytes(self) -> int:
        """A small number, so that code that needs gigabytes takes the path for machines without them."""
        return 1 << 20

    def graph_pool(self) -> object:
        """No memory pool."""
        return None

    def capture(self, calls: Sequence[Call], pool: object = None) -> Graph:
        """Repeat the calls at each replay and copy their results into the captured ones, as a graph would."""
        for call in (*calls, calls[0]):
            call()
        results = [call() for call in calls]

        def replay() -> None:
            for old, call in zip(results, calls, strict=True):
                _copy(old, call())

        return Graph(replay, results)

    def side_stream(self) -> AbstractContextManager[object]:
        """No stream."""
        return nullcontext()

    @contextmanager
    def without_synchronisation(self) -> Iterator[None]:
        """No check."""
        yield

    def synchronizations(self, call: Call) -> int:
        """Always 0."""
        call()
        return 0

    def launches(self, call: Call) -> int:
        """Number of operators that the profiler sees."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            call()
        return len(profile.events())

    def peak_bytes(self, call: Call) -> int:
        """Not measured."""
        call()
        return 0

    def profiled(self, call: Call) -> None:
        """Make the call without a profiler."""
        call()


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Let PyTorch use this many threads on the CPU, and restore the former number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _side_stream() -> Iterator[torch.cuda.Stream]:
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield side
    current.wait_stream(side)


def _copy(old: Any, new: Any) -> None:
    """Copy new tensors into old ones, within tensors, tuples, lists and dictionaries."""
    if isinstance(old, Tensor):
        with torch.no_grad():
            old.copy_(new)
    elif isinstance(old, dict):
        for key in old:
            _copy(old[key], new[key])
    elif isinstance(old, tuple | list):
        for one, other in zip(old, new, strict=True):
            _copy(one, other)


# The device on which the suites of this process run.
HERE: Device = Rehearsal() if REHEARSES else Gpu() if torch.cuda.is_available() else Device()
