"""Trains all students on a CiteSeer that is close to the one in the publications of GLNN, NOSMOG and CoHOp.

They use another collection of papers, whose files are not widely available. Planetoid's CiteSeer has the same topic and
a similar size. Here it is treated as by the protocol ``cpf``: the largest component, features as stored, 20 and 30
nodes of each class drawn by the seed. So only the graph still differs from the figures in the paper's tables.

    python experiments/citeseer_component.py ROOT results/citeseer_component.csv

writes the rows. With a file ending in .pt instead of the table, it only writes the graph, for ``rbm distill
--dataset``; with a third argument, ``normalized``, features are divided by the sums of their rows, as in the protocol
``rbm``.
"""

import sys
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from torch_geometric.transforms import LargestConnectedComponents

import rbm
from rbm.config.presets import preset_config
from rbm.distillation.registry import METHODS
from rbm.experiments.runner import Experiment, run_experiment

STUDENTS = ("glnn", "krd", "nosmog", "cohop", "mlp", "rbm")


def write_graph(root: str, file: Path, normalized: bool) -> None:
    """Write the largest component, without masks, because each seed draws its own."""
    data = rbm.load_dataset("citeseer", root, normalize_features=normalized, sparse_features="never")
    data = LargestConnectedComponents()(data)
    file.parent.mkdir(exist_ok=True)
    torch.save({"x": data.x, "edge_index": data.edge_index, "y": data.y}, file)


def main(root: str, out: str, features: str = "stored") -> None:
    if out.endswith(".pt"):
        write_graph(root, Path(out), features == "normalized")
        return
    file = Path("runs/citeseer-component.pt")
    write_graph(root, file, normalized=False)
    experiments = []
    for setting in ("transductive", "inductive"):
        config = asdict(preset_config("clean", "citeseer", setting, protocol="cpf"))
        sections = {"teacher"}.union(*(METHODS[name].sections for name in STUDENTS))
        changes = {section: config[section] for section in sections}
        experiments.append(
            Experiment((str(file),), (setting,), STUDENTS, tuple(range(5)), protocol="cpf", changes=changes)
        )
    run_experiment(experiments, out, console=Console(stderr=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
