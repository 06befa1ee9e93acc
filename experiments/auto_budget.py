"""How well `rbm distill --auto` keeps its budget: the processor seconds of whole commands.

Each argument is GRAPH:BUDGET or GRAPH:BUDGET:features-only. A graph is `digits`, or `slow`: a contextual stochastic
block model with 15,000 nodes and 450,000 edges. Each command is run by a process of its own and appends a row to OUT.

    OMP_NUM_THREADS=1 python experiments/auto_budget.py results/auto_budget.csv digits:{20s,60s} slow:{60s,150s}

Budgets are in processor seconds too. With one thread these are equal to elapsed time on an idle machine, and on a busy
one the same work fits into a budget.
"""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from rbm.config import Config
from rbm.experiments.results import made_by
from rbm.utils.files import read_csv, write_csv


def run(graph: str, budget: str, option: str, folder: str) -> None:
    """Run the command in this process, with a clock of processor seconds."""
    from block_graphs import block_graph

    from rbm.cli import app
    from rbm.distillation.auto import search
    from rbm.training import time_limit

    search._clock = time_limit._clock = time.process_time
    if graph == "slow":
        graph = str(Path(folder) / "slow.pt")
        torch.save(block_graph(0.5, nodes=15_000, classes=5, degree=30, features=64, signal=0.3, seed=0), graph)
    options = [f"--{option}"] if option else []
    places = ["--out", f"{folder}/run", "--cache", f"{folder}/cache"]  # not what earlier commands trained
    app(["distill", "--dataset", graph, "--auto", "--budget", budget, *places, *options])


def measure(spec: str) -> dict[str, object]:
    """The row of a command."""
    with TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, __file__, "--run", spec, folder], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = json.loads((Path(folder) / "run" / "summary.json").read_text(encoding="utf-8"))["verdict"]["search"]
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    made = made_by(Config(), "rbm")
    return {
        "command": spec,
        "budget": f"{found['budget']:g}",
        "seconds": f"{seconds:.1f}",
        "trials": found["trials"],
        "complete": found["complete"],
        "needed": "" if found["needed"] is None else f"{found['needed']:.1f}",
        "load": f"{os.getloadavg()[1]:.1f}",
        **{key: made[key] for key in ("commit", "date", "threads")},
    }


def main(out: str, *specs: str) -> None:
    rows = read_csv(Path(out), missing_ok=True)
    for spec in specs:
        rows.append({key: str(value) for key, value in measure(spec).items()})
        write_csv(Path(out), rows)


if __name__ == "__main__":
    if sys.argv[1] == "--run":
        run(*f"{sys.argv[2]}:".split(":")[:3], sys.argv[3])
    else:
        main(*sys.argv[1:])
