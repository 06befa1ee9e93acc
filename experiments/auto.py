"""What `rbm distill --auto` chooses within a budget, beside the preset of the same graph, or defaults on made graphs.

Each argument is GRAPH:BUDGET:SEED. A graph is a name, or `made-H`: a contextual stochastic block model of 3,000 nodes
in five classes, of whose edges the share H stays within a class. Rows go to `OUT/runs.csv`, and the trials of each
search to `OUT/GRAPH-BUDGET-SEED.csv`; rows that are there are not made again, and a search that was killed goes on.

    OMP_NUM_THREADS=1 python experiments/auto.py ROOT results/auto digits:2m:0 cora:5m:0 made-0.2:2m:0
"""

import csv
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console
from torch_geometric.data import Data

import rbm
from rbm.config.presets import preset_config
from rbm.utils.files import write_csv

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
from block_graphs import block_graph

RUNS = Path("runs") / "auto"


def graph_of(name: str, root: str, seed: int) -> Data:
    if not name.startswith("made-"):
        return rbm.load_dataset(name, root, seed=seed)
    homophily = float(name.removeprefix("made-"))
    return block_graph(homophily, nodes=3000, classes=5, degree=20, features=32, signal=0.4, seed=seed)


def config_of(name: str, seed: int) -> rbm.Config:
    own = name.startswith("made-")
    return preset_config("clean", f"{name}.pt" if own else name).updated({"seed": seed})


def run(name: str, budget: str, seed: int, root: str, *, auto: bool) -> dict[str, object]:
    """A row: the kept student of a search, or of the settings that it starts from."""
    kind = f"auto {budget}" if auto else "preset"
    folder = RUNS / f"{name}-{seed}-{kind.replace(' ', '-')}"
    searched = {"auto": True, "budget": budget} if auto else {}
    resume = (folder / ("auto.yaml" if auto else "config.yaml")).is_file()
    began = time.perf_counter()
    found = rbm.distill(
        graph_of(name, root, seed),
        config=config_of(name, seed),
        folder=folder,
        resume=resume,
        cache=RUNS / f"cache-{name}-{seed}-{kind.replace(' ', '-')}",
        console=Console(stderr=True),
        **searched,
    )
    seconds = "" if resume else f"{time.perf_counter() - began:.0f}"
    verdict = found.summary["verdict"]
    search = verdict.get("search", {})
    return {
        "graph": name,
        "seed": seed,
        "run": kind,
        "trials": search.get("trials", ""),
        "halves": search.get("halves", ""),
        "held_out": _percent(search.get("accuracy")),
        "held_out_before": _percent(search.get("given_accuracy")),
        "teacher": found.config.teacher.name,
        "searched_for": (search.get("choice") or {}).get("method", ""),
        "kept": found.method,
        "best_val": _percent(max(verdict["accuracy"][method] for method in ("mlp", "rbm"))),
        "kept_val": _percent(verdict["accuracy"][found.method]),
        "kept_test": _percent(found.summary[found.method]["test_accuracy"]),
        "seconds": seconds,
    }


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"


def main(root: str, out: str, *what: str) -> None:
    table = Path(out) / "runs.csv"
    table.parent.mkdir(parents=True, exist_ok=True)
    rows = list(csv.DictReader(table.open())) if table.is_file() else []
    for each in what:
        name, budget, seed = each.split(":")
        for auto in (False, True):
            kind = f"auto {budget}" if auto else "preset"
            if any((row["graph"], row["seed"], row["run"]) == (name, seed, kind) for row in rows):
                continue
            rows.append(run(name, budget, int(seed), root, auto=auto))
            write_csv(table, rows)
            if auto:
                shutil.copy(
                    RUNS / f"{name}-{seed}-auto-{budget}" / "auto.csv", table.parent / f"{name}-{budget}-{seed}.csv"
                )


if __name__ == "__main__":
    main(*sys.argv[1:])
