"""Accuracies of an RbM student around the first routed epoch, on validation nodes.

The variants and the protocol are those of ``experiments/searches/experts_shortlist.yaml``: unseen nodes, students 128
wide, half of the validation nodes. One row per student; rows that OUT already has are not run again.

    python experiments/experts_start.py ROOT results/experts_start.csv [CACHE]
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import rbm
from rbm.config import Config
from rbm.experiments.experiment import Experiment
from rbm.training.run_folder import read_metrics
from rbm.utils.files import append_csv, read_csv

VARIANTS = ("today", "start 1", "pull 1")
SEEDS = (2, 3)
COLUMNS = (
    *("dataset", "variant", "seed", "pretraining", "epochs", "best_epoch"),
    *("val_last_pretraining", "val_first_routed", "val_tenth_routed", "val_best"),
    *("train_best", "held_out_best", "loss_best"),
)


def turning_points(config: Config, root: str, cache: Path) -> dict[str, object]:
    """Train a student and read its epochs back."""
    data = rbm.load_dataset(config.dataset, root, seed=config.seed)
    with TemporaryDirectory() as folder:
        result = rbm.distill(data, config=config, methods=["rbm"], labels_alone=False, cache=cache, folder=folder)
        epochs = [record for record in read_metrics(Path(folder)) if record["phase"] == "rbm"]
    first, best = config.rbm.pretraining, result.summary["rbm"]["best_epoch"]
    return {
        "pretraining": first,
        "epochs": len(epochs),
        "best_epoch": best,
        "val_last_pretraining": f"{epochs[first - 1]['val_accuracy']:.5f}",
        "val_first_routed": f"{epochs[first]['val_accuracy']:.5f}",
        "val_tenth_routed": f"{epochs[first + 9]['val_accuracy']:.5f}",
        "val_best": f"{epochs[best]['val_accuracy']:.5f}",
        "train_best": f"{epochs[best]['train_accuracy']:.5f}",
        "held_out_best": f"{epochs[best]['test_accuracy']:.5f}",
        "loss_best": f"{epochs[best]['loss']:.5f}",
    }


def main(root: str, out: str, cache: str = "cache") -> None:
    path = Path(out)
    known = {(row["dataset"], row["variant"], row["seed"]) for row in read_csv(path, missing_ok=True)}
    experiment = Experiment.from_yaml(Path(__file__).parent / "searches" / "experts_shortlist.yaml")
    for task in experiment.tasks():
        about = {"dataset": task.dataset, "variant": task.variant, "seed": str(task.seed)}
        if task.seed in SEEDS and task.variant in VARIANTS and tuple(about.values()) not in known:
            append_csv(path, [about | turning_points(experiment.config(task), root, Path(cache))], COLUMNS)
            print(*about.values(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
