"""What ``made_graphs.py`` and ``public_graphs.py`` keep of a run with the defaults: accuracies, and which student it
kept.
"""

import time

from rbm.config import Config
from rbm.distillation.result import Distillation
from rbm.experiments.results import made_by

MODELS = ("teacher", "labels", "mlp", "rbm")
ACCURACIES = tuple(f"{model}_{part}" for model in MODELS for part in ("val", "test"))
EPOCHS = ("mlp_epoch", "rbm_epoch")
MADE = ("commit", "date", "torch", "threads")


def outcome(result: Distillation, config: Config, started: float) -> dict[str, str]:
    """Accuracies in per cent, best epochs and the kept student of a run that began at ``time.perf_counter() ==
    started``, and its provenance.
    """
    summary, made = result.summary, made_by(config, "rbm")
    return {
        **{f"{model}_val": f"{100 * summary[model]['val_accuracy']:.2f}" for model in MODELS},
        **{f"{model}_test": f"{100 * summary[model]['test_accuracy']:.2f}" for model in MODELS},
        "kept": summary["verdict"]["kept"],
        **{f"{model}_epoch": str(summary[model]["best_epoch"]) for model in ("mlp", "rbm")},
        "seconds": f"{time.perf_counter() - started:.1f}",
        **{name: made[name] for name in MADE},
    }


def in_short(row: dict[str, str]) -> str:
    """Test accuracies, the kept student and the time, for a line of progress."""
    tests = " ".join(f"{model} {row[f'{model}_test']}" for model in MODELS)
    return f"{tests} kept {row['kept']} {row['seconds']} s"
