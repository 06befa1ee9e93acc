"""Accuracies and sizes of students with 8-bit weights compared with the same students in float32.

Students of the clean preset, MLP and RbM, transductive, one seed, each trained once. One row per student; rows that OUT
already has are not measured again, and runs that RUNS already has are not trained again.

    python experiments/int8.py ROOT results/int8.csv [RUNS] [DATASET...]

``agreement`` is the share of all nodes for which both predict the same class; ``most_off`` is the largest difference
between probabilities; bytes are those of the whole ``state_dict``. Test nodes are not used for any choice: both are the
same student.
"""

import sys
from pathlib import Path

import rbm
from rbm.config import Config
from rbm.config.presets import preset_config
from rbm.distillation.run_graph import split_of_run
from rbm.experiments.results import made_by
from rbm.nn.sparse_rows import as_rows, concat_columns
from rbm.serving.prediction import predict_probabilities
from rbm.utils.files import append_csv, read_csv

DATASETS = ("cora", "citeseer", "amazon-photo", "amazon-computers", "academic-cs", "academic-physics")
METHODS = ("mlp", "rbm")
COLUMNS = (
    *("dataset", "method", "seed", "in_channels", "hidden_channels", "classes"),
    *("val_float32", "val_int8", "test_float32", "test_int8", "agreement", "most_off", "mean_off"),
    *("bytes_float32", "bytes_int8", "commit", "date", "torch"),
)


def figures(run: Path, method: str, root: str) -> dict[str, object]:
    """A student's row, without the columns that identify it."""
    config = Config.from_yaml(run / "config.yaml")
    graph = split_of_run(run, config, root)[0].graph
    encodings = rbm.load_encodings(run, method)
    x = as_rows(graph.x) if encodings is None else concat_columns(graph.x, encodings)
    students = {kind: rbm.load(run, method, quantize=kind, quiet=True) for kind in (None, "int8")}
    answers = {kind: predict_probabilities(student, x, batch_size=4096) for kind, student in students.items()}
    row = {
        "in_channels": students[None].in_channels,
        "hidden_channels": getattr(students[None].layers[0], "out_features", ""),
        "classes": answers[None].shape[1],
    }
    for kind, student in students.items():
        name = kind or "float32"
        right = answers[kind].argmax(1) == graph.y
        row[f"val_{name}"] = f"{right[graph.val_mask].float().mean():.5f}"
        row[f"test_{name}"] = f"{right[graph.test_mask].float().mean():.5f}"
        row[f"bytes_{name}"] = sum(tensor.nbytes for tensor in student.state_dict().values())
    made = made_by(config, method)
    row |= {name: made[name] for name in ("commit", "date", "torch")}
    off = (answers["int8"] - answers[None]).abs()
    same = answers["int8"].argmax(1) == answers[None].argmax(1)
    return row | {
        "agreement": f"{same.float().mean():.5f}",
        "most_off": f"{off.max():.5f}",
        "mean_off": f"{off.mean():.6f}",
    }


def markdown(rows: list[dict[str, str]]) -> str:
    """The rows of a file as a table."""
    lines = [
        "| graph | student | val, float32 | int8 | test, float32 | int8 | agree | bytes, float32 | int8 |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        names = ("val_float32", "val_int8", "test_float32", "test_int8", "agreement")
        cells = [f"{100 * float(row[name]):.2f}" for name in names]
        sizes = [f"{int(row[name]):,}" for name in ("bytes_float32", "bytes_int8")]
        lines.append(f"| {' | '.join([row['dataset'], row['method'], *cells, *sizes])} |")
    return "\n".join(lines)


def main(root: str, out: str, runs: str = "runs/int8", *datasets: str) -> None:
    path = Path(out)
    known = {(row["dataset"], row["method"]) for row in read_csv(path, missing_ok=True)}
    for dataset in datasets or DATASETS:
        run = Path(runs) / dataset
        if not (run / "summary.json").exists():
            data = rbm.load_dataset(dataset, root, seed=0)
            config = preset_config("clean", dataset)
            rbm.distill(data, config=config, methods=[*METHODS], folder=run, measure_latency=False)
        for method in METHODS:
            if (dataset, method) in known:
                continue
            row = {"dataset": dataset, "method": method, "seed": 0, **figures(run, method, root)}
            append_csv(path, [row], COLUMNS)
            print(row, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
