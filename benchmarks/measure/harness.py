"""Times variants against one another by alternating them, and writes the results.

The variants alternate within one process, so that other work on the machine affects all of them. Results are medians
with the 20th and the 80th percentile, never means.
"""

import csv
import datetime
import gc
import math
import os
import platform
import random
import shutil
import subprocess
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import cycle, islice
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks.measure.device import HERE, Call, Device, Gpu, Rehearsal
from benchmarks.measure.verdicts import verdict_of

Name = TypeVar("Name", bound=Hashable)

# The schema of all results, whichever suite or script wrote them.
COLUMNS = (
    *("operator", "shape", "dtype", "routing", "implementation", "metric", "median", "p20", "p80"),
    *("device", "driver", "torch", "triton", "commit", "date"),
    "verified",  # whether the operator passed its tests, see benchmarks.measure.verdicts
)


@dataclass(frozen=True)
class Timing:
    """Seconds of one variant: the median, the 20th and the 80th percentile, and the number of rounds."""

    median: float
    p20: float
    p80: float
    rounds: int = field(default=1, compare=False)

    @classmethod
    def of(cls, seconds: list[float]) -> "Timing":
        ordered = sorted(seconds)
        last = len(ordered) - 1
        return cls(*(ordered[round(share * last)] for share in (0.5, 0.2, 0.8)), rounds=len(ordered))


def interleave(
    variants: Mapping[Name, Call | Sequence[Call]],
    *,
    seconds: float = 1.0,
    least: int = 5,
    most: int = 1000,
    limit: float = math.inf,
    device: Device = HERE,
    graphs: bool = False,
) -> dict[Name, Timing]:
    """Time every variant once per round, in turn, for about ``seconds`` in total but at least ``least`` rounds.

    The turns of each round are in a new order, the same in every run: a variant that always came first would be the one
    that loads into the caches what the others then find there.

    A variant that would need more than its share of ``limit`` seconds for this is timed in fewer rounds, at least by
    one call; :attr:`Timing.rounds` has their number. Call variants that compile on the first call before.

    A variant is a call, or the same call on several sets of tensors, which are then used in turn (see
    :func:`buffer_sets`). Each is called once before, to allocate and to build what it caches, and once more by the
    clock. A call that takes less than 2 ms is repeated within its turn, because otherwise the clock, and caches left by
    the previous variant, would be measured. On a GPU the clock is the GPU's. With ``graphs``, the calls of a variant
    are captured and replayed, which excludes host time. In a rehearsal each variant has one round.
    """
    if isinstance(device, Rehearsal):
        seconds, least = 0.0, 1
    clock = device.seconds
    turns: dict[Name, tuple[Call, int, int]] = {}
    times: dict[Name, list[float]] = {}
    share = limit / max(1, len(variants))
    pool = device.graph_pool() if graphs else None
    for name, variant in variants.items():
        calls = variant if isinstance(variant, Sequence) else [variant]
        length = 1
        if graphs:
            length, calls = len(calls), [device.capture(calls, pool).replay]
        took = clock(calls[0])
        if took > share / 2:  # there is no time for a second call
            times[name] = [took / length]
            continue
        for call in calls[1:]:
            call()
        took = max(clock(calls[0]), 1e-9)
        repeats = max(1, min(200, int(2e-3 / took)))
        rounds = most if limit == math.inf else min(most, max(1, int(share / (repeats * took))))
        turns[name] = partial(_run, cycle(calls), repeats), repeats * length, rounds
        times[name] = []
    order, drawn = list(turns), random.Random(0)
    end = time.perf_counter() + seconds
    for round_ in range(most):
        if round_ >= least and time.perf_counter() > end:
            break
        drawn.shuffle(order)
        for name in order:
            turn, length, rounds = turns[name]
            if round_ < rounds:
                times[name].append(clock(turn) / length)
    return {name: Timing.of(seconds_) for name, seconds_ in times.items()}


def _run(calls: Iterator[Call], repeats: int) -> None:
    for call in islice(calls, repeats):
        call()


