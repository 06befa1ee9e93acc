"""Times ``rbm distill`` from a graph to a kept student, for several versions of this package or settings in turn.

    git worktree add /tmp/before COMMIT && cp rbm_kernels/lib/* /tmp/before/rbm_kernels/lib/
    python -m benchmarks.whole_run before=/tmp/before now=. quarter=.,teacher.hidden_channels=256 --root PATH \
      --out benchmarks/results/whole_run.csv --metrics FOLDER

Each run is a separate process on one thread, with its own run folder and cache, and without plots. Its CPU seconds,
which include the import of PyTorch, depend little on other work of the machine; the seconds of the phases in
``timings.json`` are elapsed time. Rows are appended as runs end; runs that are already in the file are skipped.
``--metrics`` keeps the accuracies of every epoch, for :mod:`benchmarks.patience`.
"""

import argparse
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

from benchmarks.measure.versions import commit_of
from rbm.experiments.experiment import parse_seeds
from rbm.experiments.statistics import paired_test
from rbm.utils.environment import today
from rbm.utils.files import append_csv, read_csv

COLUMNS = (
    *("date", "commit", "version", "dataset", "setting", "seed", "seconds", "processor_seconds", "load"),
    *("teacher_seconds", "students_seconds", "teacher_val", "teacher_test", "teacher_epochs", "kept"),
    *("mlp_val", "mlp_test", "rbm_val", "rbm_test", "rbm_epochs", "mlp_epochs", "settings"),
)
KEY = ("version", "dataset", "setting", "seed")


def run(
    tree: Path, settings: list[str], dataset: str, setting: str, seed: int, root: Path, folder: Path
) -> dict[str, object]:
    """Run a version's own code once, with changes ``section.key=value`` to the preset."""
    command = [sys.executable, "-m", "rbm", "distill", "--dataset", dataset, "--setting", setting, "--seed", str(seed)]
    command += ["--root", str(root), "--out", str(folder / "run"), "--cache", str(folder / "cache"), "--no-plots"]
    command += [part for change in settings for part in ("--set", change)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, env=environment, cwd=tree, stdout=subprocess.DEVNULL)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    summary, timings = (
        json.loads((folder / "run" / f"{name}.json").read_text(encoding="utf-8")) for name in ("summary", "timings")
    )
    students = [timings[name]["seconds"] for name in ("mlp", "rbm", "labels")]
    return {
        "seconds": round(seconds, 2),
        "processor_seconds": round(sum(getattr(after, n) - getattr(before, n) for n in ("ru_utime", "ru_stime")), 2),
        "teacher_seconds": timings["teacher"]["seconds"],
        "students_seconds": round(sum(students), 3),
        "teacher_epochs": summary["teacher"]["epochs"],
        "rbm_epochs": summary["rbm"]["epochs"],
        "mlp_epochs": summary["mlp"]["epochs"],
        "settings": " ".join(settings),
        "kept": summary["verdict"]["kept"],
        **{
            f"{name}_{part}": round(summary[name][f"{part}_accuracy"], 5)
            for name in ("teacher", "mlp", "rbm")
            for part in ("val", "test")
        },
    }


