"""A graph of ogbn-products' size, from files to one epoch of an RbM student: seconds per stage, and peak memory.

    python -m benchmarks.large_graph --out benchmarks/results/large_graph.csv
    python -m benchmarks.large_graph --shape ogbn-papers100M --fractions 64 32 16 --threads 1 --folder DISK \
      --out benchmarks/results/papers100m.csv

The graph is synthetic: 2,449,029 nodes with 100 features in float16, 62 million directed edges, half of them between
nodes of the same class, 47 classes, and logits of a teacher that is right in three of four cases. Fractions of it, 1/16
to 1, show how the cost grows; fractions of ogbn-papers100M's shape (``SHAPES``) show what that graph would take. Each
runs in a separate process, so that its peak resident memory (including pages of mapped files) is its own. The files are
removed from the page cache before, so that a stage reads them from disk, and this is counted.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import torch

import rbm
from benchmarks.measure.harness import machine
from rbm.config import Config
from rbm.datasets import validate_data
from rbm.datasets.splits import split_graph
from rbm.distillation.methods.rbm import RbMTrainer
from rbm.teachers.outputs import outputs_from_logits
from rbm.utils.files import append_csv, read_csv

matplotlib.use("Agg")
from matplotlib import pyplot as plt


class Shape(NamedTuple):
    """Nodes, directed edges, features and classes of a graph. The last three fields are shares of the nodes."""

    nodes: int
    edges: int
    features: int
    classes: int
    train: float
    val: float
    test: float


# Shares as in the official splits; most of ogbn-papers100M's nodes have no label.
SHAPES = {
    "ogbn-products": Shape(2_449_029, 62_000_000, 100, 47, 0.08, 0.016, 0.904),
    "ogbn-papers100M": Shape(111_059_956, 1_615_685_872, 128, 172, 0.0109, 0.0011, 0.0019),
}
FRACTIONS = (16, 8, 4, 2, 1)
COLUMNS = (
    *("date", "commit", "torch", "threads", "load", "fraction", "nodes", "edges"),
    *("stage", "seconds", "processor_seconds", "peak_mib", "read_mib"),
)
CHUNK = 2**20
CONFIG = {
    "distill": {"batch_size": 4096, "step_per_batch": True},
    "rbm": {"hidden_channels": 128, "num_experts": 8, "top_k": 3, "pretrain_epochs": 0, "kmeans_max_rows": 50_000},
}


def write_graph(folder: Path, fraction: int, shape: Shape = SHAPES["ogbn-products"], seed: int = 0) -> None:
    """Write a graph chunk by chunk, in the files that :func:`rbm.load_graph` reads."""
    nodes, pairs = shape.nodes // fraction, shape.edges // fraction // 2
    generator = np.random.default_rng(seed)
    labels = np.arange(nodes) % shape.classes
    centers = generator.normal(size=(shape.classes, shape.features)).astype(np.float32)
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float16, (nodes, shape.features))
    logits = np.lib.format.open_memmap(folder / "teacher_logits.npy", "w+", np.float32, (nodes, shape.classes))
    for start in range(0, nodes, CHUNK):
        own = labels[start : start + CHUNK]
        x[start : start + CHUNK] = centers[own] + generator.normal(0, 2, (own.size, shape.features)).astype(np.float32)
        predicted = np.where(generator.random(own.size) < 0.75, own, generator.integers(0, shape.classes, own.size))
        logits[start : start + CHUNK] = generator.normal(size=(own.size, shape.classes))
        logits[start + np.arange(own.size), predicted] += 5
    edges = np.lib.format.open_memmap(folder / "edge_index.npy", "w+", np.int64, (2, 2 * pairs))
    for start in range(0, pairs, CHUNK):
        size = min(CHUNK, pairs - start)
        one, other = generator.integers(0, nodes, (2, size))
        # Both nodes of half of the pairs have the same class; a node's class is the remainder of its number.
        same_class = np.minimum(other - other % shape.classes + one % shape.classes, nodes - 1)
        other = np.where(generator.random(size) < 0.5, same_class, other)
        edges[:, start : start + size] = one, other
        edges[:, pairs + start : pairs + start + size] = other, one
    np.save(folder / "y.npy", labels)
    place, begin = generator.permutation(nodes) / nodes, 0.0
    for name, share in (("train", shape.train), ("val", shape.val), ("test", shape.test)):
        np.save(folder / f"{name}.npy", (begin <= place) & (place < begin + share))
        begin += share


def uncache(folder: Path) -> None:
    """Remove the files of a folder from the page cache, if the system can do that."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(folder: Path) -> list[dict]:
    """Run all stages in this process: seconds, bytes read from disks, and peak resident memory so far."""
    stages: list[dict] = []
    uncache(folder)

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        before = resource.getrusage(resource.RUSAGE_SELF)
        start, worked = time.perf_counter(), time.process_time()
        yield
        seconds, worked = time.perf_counter() - start, time.process_time() - worked
        after = resource.getrusage(resource.RUSAGE_SELF)
        read = (after.ru_inblock - before.ru_inblock) * 512 / 2**20
        record = {"stage": name, "seconds": round(seconds, 3), "processor_seconds": round(worked, 3)}
        stages.append({**record, "peak_mib": round(after.ru_maxrss / 1024), "read_mib": round(read)})
        print(json.dumps(stages[-1]), file=sys.stderr, flush=True)  # kept if a later stage is killed

    torch.manual_seed(0)
    config = Config().updated(CONFIG)
    with stage("load and check"):
        data = rbm.load_graph(folder)
        validate_data(data)
        split = split_graph(data)
        teacher_outputs = outputs_from_logits(data.teacher_logits, split)
    with stage("neighbours"):
        student = rbm.RbMStudent.from_config(config.rbm, in_channels=data.num_features, out_channels=data.num_classes)
        trainer = RbMTrainer(student, split, teacher_outputs, config)
    with stage("soft targets"):
        trainer.update_targets()
    with stage("K-means"):
        trainer.begin_epoch(0)
    with stage("epoch"):
        student.train()
        trainer.train_epoch(1)
    with stage("evaluation"):
        student.eval()
        accuracies = trainer.evaluate()
    print(f"validation accuracy {accuracies.val:.4f}", file=sys.stderr)
    for record in stages:
        record |= {"nodes": data.num_nodes, "edges": data.num_edges}
    return stages


