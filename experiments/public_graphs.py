"""Runs the main function with its defaults on graphs of other people, as a new user would on an own file.

Each file is a graph in a form that ``rbm distill --dataset`` reads. Rows are in percent; `kept` is the student that the
run keeps. An interrupted run continues from the CSV file.

    OMP_NUM_THREADS=1 python experiments/public_graphs.py results/public_graphs.csv blogcatalog.npz actor.npz ...
"""

import argparse
import itertools
import time
from pathlib import Path

from default_run import ACCURACIES, EPOCHS, MADE, in_short, outcome

import rbm
from rbm.config import Config
from rbm.utils.files import append_csv, read_csv

KEY = ("graph", "setting", "seed")
COLUMNS = (
    *(*KEY, "nodes", "edges", "features", "classes", "homophily", "by_chance"),
    *(*ACCURACIES, "kept", *EPOCHS, "seconds", *MADE),
)


def row(file: Path, setting: str, seed: int, cache: Path | None) -> dict[str, object]:
    """Accuracies of teacher, MLP on labels and both students on one graph, and which student was kept."""
    started = time.perf_counter()
    data = rbm.load_graph(file, seed=seed, undirected=True)
    config = Config(setting=setting, seed=seed)
    result = rbm.distill(data, config=config, cache=cache, measure_latency=False)
    homophily = result.summary["verdict"]["homophily"]
    return {
        "graph": file.stem,
        "setting": setting,
        "seed": seed,
        "nodes": data.num_nodes,
        "edges": data.num_edges,
        "features": data.num_features,
        "classes": data.num_classes,
        "homophily": f"{homophily['share']:.4f}",
        "by_chance": f"{homophily['chance']:.4f}",
        **outcome(result, config, started),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, default=2, help="number of seeds, starting at 0")
    parser.add_argument("--cache", type=Path, help="folder for teachers and encodings")
    options = parser.parse_args()
    done = {tuple(known[name] for name in KEY) for known in read_csv(options.out, missing_ok=True)}
    for seed, file, setting in itertools.product(range(options.seeds), options.files, ("transductive", "inductive")):
        if (file.stem, setting, str(seed)) in done:
            continue
        made = row(file, setting, seed, options.cache)
        append_csv(options.out, [made], COLUMNS)
        print(file.stem, setting, seed, in_short(made), flush=True)


if __name__ == "__main__":
    main()
