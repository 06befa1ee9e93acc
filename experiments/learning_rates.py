r"""Trains RbM and the plain MLP with a learning rate that decays to zero, and compares them on validation nodes.

    OMP_NUM_THREADS=1 python experiments/learning_rates.py ROOT results/searches/learning_rates.csv \
        cora:inductive:0 citeseer:transductive:0 ...

Each argument is GRAPH:SETTING:SEED. The rate follows half a cosine from the preset's rate to zero over 200 epochs
(Loshchilov and Hutter, ICLR 2017), and training does not stop earlier. One half of the validation nodes selects the
epoch, the other half is used for evaluation (``evaluate_on: validation``). Existing rows are not made again.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import rbm
from rbm.config import Config
from rbm.config.presets import preset_config
from rbm.distillation.trainer import StudentTrainer
from rbm.experiments.results import made_by
from rbm.utils.files import append_csv, read_csv

EPOCHS = 200
START = {"rbm": {"init_scale": 1.0, "init_attention": 1.0, "reset_optimizer": False}}
# For each variant: its changes, whether its rate decays, and its students.
VARIANTS: dict[str, tuple[dict[str, Any], bool, tuple[str, ...]]] = {
    "today": ({}, False, ("mlp", "rbm")),
    "falling": ({}, True, ("mlp", "rbm")),
    "falling, optimiser kept": (START, True, ("rbm",)),
}


def configuration(dataset: str, setting: str, seed: int, changes: dict[str, Any], *, falls: bool) -> Config:
    """The preset of a graph with a variant's changes and, if the rate ``falls``, the number of epochs for that."""
    own = {"dataset": dataset, "setting": setting, "seed": seed, "evaluate_on": "validation"}
    config = preset_config("clean", dataset).updated(own).updated(changes)
    if not falls:
        return config
    last = EPOCHS + 10
    epochs = {"mlp": last, "rbm": last - config.rbm.pretrain_epochs}
    return config.updated({kind: {"max_epochs": most, "patience": last} for kind, most in epochs.items()})


def rate_at(epoch: int) -> float:
    """The learning rate of an epoch as a share of the preset's."""
    return max(1e-3, (1 + math.cos(math.pi * min(1.0, epoch / EPOCHS))) / 2)


@contextmanager
def falling_rates() -> Iterator[None]:
    """Within this context, each step of a student's optimiser uses the rate of its epoch."""
    step = StudentTrainer.optimizer_step

    def with_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group.setdefault("first_lr", group["lr"]) * rate_at(self.epoch)
        step(self)

    StudentTrainer.optimizer_step = with_rate
    try:
        yield
    finally:
        StudentTrainer.optimizer_step = step


def main(root: str, out: str, *cells: str) -> None:
    path = Path(out)
    known = read_csv(path, missing_ok=True)
    done = {tuple(row[name] for name in ("dataset", "setting", "seed", "variant")) for row in known}
    for cell in cells:
        dataset, setting, seed = cell.split(":")
        for variant, (changes, falls, methods) in VARIANTS.items():
            if (dataset, setting, seed, variant) in done:
                continue
            config = configuration(dataset, setting, int(seed), changes, falls=falls)
            data = rbm.load_dataset(dataset, root, protocol=config.protocol, seed=config.seed)
            options = {"labels_alone": False, "measure_latency": False, "cache": "cache"}
            with falling_rates() if falls else nullcontext():
                summary = rbm.distill(data, config=config, methods=methods, **options).summary
            rows = [
                {
                    "dataset": dataset,
                    "setting": setting,
                    "seed": seed,
                    "variant": variant,
                    "method": method,
                    "val": f"{summary[method]['val_accuracy']:.5f}",
                    "held_out": f"{summary[method]['test_accuracy']:.5f}",
                    **{name: summary[method][name] for name in ("best_epoch", "epochs")},
                    **{name: made_by(config, method)[name] for name in ("commit", "date", "torch", "threads")},
                }
                for method in methods
            ]
            append_csv(path, rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