def plot(records: list[dict], path: Path) -> None:
    """Plot CPU seconds of all stages, which depend little on other work of the machine, and peak memory, by nodes."""
    nodes = sorted({int(record["nodes"]) for record in records})
    of = {count: [record for record in records if int(record["nodes"]) == count] for count in nodes}
    millions = [count / 1e6 for count in nodes]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    bottom = np.zeros(len(nodes))
    for name in dict.fromkeys(record["stage"] for record in records):
        seconds = [sum(float(r["processor_seconds"]) for r in of[count] if r["stage"] == name) for count in nodes]
        left.fill_between(millions, bottom, bottom + seconds, label=name, alpha=0.8)
        bottom += seconds
    left.plot([0, millions[-1]], [0, bottom[-1]], "k--", linewidth=1)
    left.legend(fontsize=8)
    left.set(xlabel="nodes, millions", ylabel="seconds of two processors")
    peaks = [max(float(r["peak_mib"]) for r in of[count]) / 1024 for count in nodes]
    right.plot(millions, peaks, "o-")
    right.set(xlabel="nodes, millions", ylabel="peak of resident memory, GiB", ylim=(0, None))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def markdown(records: list[dict]) -> str:
    """A table of the rows of a CSV file, with one line per size: seconds of each stage, in total and in CPU time, and
    peak memory. Cells of stages that a size lacks are empty, and then the total too.
    """
    stages, sizes = _stages_and_sizes(records)
    lines = [f"| nodes | edges | {' | '.join(stages)} | all | processors | peak |", f"|{'---:|' * (len(stages) + 5)}"]
    for count, own in sizes.items():
        times = [f"{float(own[stage]['seconds']):.1f} s" if stage in own else "" for stage in stages]
        whole = ["", ""]
        if len(own) == len(stages):
            kinds = ("seconds", "processor_seconds")
            whole = [f"{sum(float(record[kind]) for record in own.values()):.1f} s" for kind in kinds]
        peak = max(float(record["peak_mib"]) for record in own.values()) / 1024
        edges = int(next(iter(own.values()))["edges"])
        lines.append(f"| {count:,} | {edges:,} | {' | '.join([*times, *whole])} | {peak:.1f} GiB |")
    return "\n".join(lines) + "\n"


