"""SimMLP with as many labels as in its publication: a tenth of all nodes, drawn at random, and a tenth for validation.

The publication (Wang et al., WSDM 2025; the split is ``get_split`` of Zehong-Wang/SimMLP) uses Planetoid's whole
graphs with features as stored. Each seed draws its own split. In its inductive and cold-start settings, a fifth of the
test nodes is unseen, as here. It reports the best *test* accuracy among every hundredth epoch; the rows also have
``test_max``, the best of all epochs, which is close to it.

    python experiments/simmlp_labels.py ROOT results/simmlp_labels.csv [GRAPH ...]

trains a GraphSAGE teacher, GLNN and SimMLP with the settings of the preset ``clean``, on ``cora`` and ``citeseer`` by
default. Rows that the table already contains are not made again.
"""

import sys
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

import rbm
from rbm.config.presets import preset_config
from rbm.distillation.registry import METHODS
from rbm.experiments.runner import Experiment, run_experiment

STUDENTS, SEEDS, SETTINGS = ("glnn", "simmlp"), tuple(range(3)), ("transductive", "inductive")


def write_graph(name: str, root: str, file: Path) -> None:
    """Write the graph with one column of masks per seed: a tenth of the nodes trains, a tenth validates."""
    data = rbm.load_dataset(name, root, normalize_features=False, sparse_features="never")
    masks = torch.zeros(3, data.num_nodes, len(SEEDS), dtype=torch.bool)
    tenth = data.num_nodes // 10
    for seed in SEEDS:
        order = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(seed))
        for mask, nodes in zip(masks, order.split([tenth, tenth, data.num_nodes - 2 * tenth]), strict=True):
            mask[nodes, seed] = True
    file.parent.mkdir(exist_ok=True)
    names = ("train_mask", "val_mask", "test_mask")
    torch.save({"x": data.x, "edge_index": data.edge_index, "y": data.y, **dict(zip(names, masks, strict=True))}, file)


def main(root: str, out: str, *graphs: str) -> None:
    experiments = []
    for name in graphs or ("cora", "citeseer"):
        file = Path(f"runs/{name}-tenth.pt")
        write_graph(name, root, file)
        for setting in SETTINGS:
            config = asdict(preset_config("clean", name, setting, protocol="cpf"))
            changes = {
                section: config[section] for section in {"teacher"}.union(*(METHODS[s].sections for s in STUDENTS))
            }
            experiments.append(Experiment((str(file),), (setting,), STUDENTS, SEEDS, changes=changes))
    run_experiment(experiments, out, console=Console(stderr=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
