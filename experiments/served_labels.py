"""Accuracy on unseen nodes with the labels around a node counted in two ways, for the MLP and RbM on Cora.

An evaluation counts the labels near an unseen node (``encoding.label_propagation``) on the whole graph, with its edges
to other unseen nodes. ``rbm predict --neighbors`` knows only its edges to nodes of the training graph, and gives it the
mean of their encodings. One row per seed and method: accuracies on the unseen nodes, and for how many of them both ways
lead to the same class. Seeds that OUT already has are not run again.

    python experiments/served_labels.py ROOT results/served_labels.csv
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

import rbm
from rbm.datasets.encodings import Encodings, transfer
from rbm.distillation.result import Distillation
from rbm.distillation.trainer import student_inputs
from rbm.utils.files import append_csv, read_csv

METHODS, SEEDS = ("mlp", "rbm"), range(10)
COLUMNS = ("dataset", "seed", "method", "whole_graph", "neighbors", "same_class")


def measure(root: str, seed: int) -> list[dict]:
    config = rbm.preset_config("clean", "cora", "inductive").updated({"setting": "inductive", "seed": seed})
    quiet = {"labels_alone": False, "measure_latency": False, "plots": False, "console": None}
    data = rbm.load_dataset("cora", root)
    result = rbm.distill(data, "sage", config=config, methods=METHODS, cache="runs/cache", **quiet)
    return [{"dataset": "cora", "seed": seed, "method": method, **compare(result, method)} for method in METHODS]


@torch.inference_mode()
def compare(result: Distillation, method: str) -> dict[str, str]:
    """The accuracies on the unseen nodes, and the share of them with the same class."""
    split, encodings = result.split, result.encodings[method]
    graph, unseen = split.graph, split.unseen_nodes
    means = transfer(encodings.observed, split.observed_nodes, graph.edge_index, graph.num_nodes)

    def classes(full: Tensor) -> Tensor:
        rows = student_inputs(split, Encodings(encodings.observed, full))[1]
        return result.students[method](rows).argmax(dim=1)[unseen]

    whole, served = classes(encodings.full), classes(means)
    found = {
        "whole_graph": whole == graph.y[unseen],
        "neighbors": served == graph.y[unseen],
        "same_class": whole == served,
    }
    return {name: f"{is_so.double().mean():.4f}" for name, is_so in found.items()}


def main(root: str, out: str) -> None:
    done = {row["seed"] for row in read_csv(Path(out))} if Path(out).exists() else set()
    for seed in SEEDS:
        if str(seed) not in done:
            rows = measure(root, seed)
            append_csv(Path(out), rows, COLUMNS)
            print(*rows, sep="\n", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
