"""Runs the main function with its defaults on made graphs whose classes follow the edges to different degrees.

Graphs are contextual stochastic block models of 3,000 nodes in five classes. The grid varies the share of edges within
a class, the mean degree, and dense or sparse features. Each row is one ``rbm.distill`` with the plain defaults, in
percent. An interrupted run continues from the file.

    python experiments/made_graphs.py results/made_graphs.csv --variant "labels teach"
    python experiments/made_graphs.py results/made_graphs.csv --variant "labels teach" --show
"""

import argparse
import itertools
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
from block_graphs import block_graph
from default_run import ACCURACIES, EPOCHS, MADE, MODELS, in_short, outcome
from torch_geometric.data import Data

import rbm
from rbm.config import Config, parse_assignments
from rbm.utils.files import append_csv, read_csv

# Mean degree -> shares of edges within a class.
HOMOPHILY = {5: (0.1, 0.25, 0.5, 0.9), 20: (0.1, 0.3, 0.5, 0.9), 60: (0.1, 0.25, 0.5, 0.9)}
# From features alone, an MLP that learns from 100 labels classifies at least three in four nodes correctly.
KINDS = {
    "dense": {"features": 64, "signal": 0.6},
    "sparse": {"features": 1000, "signal": 0.35, "words": 20},
}
COLUMNS = (
    *("features", "homophily", "degree", "variant", "seed", "share"),
    *(*ACCURACIES, "kept", *EPOCHS, "graph", "seconds", *MADE),
)


class Cell(NamedTuple):
    """A point of the grid."""

    features: str
    homophily: float
    degree: int

    def graph(self, seed: int, nodes: int = 3000) -> Data:
        """The graph: five classes, 20 training and 100 validation nodes of each; all other nodes are test nodes."""
        return block_graph(
            self.homophily,
            nodes=nodes,
            classes=5,
            degree=self.degree,
            val_per_class=100,
            seed=seed,
            **KINDS[self.features],
        )


def grid() -> list[Cell]:
    """All points of the grid."""
    return [Cell(kind, share, degree) for kind in KINDS for degree, shares in HOMOPHILY.items() for share in shares]


def run(cell: Cell, seed: int, config: Config, cache: Path | None = None) -> dict[str, str]:
    """A row: accuracies of teacher, MLP on labels and both students, and which student was kept."""
    started = time.perf_counter()
    result = rbm.distill(cell.graph(seed), config=config, cache=cache, measure_latency=False)
    return {
        "features": cell.features,
        "homophily": str(cell.homophily),
        "degree": str(cell.degree),
        "seed": str(seed),
        "share": f"{result.summary['verdict']['homophily']['share']:.4f}",
        "graph": result.verdict[0].split(";")[0].split(",")[0].removeprefix("Graph: "),
        **outcome(result, config, started),
    }


def show(rows: list[dict[str, str]], variant: str) -> None:
    """Print a variant as a Markdown table: test accuracies, means over seeds, and the criteria of the bars."""
    groups = defaultdict(list)
    for row in rows:
        if row["variant"] == variant:
            groups[row["features"], float(row["homophily"]), int(row["degree"])].append(row)
    print("| features | homophily | degree | seeds | teacher | labels | MLP | RbM | kept | best - kept | MLP - RbM |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for cell, runs in sorted(groups.items()):
        means = [statistics.fmean(float(row[f"{model}_test"]) for row in runs) for model in MODELS]
        kept = statistics.fmean(float(row[f"{row['kept']}_test"]) for row in runs)
        shown = [*map(str, (*cell, len(runs))), *(f"{mean:.1f}" for mean in (*means, kept))]
        print(f"| {' | '.join(shown)} | {max(means[2:]) - kept:+.2f} | {means[2] - means[3]:+.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, starting at 0")
    parser.add_argument("--variant", default="", help="name of what --set changes")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--cache", type=Path, help="folder for teachers and encodings, shared by variants")
    parser.add_argument("--only", default="", help="only cells whose name contains this, such as dense-0.1")
    parser.add_argument("--show", action="store_true", help="print a table of the existing rows, run nothing")
    options = parser.parse_args()
    rows = read_csv(options.out, missing_ok=True)
    if options.show:
        show(rows, options.variant)
        return
    base = Config().updated(parse_assignments(options.settings))
    known = {tuple(row[name] for name in COLUMNS[:5]) for row in rows}
    for seed, cell in itertools.product(range(options.seeds), grid()):
        key = (cell.features, str(cell.homophily), str(cell.degree), options.variant, str(seed))
        if key in known or options.only not in "-".join(key[:3]):
            continue
        torch.manual_seed(seed)
        row = run(cell, seed, base.updated({"seed": seed}), options.cache)
        append_csv(options.out, [{**row, "variant": options.variant}], COLUMNS)
        print(" ".join(key), in_short(row), flush=True)


if __name__ == "__main__":
    main()
