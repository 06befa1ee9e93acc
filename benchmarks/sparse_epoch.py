"""One epoch of distillation on Coauthor Physics, with sparse and with dense features: seconds and peak memory.

    python -m benchmarks.sparse_epoch --root ../shared/data --out benchmarks/results/sparse_epoch.csv

Each measurement runs in a separate process, so that its peak resident memory is its own; the two variants take turns.
An epoch is what ``rbm distill`` repeats: a training step on all 34,493 nodes, evaluation, and a copy of the best
weights. The student routes from the first epoch on, with random memory vectors: K-means is not part of an epoch.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.measure.harness import machine
from rbm import RbMStudent, load_dataset
from rbm.config import Config
from rbm.datasets.splits import split_graph
from rbm.distillation.methods.rbm import RbMTrainer
from rbm.teachers.outputs import outputs_from_logits
from rbm.training.selection import EpochLimits, Selection
from rbm.utils.files import append_csv

COLUMNS = ("date", "commit", "torch", "threads", "load", "features", "process", "epoch", "seconds", "peak_mib", "loss")
KINDS = {"sparse": "always", "dense": "never"}


def measure(kind: str, root: str, epochs: int) -> list[dict]:
    """Run epochs in this process, the first as warm-up: seconds, loss, and peak resident memory so far."""
    data = load_dataset("physics", root, sparse_features=KINDS[kind])
    config = Config().updated({"rbm": {"hidden_channels": 256, "num_experts": 8, "top_k": 3}})
    torch.manual_seed(0)
    student = RbMStudent(data.num_features, 256, data.num_classes, num_experts=8, top_k=3, dropout=0.3)
    split = split_graph(data)
    teacher_outputs = outputs_from_logits(torch.randn(data.num_nodes, data.num_classes), split)
    trainer = RbMTrainer(student, split, teacher_outputs, config)
    student.pretraining = False
    routed, measured = config.rbm.pretrain_epochs + 1, []
    selection = Selection(EpochLimits(max_epochs=epochs + 1, patience=epochs + 1))
    for epoch in range(epochs + 1):
        start = time.perf_counter()
        student.train()
        loss = trainer.train_epoch(routed + epoch)
        student.eval()
        selection.see(epoch, trainer.evaluate(), student)
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        measured.append({"epoch": epoch, "seconds": round(seconds, 4), "peak_mib": round(peak), "loss": loss})
    return measured[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=os.environ.get("RBM_DATA_ROOT", "../shared/data"))
    parser.add_argument("--out", type=Path, help="CSV file to append to")
    parser.add_argument("--processes", type=int, default=3, help="number of processes per variant")
    parser.add_argument("--epochs", type=int, default=3, help="timed epochs per process")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", choices=KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.worker:
        print(json.dumps(measure(arguments.worker, arguments.root, arguments.epochs)))
        return

    fixed = {**{name: machine()[name] for name in ("date", "commit", "torch")}, "threads": arguments.threads}
    records = []
    for process in range(arguments.processes):
        for kind in KINDS:
            command = [sys.executable, "-m", "benchmarks.sparse_epoch", "--worker", kind, "--root", arguments.root]
            command += ["--epochs", str(arguments.epochs), "--threads", str(arguments.threads)]
            # Waiting threads must not spin: on a shared machine they would take the core from the thread that they
            # wait for, several hundred times per epoch.
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_WAIT_POLICY": "passive"}
            )
            here = {**fixed, "load": round(os.getloadavg()[0], 2), "features": kind, "process": process}
            measured = [{**here, **epoch} for epoch in json.loads(done.stdout.splitlines()[-1])]
            print(f"{kind}: {', '.join(str(epoch['seconds']) for epoch in measured)} s", file=sys.stderr)
            records.extend(measured)
            if arguments.out:
                append_csv(arguments.out, measured, COLUMNS)
    for kind in KINDS:
        own = [record for record in records if record["features"] == kind]
        median = statistics.median(record["seconds"] for record in own)
        print(f"{kind}: median {median:.2f} s an epoch, peak {max(record['peak_mib'] for record in own)} MiB")
    medians = [statistics.median(r["seconds"] for r in records if r["features"] == kind) for kind in KINDS]
    print(f"dense takes {medians[1] / medians[0]:.1f} times as long")


if __name__ == "__main__":
    main()