def costs(records: list[dict], shape: Shape) -> str:
    """A table of the cost per node for each size in a CSV file. As a model, also the cost of the whole shape if each
    additional node cost as much as those between the smallest and the largest size. A stage that only one size has is
    assumed to grow with the number of nodes.
    """
    stages, sizes = _stages_and_sizes(records)
    columns: dict[str, dict[int, float]] = {stage: {} for stage in (*stages, "read", "peak")}
    for count, own in sizes.items():
        for stage, record in own.items():
            columns[stage][count] = float(record["processor_seconds"])
        columns["read"][count] = sum(float(record["read_mib"]) for record in own.values()) * 2**20
        columns["peak"][count] = max(float(record["peak_mib"]) for record in own.values()) * 2**20
    lines = [f"| nodes | {' | '.join(columns)} |", f"|{'---:|' * (len(columns) + 1)}"]
    for count in sizes:
        cells = [f"{1e6 * columns[s][count] / count:.1f} µs" if count in columns[s] else "" for s in stages]
        cells += [f"{columns[name][count] / count:,.0f} B" for name in ("read", "peak")]
        lines.append(f"| {count:,} | {' | '.join(cells)} |")
    whole = {}
    for name, known in columns.items():
        least, most = min(known), max(known)
        slope = (known[most] - known[least]) / (most - least) if least < most else known[most] / most
        whole[name] = known[most] + slope * (shape.nodes - most)
    cells = [f"{whole[stage] / 60:,.1f} min" for stage in stages]
    cells += [f"{whole[name] / 2**30:,.0f} GiB" for name in ("read", "peak")]
    lines.append(f"| {shape.nodes:,}, model | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _stages_and_sizes(records: list[dict]) -> tuple[list[str], dict[int, dict[str, dict]]]:
    """The stages in order; and for each number of nodes, ascending, the row of each stage it has."""
    sizes: dict[int, dict[str, dict]] = {count: {} for count in sorted({int(record["nodes"]) for record in records})}
    for record in records:
        sizes[int(record["nodes"])][record["stage"]] = record
    return list(dict.fromkeys(record["stage"] for record in records)), sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="CSV file to append to; a picture is drawn next to it")
    parser.add_argument("--shape", choices=SHAPES, default="ogbn-products")
    parser.add_argument("--fractions", type=int, nargs="+", default=FRACTIONS, help="16 means 1/16 of the graph")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", help="where to write graphs, 2 GB for all of ogbn-products; removed afterwards")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.worker:
        print(json.dumps(measure(arguments.worker)))
        return

    fixed = {**{name: machine()[name] for name in ("date", "commit", "torch")}, "threads": arguments.threads}
    for fraction in arguments.fractions:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
            write_graph(Path(name), fraction, SHAPES[arguments.shape])
            command = [sys.executable, "-m", "benchmarks.large_graph", "--worker", name]
            command += ["--threads", str(arguments.threads)]
            # Waiting threads must not spin: on a shared machine they would take the core from the thread that they
            # wait for.
            environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        here = {**fixed, "load": round(os.getloadavg()[0], 2), "fraction": f"1/{fraction}"}
        records = [{**here, **stage} for stage in json.loads(done.stdout.splitlines()[-1])]
        for record in records:
            print(f"{record['nodes']:>9,} nodes  {record['stage']:<15} {record['seconds']:>8.1f} s", end="")
            print(f"  {record['peak_mib']:>6} MiB")
        if arguments.out:
            append_csv(arguments.out, records, COLUMNS)
    if arguments.out:
        records = read_csv(arguments.out)
        plot(records, arguments.out.with_suffix(".png"))
        print(markdown(records), end="")
        if all(record["read_mib"] for record in records):
            print(costs(records, SHAPES[arguments.shape]), end="")


if __name__ == "__main__":
    main()
