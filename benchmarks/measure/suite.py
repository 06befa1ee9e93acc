"""The steps of every suite for a workload: make tensors, check all implementations, time the correct ones.

It also records their errors, memory, launches and synchronisations.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks.measure import harness
from benchmarks.measure.device import HERE
from benchmarks.measure.harness import Call, Results, Timing, buffer_sets, interleave, relative_error
from benchmarks.measure.pace import SMOKE, Pace
from benchmarks.measure.precision import DTYPES, multiplying_as
from benchmarks.measure.shapes import DEVICE, MOST, Workload, for_this_machine
from rbm_kernels.cost import Cost

# Errors that are always allowed, even if eager PyTorch's are smaller: the norm of the difference over the norm of the
# result in float64. Sums over all rows in another order differ by this much. Twice eager PyTorch's own error is allowed
# in addition.
FLOORS = {"float32": 1e-5, "tf32": 5e-4, "bfloat16": 4e-3, "float16": 5e-4, "int32": 0.0}
T = TypeVar("T")
Implementations = Mapping[str, Callable]
# Calls one implementation with one set of tensors.
Step = Callable[[Callable, T], object]


class Ceilings:
    """The best this machine can do, measured in the same run: the fastest product and the fastest copy."""

    def __init__(self, results: Results, seconds: float) -> None:
        self._results, self._seconds = results, seconds
        self._known: dict[str, float] = {}

    def flops(self, precision: str) -> float:
        """Operations per second of the best square ``torch.mm``."""
        if precision not in self._known:
            sizes = HERE.product_sizes
            self._known[precision] = 0.0
            with multiplying_as(precision):
                for size in sizes[: self._many(3)]:
                    self._known[precision] = max(self._known[precision], self._product(size, precision))
                    if (2 * size) ** 3 / self._known[precision] > SMOKE:  # a slow loop, not faster for larger sizes
                        break
            self._add("torch.mm", precision, "FLOP/s", self._known[precision])
        return self._known[precision]

    def bandwidth(self) -> float:
        """Bytes per second, read and written, of a copy larger than all caches."""
        if "copy" not in self._known:
            source = torch.randn(HERE.copied_numbers * self._many(64) // 64, device=DEVICE)
            target = torch.empty_like(source)
            seconds = self._time(lambda: target.copy_(source))
            self._known["copy"] = 2 * source.nbytes / seconds
            self._add("copy", "float32", "bytes/s", self._known["copy"])
        return self._known["copy"]

    def _product(self, size: int, precision: str) -> float:
        a, b = (torch.randn(size, size, device=DEVICE).to(DTYPES[precision]) for _ in range(2))
        return 2 * size**3 / self._time(lambda: torch.mm(a, b))

    def _time(self, call: Call) -> float:
        return interleave({"": call}, seconds=self._seconds / 2, least=self._many(5))[""].median

    def _many(self, usual: int) -> int:
        return usual if self._seconds >= 0.5 else 1

    def _add(self, name: str, precision: str, metric: str, value: float) -> None:
        self._results.add("ceiling", "best found", name, metric, value, dtype=precision)


@dataclass
class Suite:
    """One workload of one operator. Among the implementations, ``rbm`` is ours and ``eager`` is the reference."""

    operator: str
    workload: Workload
    results: Results
    ceilings: Ceilings
    seconds: float
    # pytest-benchmark's fixture, which runs our implementation once.
    benchmark: Callable | None = None
    pace: Pace = field(default_factory=lambda: Pace(math.inf, []))
    wrong: list[str] = field(default_factory=list)
    # Implementations with a call that took longer than a comparison may, and how long it took.
    too_slow: dict[str, float] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.workload.precision]

    @property
    def compiles(self) -> bool:
        """Whether compiled peers take part: at the first shape, because they take seconds to compile, and as layers.

        Routing does not change their code. On a GPU, where compilation uses a borrowed machine's time, only in bfloat16
        (the order of rows only has int32).
        """
        shape, precision, routing = self.workload.shape, self.workload.precision, self.workload.routing
        chosen = shape == for_this_machine(MOST)[0] or self.operator == "layer"
        worth = not HERE.is_gpu or precision in ("bfloat16", "int32")
        return self.seconds >= SMOKE and routing == "uniform" and chosen and worth and self.may_compile

    @property
    def may_compile(self) -> bool:
        """Whether there is time to compile; if not, a row records it."""
        if not self.pace.may_compile:
            self._add("compiled", "left out for time", 1)
        return self.pace.may_compile

    def buffers(self, make: Callable[[], T], nbytes: Callable[[T], int]) -> list[T]:
        """Sets of tensors to use in turn, enough that none is found in a cache."""
        first = make()
        return [first, *(make() for _ in range(buffer_sets(nbytes(first)) - 1))]

    def check(
        self, metric: str, implementations: Implementations, step: Step, problem: T, exact: Sequence[Tensor]
    ) -> dict[str, Callable]:
        """The implementations whose ``step`` gives the ``exact`` results; eager PyTorch is checked first.

        The others are recorded with their error, and :meth:`finish` raises with their names. If a call takes longer
        than a comparison may, :meth:`time` skips the implementation. It is not called again, except ours and eager
        PyTorch's, for the comparison.
        """
        right: dict[str, Callable] = {}
        allowed = FLOORS[self.workload.precision]
        for name in sorted(implementations, key=lambda name: name != "eager"):
            if name in self.too_slow and name not in ("rbm", "eager"):
                self._add(name, f"{metric} too slow", self.too_slow[name])
                continue
            with multiplying_as(self.workload.precision):
                outputs = self._served(name, metric, self._watched(name, partial(step, implementations[name], problem)))
            if outputs is None:
                continue
            error = relative_error(outputs, exact)
            self._add(name, f"{metric} error", error)
            if name == "eager":
                allowed += 2 * error
            if error <= allowed:
                right[name] = implementations[name]
            else:
                self.wrong.append(f"{name}: error of {metric} is {error:.2e}, allowed is {allowed:.2e}")
        return {name: right[name] for name in implementations if name in right}

    def time(
        self, metric: str, implementations: Implementations, step: Step, buffers: Sequence[T], cost: Cost | None = None
    ) -> dict[str, Timing]:
        """Seconds of every implementation; on CUDA also as CUDA graphs, and what each launches on the device.

        ``seconds`` include the host, as in a program that calls operators one by one. ``graph seconds`` compare the
        implementations that can be captured, all as graphs.
        """
        for name in implementations:
            if name in self.too_slow:
                self._add(name, f"{metric} too slow", self.too_slow[name])
        with multiplying_as(self.workload.precision):
            timed = {name: f for name, f in implementations.items() if name not in self.too_slow}
            calls = {name: [partial(step, f, b) for b in buffers] for name, f in timed.items()}
            for name in calls:
                if "compiled" in name:  # compile outside of the clock
                    _finished(calls[name][0])()
            if HERE.is_gpu:  # memory may not suffice for more than the check
                served = [name for name in calls if self._served(name, metric, _finished(calls[name][0]))]
                calls = {name: calls[name] for name in served}
            timings = self._interleave(f"{metric} seconds", calls)
            if HERE.is_gpu:
                replayed = {name: calls[name] for name in calls if harness.can_be_captured(calls[name][0])}
                timings |= self._interleave(f"{metric} graph seconds", replayed, graphs=True)
                self._count(metric, calls)
            if self.benchmark is not None and "rbm" in calls:
                self.benchmark.pedantic(_finished(calls["rbm"][0]), rounds=3)
                self.benchmark = None
        if cost is not None:
            flops = self.ceilings.flops(self.workload.precision) if cost.flops else 1.0
            floor = cost.roofline_seconds(self.ceilings.bandwidth(), flops)
            for name, timing in timings.items():
                self._add(name, f"{metric} roofline share", floor / timing.median)
        return timings

    def saved_bytes(
        self, implementations: Implementations, step: Step, problem: T, arguments: Sequence[Tensor]
    ) -> None:
        """Bytes that each implementation's forward saves for its backward pass, not counting its arguments."""
        with multiplying_as(self.workload.precision):
            for name, implementation in implementations.items():
                kept = harness.saved_bytes(partial(step, implementation, problem), arguments)
                self._add(name, "saved bytes", kept)

    def finish(self) -> None:
        """Raise if an implementation was wrong."""
        if self.wrong:
            raise AssertionError(f"{self.operator} {self.workload}: not timed because wrong: {'; '.join(self.wrong)}")

    def _interleave(self, metric: str, calls: dict, *, graphs: bool = False) -> dict[str, Timing]:
        least = 5 if self.seconds >= SMOKE else 1
        limit = self.pace.limit(self.seconds)
        timings = interleave(calls, seconds=self.seconds, least=least, limit=limit, graphs=graphs)
        for name, timing in timings.items():
            self._add(name, metric, timing)
            if timing.rounds < least:
                self._add(name, f"{metric} rounds", timing.rounds)
        return timings

    def _watched(self, name: str, call: Callable[[], T]) -> Callable[[], T]:
        """The same call, recorded in ``too_slow`` if it takes longer than a comparison may.

        If the first call may have compiled something, a second call decides.
        """
        limit = self.pace.limit(self.seconds)

        def run() -> T:
            got: list[T] = []
            seconds = HERE.seconds(lambda: got.append(call()))
            if seconds > limit and (HERE.is_gpu or "compiled" in name):
                seconds = HERE.seconds(call)
            if seconds > limit and name != "rbm":
                self.too_slow[name] = seconds
            return got[0]

        return run

    def _served(self, name: str, metric: str, call: Callable[[], T]) -> T | None:
        """The result of a call; None, and a row that says so, if memory or the dtype does not allow it.

        For our implementation and eager PyTorch, only a lack of memory is accepted.
        """
        try:
            return call()
        except torch.OutOfMemoryError:
            self._add(name, f"{metric} out of memory", 1)
        except Exception as error:  # a library may raise anything
            if name in ("rbm", "eager"):
                raise
            print(f"{self.operator} {self.workload}: {name} does not serve this: {str(error).partition(chr(10))[0]}")
            self._add(name, f"{metric} not served", 1)
        return None

    def _count(self, metric: str, calls: dict[str, list[Call]]) -> None:
        for name, (call, *_) in calls.items():
            self._add(name, f"{metric} launches", HERE.launches(call))
            self._add(name, f"{metric} host synchronisations", HERE.synchronizations(call))
            self._add(name, f"{metric} peak bytes", HERE.peak_bytes(call))

    def _add(self, implementation: str, metric: str, value: Timing | float) -> None:
        about = {"dtype": self.workload.precision, "routing": self.workload.routing}
        self.results.add(self.operator, str(self.workload.shape), implementation, metric, value, **about)


def _finished(call: Call) -> Callable[[], bool]:
    """A call that returns True once the device is done."""

    def run() -> bool:
        call()
        HERE.synchronize()
        return True

    return run