def buffer_sets(set_bytes: int, device: Device = HERE) -> int:
    """Number of sets of tensors to use in turn, so that a call does not find its own tensors in a cache.

    On a GPU, enough to exceed the L2 cache three times. On the CPU, one if a set is small, because caches stay warm in
    serving too; two if it exceeds a core's own caches.
    """
    if isinstance(device, Gpu):
        return max(1, min(64, -(-3 * device.cache_bytes() // set_bytes)))
    return 1 if set_bytes <= 2 << 20 else 2


def can_be_captured(call: Call, device: Device = HERE) -> bool:
    """Whether a call can be captured in a CUDA graph: it does not wait for the device, and capturing it succeeds."""
    if device.synchronizations(call):
        return False
    # No training step was captured in the first test of a process (H100, torch 2.11). On a CPU, gradient nodes of the
    # first steps live on until cycles are collected; such a node belongs to another stream, which prevents a capture.
    gc.collect()
    try:
        device.capture([call])
    except RuntimeError as error:
        print(f"not captured in a CUDA graph: {str(error).partition(chr(10))[0]}")
        device.synchronize()
        # A capture that fails leaves PyTorch's random generator in its state for captures, in which every later random
        # number raises (seen on an H100 with torch 2.11). The end of a capture that succeeds resets it.
        device.capture([lambda: torch.zeros(1, device=device.name)])
        return False
    return True


def saved_bytes(call: Call, arguments: Iterable[Tensor]) -> int:
    """Bytes that autograd saves for a call's backward pass, on any device, not counting the arguments themselves."""
    given = {storage.data_ptr() for argument in arguments for storage in _storages(argument)}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        for storage in _storages(tensor):
            if storage.data_ptr() not in given:
                kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = call()  # kept alive, so that no address is reused
    del result
    return sum(kept.values())


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    is_sparse = tensor.layout == torch.sparse_csr
    parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values()) if is_sparse else (tensor,)
    return [part.untyped_storage() for part in parts]


def relative_error(outputs: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest error of the outputs: the norm of the difference over the norm of the exact result."""
    pairs = zip(outputs, exact, strict=True)
    with torch.no_grad():
        differences = [((x.double() - y).norm(), y.double().norm()) for x, y in pairs]
    errors = [float(difference / norm.clamp_min(1e-300)) for difference, norm in differences]
    return float("nan") if any(error != error for error in errors) else max(errors)


class Results:
    """A CSV file that is written row by row, so that an interrupted run keeps its measurements.

    Args:
        path: the file; rows are added to an existing one.
        remark: what to add to the device of every row.
    """

    def __init__(self, path: Path, remark: str = "") -> None:
        self.path, self.remark = path, remark
        self.rows: list[dict] = []

    def add(
        self,
        operator: str,
        shape: str,
        implementation: str,
        metric: str,
        value: Timing | float,
        *,
        dtype: str = "float32",
        routing: str = "uniform",
        device: Device = HERE,
    ) -> None:
        """Add one figure: seconds (a :class:`Timing`), or a single number described by ``metric``."""
        timing = value if isinstance(value, Timing) else Timing(value, value, value)
        row = dict(zip(COLUMNS, (operator, shape, dtype, routing, implementation, metric), strict=False))
        row |= {name: f"{getattr(timing, name):.4g}" for name in ("median", "p20", "p80")} | machine(device)
        row["device"] += self.remark
        row["verified"] = verdict_of(operator)
        columns = self._columns()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns or COLUMNS, lineterminator="\n", extrasaction="ignore")
            if not columns:
                writer.writeheader()
            writer.writerow(row)
        self.rows.append(row)

    def _columns(self) -> list[str]:
        """Columns of the existing file, which an older version may have created; empty if there is no file."""
        if not self.path.exists():
            return []
        with open(self.path, newline="", encoding="utf-8") as file:
            return next(csv.reader(file), [])


@cache
def machine(device: Device = HERE) -> dict[str, str]:
    """The machine and versions with which a figure was measured."""
    # For a copy of the tree without its history, the environment provides the commit.
    commit = os.environ.get("RBM_COMMIT") or _output("git", "rev-parse", "--short", "HEAD")
    where = {"device": f"{processor()}, {torch.get_num_threads()} threads", "driver": ""}
    if isinstance(device, Rehearsal):
        where = {"device": "rehearsal", "driver": ""}
    elif device.is_gpu:
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        where = {"device": torch.cuda.get_device_name(), "driver": driver}
    try:
        import triton
    except ImportError:
        version = ""
    else:
        version = triton.__version__
    date = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
    return {**where, "torch": torch.__version__, "triton": version, "commit": commit, "date": date}


def _output(*command: str) -> str:
    """The first line printed by a program; empty if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return printed.partition("\n")[0].strip()


def processor() -> str:
    """The processor's name."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def vector_bytes() -> int:
    """Vector size of librbm_cpu on this machine in bytes: a single output is packed as one vector."""
    from rbm_kernels import pack_experts  # gpu.sh imports this module before it builds the libraries

    return 4 * pack_experts(torch.zeros(1, 1, 1), None).shape[2]
