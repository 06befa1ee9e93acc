"""Where suites and GPU tests run: on the CPU, on a GPU, or in a rehearsal, with CPU tensors in a GPU's place.

Suites, the tuner and the GPU tests ask a :class:`Device` for whatever CUDA offers beyond tensors: clocks, graphs,
counters, streams. A rehearsal answers all of it on CPU tensors, so that every line that will run on a GPU has run
before one is at hand; its times mean nothing. ``RBM_REHEARSE=1`` makes a process rehearse.
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
    """The CPU. ``name`` is where tensors live; ``is_gpu`` says whether the ways of a GPU are taken."""

    name = "cpu"
    is_gpu = False
    # What the ceilings are measured with: square products, and how many float32 numbers are copied.
    product_sizes: tuple[int, ...] = (512, 1024, 2048)
    copied_numbers = 64 << 22

    def synchronize(self) -> None:
        """Wait for everything that was launched."""

    def seconds(self, turn: Call) -> float:
        """How long a call takes, by the device's own clock."""
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
        """Size of the L2 cache."""
        return torch.cuda.get_device_properties("cuda").L2_cache_size

    def free_bytes(self) -> int:
        """Memory that no process uses."""
        return torch.cuda.mem_get_info()[0]

    def graph_pool(self) -> object:
        """Memory that several graphs may share."""
        return torch.cuda.graph_pool_handle()

    def capture(self, calls: Sequence[Call], pool: object = None) -> "Graph":
        """One CUDA graph of all calls. Graphs whose results nobody reads may share a pool of memory."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what is compiled or allocated once must be so before the capture
            for call in (*calls, calls[0]):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            results = [call() for call in calls]
        return Graph(graph.replay, results)

    def side_stream(self) -> AbstractContextManager[object]:
        """A stream beside the current one, which waits for it and is waited for."""
        return _side_stream()

    @contextmanager
    def without_synchronisation(self) -> Iterator[None]:
        """Raise RuntimeError where the host would wait for the GPU."""
        self.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def synchronizations(self, call: Call) -> int:
        """How often a call makes the host wait for the GPU, as PyTorch's own check counts."""
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
        """What a call puts on the GPU's queue: kernels, copies and fills."""
        call()
        self.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            call()
            self.synchronize()
        on_gpu = torch.autograd.DeviceType.CUDA
        return sum(event.device_type == on_gpu and not event.is_user_annotation for event in profile.events())

    def peak_bytes(self, call: Call) -> int:
        """The most memory that a call holds on the GPU beyond what was there before, its result included."""
        call()
        self.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        self.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def profiled(self, call: Call) -> None:
        """Make a call between the marks that a profiler waits for (``ncu --profile-from-start off``)."""
        self.synchronize()
        torch.cuda.profiler.start()
        call()
        self.synchronize()
        torch.cuda.profiler.stop()


class Graph:
    """A captured call: :meth:`replay` runs it again, on the same tensors; ``results`` are what it returned."""

    def __init__(self, replay: Call, results: list) -> None:
        self.replay = replay
        self.results = results


class Rehearsal(Gpu):
    """CPU tensors in the place of a GPU's: every way of a GPU is taken, none of its figures mean anything.

    Where the whole process rehearses its name is ``cpu:0``, which PyTorch takes for the CPU. Programs that name no
    device, or ``cpu``, do not say it: by it :mod:`benchmarks.gpu.devices` knows the tensors that a GPU would hold.
    """

    name = "cpu:0" if REHEARSES else "cpu"
    product_sizes = (16, 32)
    copied_numbers = 1 << 10

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def seconds(self, turn: Call) -> float:
        """One second, whatever it took: no time of a rehearsal can be taken for a measurement."""
        turn()
        return 1.0

    def architecture(self) -> int:
        """The one that the operators' launch functions assume of CPU tensors."""
        return 90

    def cache_bytes(self) -> int:
        """A cache of one kilobyte: sets of tensors rotate."""
        return 1 << 10

    def free_bytes(self) -> int:
        """Little: what needs gigabytes takes the way of a machine that lacks them."""
        return 1 << 20

    def graph_pool(self) -> object:
        """No pool."""
        return None

    def capture(self, calls: Sequence[Call], pool: object = None) -> Graph:
        """Calls made again at each replay, their results copied into those of the capture, as a graph leaves them."""
        for call in (*calls, calls[0]):
            call()
        results = [call() for call in calls]

        def replay() -> None:
            for old, call in zip(results, calls, strict=True):
                _copy(old, call())

        return Graph(replay, results)

    def side_stream(self) -> AbstractContextManager[object]:
        """There are no streams."""
        return nullcontext()

    @contextmanager
    def without_synchronisation(self) -> Iterator[None]:
        """Nothing waits here."""
        yield

    def synchronizations(self, call: Call) -> int:
        """None."""
        call()
        return 0

    def launches(self, call: Call) -> int:
        """The operators that the profiler sees."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            call()
        return len(profile.events())

    def peak_bytes(self, call: Call) -> int:
        """Not counted."""
        call()
        return 0

    def profiled(self, call: Call) -> None:
        """No profiler."""
        call()


@contextmanager
def _side_stream() -> Iterator[torch.cuda.Stream]:
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield side
    current.wait_stream(side)


def _copy(old: Any, new: Any) -> None:
    """Copy new tensors into old ones, in tensors, tuples, lists and dictionaries."""
    if isinstance(old, Tensor):
        with torch.no_grad():
            old.copy_(new)
    elif isinstance(old, dict):
        for key in old:
            _copy(old[key], new[key])
    elif isinstance(old, tuple | list):
        for one, other in zip(old, new, strict=True):
            _copy(one, other)


# Where the suites of this process run.
HERE: Device = Rehearsal() if REHEARSES else Gpu() if torch.cuda.is_available() else Device()
