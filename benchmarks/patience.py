"""Replays trainings with a shorter patience: finds the epoch that would have been kept, from recorded accuracies.

    python -m benchmarks.whole_run quarter=.,teacher.hidden_channels=256 --root PATH --out FILE --metrics FOLDER
    python -m benchmarks.patience FOLDER --out benchmarks/results/patience.csv

With a shorter patience, a training ends at an epoch that the longer training also reached, so nothing is trained again.
Each phase is replayed separately: a student keeps the teacher that it had. Only validation accuracies are used.
"""

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

from torch import nn

from rbm.config import Config
from rbm.config.presets import preset_config
from rbm.training.selection import Accuracies, EpochLimits, Selection
from rbm.utils.files import write_csv

COLUMNS = ("version", "dataset", "setting", "seed", "phase", "patience", "epochs", "best_epoch", "val", "test")
PATIENCE = (10, 20, 30, 40, 50)
SHOWN = (30, 50)  # in the table: the shortest that loses no validation accuracy, and that of the presets
PHASES = ("teacher", "mlp", "rbm")


def replay(records: list[dict], phase: str, config: Config, patience: int) -> Selection:
    """What :func:`rbm.training.loop.fit` would select in a phase, given its epochs as lines of ``metrics.jsonl``."""
    warmup = (
        {"warmup": config.rbm.pretraining, "select_warmup": config.rbm.select_pretraining} if phase == "rbm" else {}
    )
    limits = EpochLimits.of(replace(getattr(config, phase), patience=patience), **warmup)
    selection, nothing = Selection(limits), nn.Module()
    for record in (record for record in records if record["phase"] == phase):
        epoch, accuracies = record["epoch"], (record[f"{part}_accuracy"] for part in ("train", "val", "test"))
        selection.see(epoch, Accuracies(*accuracies), nothing)
        if selection.is_over:
            break
    return selection


def rows_of(path: Path) -> list[dict[str, object]]:
    """One row per phase and patience, from a file ``VERSION_DATASET_SETTING_SEED.jsonl``."""
    version, dataset, setting, seed = path.stem.rsplit("_", 3)
    config, rows = preset_config("clean", dataset, setting), []
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for phase in PHASES:
        for patience in PATIENCE:
            result = replay(records, phase, config, patience).result
            found = {"version": version, "dataset": dataset, "setting": setting, "seed": seed, "phase": phase}
            found |= {"patience": patience, "epochs": result.epochs, "best_epoch": result.best_epoch}
            rows.append({**found, "val": round(result.val_accuracy, 5), "test": round(result.test_accuracy, 5)})
    return rows


def markdown(records: list[dict]) -> str:
    """Means over the seeds, for :data:`SHOWN`."""
    lines = ["| | patience | seeds | epochs | validation | test |", "|---|---:|---:|---:|---:|---:|"]
    runs = dict.fromkeys((r["version"], r["dataset"], r["setting"]) for r in records)
    for version, dataset, setting in runs:
        for phase in PHASES:
            for patience in SHOWN:
                wanted = [version, dataset, setting, phase, str(patience)]
                names = ("version", "dataset", "setting", "phase", "patience")
                own = [record for record in records if [str(record[name]) for name in names] == wanted]
                if not own:
                    continue
                epochs, val, test = (
                    statistics.fmean(float(r[name]) for r in own) for name in ("epochs", "val", "test")
                )
                where = f"{dataset}, {setting}, {version}, {phase}"
                lines.append(f"| {where} | {patience} | {len(own)} | {epochs:.0f} | {val:.2%} | {test:.2%} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="metrics of whole runs, by benchmarks.whole_run --metrics")
    parser.add_argument("--out", type=Path, required=True, help="CSV file to write")
    arguments = parser.parse_args()
    rows = [row for path in sorted(arguments.folder.glob("*.jsonl")) for row in rows_of(path)]
    write_csv(arguments.out, rows, COLUMNS)
    print(markdown(rows), end="")


if __name__ == "__main__":
    main()
