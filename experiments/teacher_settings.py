"""What the teachers GAT, APPNP and RevGAT need on graphs with normalised rows, judged by the GLNN that learns from
them: rows of a teacher itself are those of the first settings.

    OMP_NUM_THREADS=1 python experiments/teacher_settings.py ROOT results/searches/teacher_settings.csv TEACHER ...

TEACHER is ``gat``, ``appnp`` or ``revgat``. The publications' settings of GAT and APPNP stop early here, or keep the
weights close to zero: their features are larger, and APPNP's weight decay is of its first layer alone. RevGAT's first
settings are ours, and some of its trainings stop before it tells all classes apart. One half of the validation nodes
selects the epoch, the other half is used for evaluation (``evaluate_on: validation``). Existing rows are not made
again.
"""

import sys

from rbm.experiments.experiment import Experiment
from rbm.experiments.runner import run_experiment

# For each teacher: the settings of its publication, or our first ones of RevGAT, and the changes of each variant.
FIRST = {
    "gat": {"hidden_channels": 64, "dropout": 0.6, "lr": 0.005, "weight_decay": 0.0005, "min_epochs": 20},
    "appnp": {"hidden_channels": 64, "dropout": 0.5, "lr": 0.01, "weight_decay": 0.005},
    "revgat": {"min_epochs": 20},
}
VARIANTS = {
    "gat": {
        "gat, published": {},
        "gat, from epoch 100": {"min_epochs": 100},
        "gat, no decay": {"weight_decay": 0.0},
        "gat, no decay, from epoch 100": {"weight_decay": 0.0, "min_epochs": 100},
        "gat, rate 0.01, dropout 0.5": {"lr": 0.01, "dropout": 0.5},
    },
    "appnp": {
        "appnp, published": {},
        "appnp, decay 0.0005": {"weight_decay": 0.0005},
        "appnp, decay 0.00005": {"weight_decay": 0.00005},
        "appnp, no decay": {"weight_decay": 0.0},
    },
    "revgat": {
        "revgat, first": {},
        "revgat, from epoch 100": {"min_epochs": 100},
        "revgat, from epoch 200": {"min_epochs": 200},
    },
}


def experiments(teacher: str) -> list[Experiment]:
    """One experiment for each variant of the teacher, on both settings of Cora and CiteSeer with three seeds."""
    return [
        Experiment(
            datasets=("cora", "citeseer"),
            settings=("transductive", "inductive"),
            methods=("glnn",),
            seeds=(0, 1, 2),
            teacher=teacher,
            changes={"evaluate_on": "validation", "teacher": FIRST[teacher] | changes},
            variants={variant: {}},
        )
        for variant, changes in VARIANTS[teacher].items()
    ]


def main(root: str, out: str, *teachers: str) -> None:
    for teacher in teachers:
        run_experiment(experiments(teacher), out, root=root)


if __name__ == "__main__":
    main(*sys.argv[1:])
