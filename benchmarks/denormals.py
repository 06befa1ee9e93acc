"""Time of a matrix product in which some numbers are below the normal range, as they are and counted as zeros.

    python -m benchmarks.denormals --out benchmarks/results/denormals.csv

Training counts them as zeros (``rbm_kernels/_denormals.py``). 512 rows of 1,024 float32 features and as many outputs.
"""

import argparse
import statistics
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from benchmarks.measure.harness import machine
from rbm.utils.files import append_csv
from rbm_kernels._denormals import flushed_denormals

COLUMNS = ("date", "device", "torch", "commit", "share", "round", "kept_ms", "zeros_ms")
SHARES = (0, 0.0001, 0.001, 0.01, 0.1)


def milliseconds(x: torch.Tensor, weight: torch.Tensor, *, flushes: bool) -> float:
    """Median of three products."""
    times = []
    with flushed_denormals() if flushes else nullcontext():
        for _ in range(3):
            start = time.perf_counter()
            x @ weight
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def markdown(rows: list[dict]) -> str:
    """A table of medians over the rounds."""
    lines = ["| numbers below the normal range | as they are | as zeros |", "|---:|---:|---:|"]
    for share in dict.fromkeys(row["share"] for row in rows):
        own = [row for row in rows if row["share"] == share]
        kept, zeros = (statistics.median(float(row[f"{kind}_ms"]) for row in own) for kind in ("kept", "zeros"))
        lines.append(f"| {100 * float(share):g} % | {kept:.3g} ms | {zeros:.3g} ms |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="CSV file to append to")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    fixed = {name: machine()[name] for name in ("date", "device", "torch", "commit")}
    x, weight = torch.randn(512, 1024), torch.randn(1024, 1024)
    milliseconds(x, weight, flushes=False)
    rows = []
    for turn in range(arguments.rounds):
        for share in SHARES:
            some = torch.where(torch.rand_like(weight) < share, 1e-41, weight)
            kept, zeros = (f"{milliseconds(x, some, flushes=flushes):.4g}" for flushes in (False, True))
            rows.append({**fixed, "share": share, "round": turn, "kept_ms": kept, "zeros_ms": zeros})
    append_csv(arguments.out, rows, COLUMNS)
    print(markdown(rows), end="")


if __name__ == "__main__":
    main()
