"""DeepWalk's positions by gensim and by ``rbm.datasets.encodings.skip_gram``, which serves where gensim has no release.

One row per graph, seed and trainer of the positions: the processor seconds that ``deepwalk`` takes on the whole graph,
and the accuracies of the MLP student that reads the positions, on unseen nodes. The teacher is the same. Rows that OUT
already has are not made again.

    OMP_NUM_THREADS=1 python experiments/without_gensim.py ROOT results/without_gensim.csv
"""

import sys
import time
from pathlib import Path
from unittest import mock

import rbm
from rbm.datasets.encodings import deepwalk
from rbm.utils.files import append_csv, read_csv

DATASETS, SEEDS, TRAINERS = ("digits", "amazon-photo"), range(5), ("gensim", "rbm")
COLUMNS = ("dataset", "seed", "positions", "seconds", "validation", "test")


def measure(root: str, dataset: str, seed: int) -> dict[str, str]:
    config = rbm.preset_config("clean", dataset, "inductive").updated({"setting": "inductive", "seed": seed})
    quiet = {"labels_alone": False, "measure_latency": False, "plots": False, "console": None}
    data = rbm.load_dataset(dataset, root)
    begin = time.process_time()
    deepwalk(data.edge_index, data.num_nodes, seed=seed)
    seconds = time.process_time() - begin
    result = rbm.distill(data, "sage", config=config, methods=["mlp"], cache="runs/cache", **quiet)
    found = result.summary["mlp"]
    return {
        "seconds": f"{seconds:.1f}",
        "validation": f"{found['val_accuracy']:.4f}",
        "test": f"{found['test_accuracy']:.4f}",
    }


def main(root: str, out: str) -> None:
    rows = read_csv(Path(out)) if Path(out).exists() else []
    done = {(row["dataset"], row["seed"], row["positions"]) for row in rows}
    for dataset in DATASETS:
        for seed in SEEDS:
            for positions in TRAINERS:
                if (dataset, str(seed), positions) in done:
                    continue
                hidden = {} if positions == "gensim" else {"gensim": None}
                with mock.patch.dict(sys.modules, hidden):
                    found = measure(root, dataset, seed)
                row = {"dataset": dataset, "seed": str(seed), "positions": positions, **found}
                append_csv(Path(out), [row], COLUMNS)
                print(row, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
