"""Timing variants against one another, and writing down what came out.

The variants take turns within one process, so that whatever else the machine does meets all of them; results are
medians with the 20th and the 80th percentile, never means.
"""

import csv
import datetime
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

# One schema for all results, whichever suite or script wrote them.
COLUMNS = (
    *("operator", "shape", "dtype", "routing", "implementation", "metric", "median", "p20", "p80"),
    *("device", "driver", "torch", "triton", "commit", "date"),
)


@dataclass(frozen=True)
class Timing:
    """Seconds of one variant: the median, and the 20th and 80th percentile."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, seconds: list[float]) -> "Timing":
        ordered = sorted(seconds)
        last = len(ordered) - 1
        return cls(*(ordered[round(share * last)] for share in (0.5, 0.2, 0.8)))


def interleave(
    variants: dict[str, Callable[[], object]], *, seconds: float = 1.0, least: int = 5, most: int = 1000
) -> dict[str, Timing]:
    """Time every variant once a round, in turn, for about ``seconds`` in all but at least ``least`` rounds.

    Each is called twice before, to allocate and to build what it keeps. A variant that answers sooner than a turn of
    2 ms ends is called again: the clock and the caches that the variant before it left would be measured otherwise.
    """
    calls = {}
    for name, variant in variants.items():
        variant()
        start = time.perf_counter()
        variant()
        calls[name] = max(1, min(200, int(2e-3 / max(time.perf_counter() - start, 1e-9))))
    times: dict[str, list[float]] = {name: [] for name in variants}
    end = time.perf_counter() + seconds
    for round_ in range(most):
        if round_ >= least and time.perf_counter() > end:
            break
        for name, variant in variants.items():
            start = time.perf_counter()
            for _ in range(calls[name]):
                variant()
            times[name].append((time.perf_counter() - start) / calls[name])
    return {name: Timing.of(seconds_) for name, seconds_ in times.items()}


class Results:
    """A CSV file that grows row by row, so that a run that is cut off leaves what it measured."""

    def __init__(self, path: Path) -> None:
        self.path = path
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
        device: str = "cpu",
    ) -> None:
        """One figure: seconds of a :class:`Timing`, or a single number of whatever ``metric`` says."""
        timing = value if isinstance(value, Timing) else Timing(value, value, value)
        row = dict(zip(COLUMNS, (operator, shape, dtype, routing, implementation, metric), strict=False))
        row |= {name: f"{getattr(timing, name):.4g}" for name in ("median", "p20", "p80")} | machine(device)
        is_new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerow(row)
        self.rows.append(row)


@cache
def machine(device: str) -> dict[str, str]:
    """Where and with what a figure was measured."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    where = {"device": f"{_processor()}, {torch.get_num_threads()} threads", "driver": ""}
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        where = {"device": torch.cuda.get_device_name(), "driver": driver}
    try:
        import triton
    except ImportError:
        version = ""
    else:
        version = triton.__version__
    date = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
    return {**where, "torch": torch.__version__, "triton": version, "commit": commit.strip(), "date": date}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
