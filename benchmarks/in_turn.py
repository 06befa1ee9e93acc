"""Times of layer, feed-forward block, routing and a student on the CPU, for versions of this package in turn.

    python -m benchmarks.in_turn before=/tmp/before now=. --rounds 6 --out benchmarks/results/in_turn.csv

A version is a checkout with its libraries built. On a machine that others share, times of two versions that were
measured one after the other differ by the state of the machine. So each version runs all workloads in a process of its
own for a few seconds, and the versions take turns, round after round. A row is the first quartile of the calls of one
process.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

COLUMNS = ("date", "device", "threads", "commit", "version", "round", "work", "dtype", "rows", "milliseconds")
FEATURES, EXPERTS, TOP_K = 256, 8, 3
DTYPES = ("float32", "bfloat16")
ROUTERS = ((18333, 256, 8, 3), (2708, 256, 64, 8), (4096, 4096, 256, 8), (8192, 512, 2048, 8))  # rows, D, E, k


def workloads() -> Iterator[tuple[str, str, int, Callable[[], object]]]:
    """Name, dtype, number of rows and call of each workload."""
    import torch

    import rbm
    import rbm_kernels
    from rbm.nn.students import RbMStudent

    # As wide as Cora, and as many words per row.
    student = RbMStudent(1433, 128, 7, num_experts=EXPERTS, top_k=TOP_K).eval()
    with torch.inference_mode():
        for count in (1, 64, 2708):
            words = (torch.rand(count, 1433) < 0.0127).float()
            yield "student, bags of words", "float32", count, partial(student, words)
            yield "student, no zeros", "float32", count, partial(student, torch.randn(count, 1433))
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K}
    for dtype in DTYPES:

        def rows(count: int, dtype: str = dtype) -> torch.Tensor:
            return torch.randn(count, FEATURES, dtype=getattr(torch, dtype))

        block = rbm.RbMFeedForward(FEATURES, FEATURES, activation="swiglu", **sizes).to(getattr(torch, dtype)).eval()
        layer = rbm.FusedRbMLayer(FEATURES, FEATURES, **sizes).to(getattr(torch, dtype))
        x = rows(4096).requires_grad_()

        def step(layer: torch.nn.Module = layer, x: torch.Tensor = x) -> None:
            layer.zero_grad()
            x.grad = None
            layer(x).sum().backward()

        yield "training step", dtype, 4096, step
        layer.eval()
        with torch.inference_mode():
            for name, module, counts in (
                ("layer", layer, (64, 4096, 16384)),
                ("feed-forward", block, (64, 2708, 16384)),
            ):
                for count in counts:
                    x = rows(count)
                    yield name, dtype, count, lambda module=module, x=x: module(x)
            for count, features, experts, k in ROUTERS:
                h, memory = torch.randn(count, features).to(getattr(torch, dtype)), torch.randn(experts, features)
                route = partial(rbm_kernels.cosine_topk, h, memory, k)
                yield f"routing from {features:,} features to {experts:,} experts", dtype, count, route


def measure(seconds: float, start_of_name: str) -> list[dict]:
    """The workloads of the version whose code this process imports, of which the names start like this."""
    import torch

    torch.manual_seed(0)
    found = []
    for work, dtype, rows, call in workloads():
        if not work.startswith(start_of_name):
            continue
        for _ in range(3):
            call()
        times: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times) < 5:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        quartile = statistics.quantiles(times, n=4)[0]
        found.append({"work": work, "dtype": dtype, "rows": rows, "milliseconds": f"{quartile * 1e3:.4g}"})
    return found


def markdown(records: list[dict]) -> str:
    """Medians over the rounds of each version, in milliseconds, and the ratio of the last version to the first."""
    versions = list(dict.fromkeys(record["version"] for record in records))
    lines = [f"|  | rows | {' | '.join(versions)} | {versions[-1]} of {versions[0]} |"]
    lines.append("|---|---|" + "---:|" * (len(versions) + 1))
    for key in dict.fromkeys((record["work"], record["dtype"], record["rows"]) for record in records):
        own = [record for record in records if (record["work"], record["dtype"], record["rows"]) == key]
        times = [
            statistics.median(float(record["milliseconds"]) for record in own if record["version"] == version)
            for version in versions
        ]
        cells = [f"{milliseconds:.3g} ms" for milliseconds in times]
        name = f"{key[0]}, {key[1]} | {int(key[2]):,}"
        lines.append(f"| {name} | {' | '.join(cells)} | {times[-1] / times[0]:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="NAME=FOLDER", help="a checkout with its libraries")
    parser.add_argument("--out", type=Path, help="CSV file to append to")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=0.6, help="of each workload in each process")
    parser.add_argument("--work", default="", metavar="START", help="only workloads whose names start like this")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(measure(arguments.seconds, arguments.work)))
        return
    if len(arguments.versions) < 2 or arguments.out is None:
        parser.error("expected at least two NAME=FOLDER, and --out FILE for the rows")
    # Not in workers, whose package may be an older version.
    import torch

    from benchmarks.measure.harness import processor
    from benchmarks.measure.versions import commit_of, run_worker
    from rbm.utils.environment import today
    from rbm.utils.files import append_csv, read_csv

    for turn in range(arguments.rounds):
        for name, folder in (version.split("=", 1) for version in arguments.versions):
            tree = Path(folder).resolve()
            found = run_worker(
                __file__, ["--worker", "--seconds", str(arguments.seconds), "--work", arguments.work], tree
            )
            fixed = {"date": today(), "device": processor(), "threads": torch.get_num_threads()}
            fixed |= {"commit": commit_of(tree), "version": name, "round": turn}
            append_csv(arguments.out, [{**fixed, **row} for row in found], COLUMNS)
            print(name, turn, flush=True)
    print(markdown(read_csv(arguments.out)), end="")


if __name__ == "__main__":
    main()