def markdown(records: list[dict]) -> str:
    """Means over the seeds that all versions have, and ratios of CPU seconds to those of the first version."""
    lines = [
        "| | | seeds | processor s | of the first's | teacher val | test | MLP val | test | RbM val | test |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    versions = list(dict.fromkeys(record["version"] for record in records))
    for dataset, setting in dict.fromkeys((record["dataset"], record["setting"]) for record in records):
        here = [record for record in records if (record["dataset"], record["setting"]) == (dataset, setting)]
        seeds = set.intersection(*({str(r["seed"]) for r in here if r["version"] == version} for version in versions))
        if not seeds:
            continue
        first = None
        for version in versions:
            own = [record for record in here if record["version"] == version and str(record["seed"]) in seeds]
            means = [name for name in COLUMNS if name.endswith(("_val", "_test", "_seconds"))]
            mean = {name: statistics.fmean(float(record[name]) for record in own) for name in means}
            used = mean["processor_seconds"]
            first = first or used
            parts = [f"{mean[f'{name}_{part}']:.2%}" for name in ("teacher", "mlp", "rbm") for part in ("val", "test")]
            cells = [f"{dataset}, {setting}", version, str(len(own)), f"{used:.1f}", f"{used / first:.2f}", *parts]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


PRESET = {"protocol": "rbm", "teacher": "sage", "preset": "clean", "variant": ""}


def rows_of(records: list[dict], version: str) -> list[dict]:
    """A version's accuracies as rows like those of ``results/paper.csv``, to compare another version with."""
    return [
        {
            **PRESET,
            **{key: record[key] for key in ("dataset", "setting", "seed")},
            "method": name,
            "val": record[f"{name}_val"],
            "test_at_best_val": record[f"{name}_test"],
        }
        for record in records
        if record["version"] == version
        for name in ("teacher", "mlp", "rbm")
    ]


def against(records: list[dict], rows: list[dict], version: str, base: str = "preset") -> str:
    """A version's accuracies compared with ``rows`` of the same seeds: ``results/paper.csv``, made with the unchanged
    preset, or those of another version (:func:`rows_of`). ``base`` is their name in the table.
    """
    lines = [
        f"| | seeds | validation: {base} | {version} | difference | p | test: {base} | {version} | difference | p |",
        "|---|---:|" + "---:|" * 8,
    ]
    own = [record for record in records if record["version"] == version]
    for dataset, setting in dict.fromkeys((record["dataset"], record["setting"]) for record in own):
        here = [record for record in own if (record["dataset"], record["setting"]) == (dataset, setting)]
        for name, title in (("teacher", "teacher"), ("mlp", "MLP"), ("rbm", "RbM")):
            wanted = PRESET | {"dataset": dataset, "setting": setting, "method": name}
            known = {int(row["seed"]): row for row in rows if all(row[key] == value for key, value in wanted.items())}
            cells = []
            for column, part in (("val", "val"), ("test_at_best_val", "test")):
                new = {int(r["seed"]): float(r[f"{name}_{part}"]) for r in here if int(r["seed"]) in known}
                old = {seed: float(known[seed][column]) for seed in new}
                found = paired_test(new, old)
                means = [f"{statistics.fmean(values.values()):.2%}" for values in (old, new)]
                p = "" if math.isnan(found.p) else f"{found.p:.2f}"  # NaN if all differences are equal
                cells += [*means, f"{100 * found.difference:+.2f}", p]
            lines.append(f"| {dataset}, {setting}, {title} | {len(new)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "versions", nargs="+", metavar="NAME=FOLDER[,SETTING...]", help="a checkout with its libraries, and changes"
    )
    parser.add_argument("--against", type=Path, help="results/paper.csv, to compare the last version with the preset")
    parser.add_argument("--metrics", type=Path, help="folder to keep each run's metrics.jsonl in")
    parser.add_argument("--root", type=Path, required=True, help="folder of the datasets")
    parser.add_argument("--out", type=Path, required=True, help="CSV file to append to")
    parser.add_argument("--datasets", nargs="+", default=["amazon-photo"])
    parser.add_argument("--settings", nargs="+", default=["transductive", "inductive"])
    parser.add_argument("--seeds", type=parse_seeds, default="0-9")
    arguments = parser.parse_args()
    trees = dict(version.split("=", 1) for version in arguments.versions)
    done = read_csv(arguments.out, missing_ok=True)
    known = {tuple(record[name] for name in KEY) for record in done}
    for seed, dataset, setting in product(arguments.seeds, arguments.datasets, arguments.settings):
        for name, tree in trees.items():
            if (name, dataset, setting, str(seed)) in known:
                continue
            place, *settings = tree.split(",")
            tree = Path(place).resolve()
            commit = commit_of(tree)
            with tempfile.TemporaryDirectory() as folder:
                found = run(tree, settings, dataset, setting, seed, arguments.root.resolve(), Path(folder))
                if arguments.metrics:
                    arguments.metrics.mkdir(parents=True, exist_ok=True)
                    kept = arguments.metrics / f"{name}_{dataset}_{setting}_{seed}.jsonl"
                    shutil.copy(Path(folder) / "run" / "metrics.jsonl", kept)
            record = {
                "date": today(),
                "commit": commit,
                "load": round(os.getloadavg()[0], 2),
                **dict(zip(KEY, (name, dataset, setting, seed), strict=True)),
                **found,
            }
            append_csv(arguments.out, [record], COLUMNS)
            done.append(record)
            print(f"{name} {dataset} {setting} {seed}: {found['processor_seconds']} s", flush=True)
    print(markdown(done), end="")
    if arguments.against:
        print(against(done, read_csv(arguments.against), list(trees)[-1]), end="")


if __name__ == "__main__":
    main()
