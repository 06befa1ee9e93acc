"""Gather run folders into one tidy CSV, one row a run and model.

``python -m benchmarks.collect_runs OUT.csv RUN...``
"""

import csv
import datetime
import json
import platform
import subprocess
import sys
from pathlib import Path

import torch
import torch_geometric

COLUMNS = (
    *("dataset", "setting", "preset", "teacher", "seed", "model"),
    *("test_at_best_val", "val", "test_max", "best_epoch", "epochs", "median_epoch_seconds"),
    *("parameters", "active_parameters", "one_node_ms", "all_nodes_ms"),
    *("commit", "date", "python", "torch", "torch_geometric"),
)


def main(out: Path, runs: list[Path]) -> None:
    """Write the rows of ``runs`` to ``out``, replacing it."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    made = {
        "commit": commit.strip(),
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_geometric": torch_geometric.__version__,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for run in runs:
            writer.writerows({**row, **made} for row in rows(run))


def rows(run: Path) -> list[dict]:
    """The rows of one run folder: teacher, MLP student and RbM student."""
    summary = json.loads((run / "summary.json").read_text())
    timings = json.loads((run / "timings.json").read_text())
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    shared = {key: summary[key] for key in ("dataset", "setting", "preset", "seed")}
    table = []
    for model in ("teacher", "mlp", "student"):
        result = summary[model]
        seconds = sorted(record["seconds"] for record in records if record["phase"] == model)
        table.append(
            {
                **shared,
                "teacher": summary["teacher"]["name"],
                "model": "rbm" if model == "student" else model,
                "test_at_best_val": f"{result['test_accuracy']:.4f}",
                "val": f"{result['val_accuracy']:.4f}",
                "test_max": f"{result['test_max']:.4f}",
                "best_epoch": result["best_epoch"],
                "epochs": result["epochs"],
                "median_epoch_seconds": seconds[len(seconds) // 2],
                "parameters": result["parameters"],
                "active_parameters": result["active_parameters"],
                **{key: f"{value:.3f}" for key, value in timings[model].items()},
            }
        )
    return table


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
