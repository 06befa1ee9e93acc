"""CPU seconds per epoch of ``rbm distill``, training and evaluation, for versions of this package or settings.

    python -m benchmarks.epoch_seconds before=/tmp/before now=. --root PATH --out benchmarks/results/epoch_seconds.csv
    python -m benchmarks.epoch_seconds float32=. bfloat16=.,precision=bfloat16 --root PATH --out FILE

Versions differ in rounding, and rounding can change the epoch at which a training stops by a factor of two or more. So
the times of whole runs (:mod:`benchmarks.whole_run`) describe individual runs, while these describe the cost of an
epoch. Each version runs a few epochs of each phase in a separate process, on one thread, and the versions take turns,
round after round. The first epochs of a phase, including an RbM student's pretraining, are not counted. A row is the
median of the others. For the method ``labels`` it is the mean of five times as many epochs, all counted: some of them
ask for test nodes, most of these early.
"""

import argparse
import json
import os
import statistics
import time
from itertools import pairwise
from pathlib import Path

COLUMNS = ("date", "commit", "version", "dataset", "setting", "phase", "round", "epochs", "processor_seconds", "load")
PHASES = ("teacher", "mlp", "rbm", "labels")


def measure(
    dataset: str, setting: str, root: str, epochs: int, phases: list[str], changes: list[str]
) -> dict[str, float]:
    """CPU seconds per epoch of each phase, for the version whose code this process imports, with changes
    ``section.key=value`` to the preset.
    """
    import torch

    import rbm
    from rbm.config import parse_assignments
    from rbm.config.presets import preset_config
    from rbm.training import loop

    start_times: dict[str, list[float]] = {}
    train_epoch = loop.train_epoch

    def noted(phase, trainer, epoch):
        start_times.setdefault(phase, []).append(time.process_time())
        return train_epoch(phase, trainer, epoch)

    loop.train_epoch = noted
    data, config = rbm.load_dataset(dataset, root), preset_config("clean", dataset, setting)
    config = config.updated(parse_assignments(changes))
    few, more = ({"max_epochs": count, "patience": count} for count in (epochs, 5 * epochs))
    first = {"rbm": config.rbm.pretraining + 1, "labels": 0}
    options = {"measure_latency": False, "labels_alone": False}
    if {"mlp", "rbm"} & set(phases):
        rbm.distill(data, config=config.updated({"teacher": few, "mlp": few, "rbm": few}), **options)
    if "labels" in phases:  # it has the teacher's settings, but needs no teacher
        logits = torch.zeros(data.num_nodes, data.num_classes)
        rbm.distill(data, logits, config=config.updated({"teacher": more}), methods=["labels"], **options)
    took = {phase: [b - a for a, b in pairwise(at)] for phase, at in start_times.items()}
    counted = {phase: times[first.get(phase, 1) :] for phase, times in took.items()}
    return {phase: (statistics.fmean if phase == "labels" else statistics.median)(t) for phase, t in counted.items()}


def markdown(records: list[dict]) -> str:
    """Medians over the rounds, and their ratios to the first version's."""
    versions = list(dict.fromkeys(record["version"] for record in records))
    lines = [f"| processor seconds of an epoch | {' | '.join(versions)} | of {versions[0]} |"]
    lines.append("|---|" + "---:|" * (len(versions) + 1))
    for dataset, setting in dict.fromkeys((record["dataset"], record["setting"]) for record in records):
        for phase in PHASES:
            own = [
                record
                for record in records
                if [record[name] for name in ("dataset", "setting", "phase")] == [dataset, setting, phase]
            ]
            times = {
                version: statistics.median(float(r["processor_seconds"]) for r in own if r["version"] == version)
                for version in versions
                if any(record["version"] == version for record in own)
            }
            if len(times) < len(versions):
                continue
            cells = [f"{seconds:.3f}" for seconds in times.values()]
            share = times[versions[-1]] / times[versions[0]]
            lines.append(f"| {dataset}, {setting}, {phase} | {' | '.join(cells)} | {share:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "versions", nargs="*", metavar="NAME=FOLDER[,SETTING...]", help="a checkout with its libraries, and changes"
    )
    parser.add_argument("--root", required=True, help="folder of the datasets")
    parser.add_argument("--out", type=Path, help="CSV file to append to")
    parser.add_argument("--dataset", default="amazon-photo")
    parser.add_argument("--settings", nargs="+", default=["transductive", "inductive"])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    help_text = "phases to measure; mlp and rbm also measure the teacher and each other"
    parser.add_argument("--phases", nargs="+", default=PHASES, choices=PHASES, help=help_text)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--changes", nargs="*", default=[], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        where = (arguments.dataset, arguments.worker, arguments.root)
        print(json.dumps(measure(*where, arguments.epochs, arguments.phases, arguments.changes)))
        return
    if not arguments.versions or arguments.out is None:
        parser.error("expected at least one NAME=FOLDER, and --out FILE for the rows")
    # Not in workers, whose package may be an older version.
    from benchmarks.measure.versions import commit_of, run_worker
    from rbm.utils.environment import today
    from rbm.utils.files import append_csv, read_csv

    for turn in range(arguments.rounds):
        for setting in arguments.settings:
            for name, place in (version.split("=", 1) for version in arguments.versions):
                folder, *changes = place.split(",")
                tree = Path(folder).resolve()
                given = ["--worker", setting, "--dataset", arguments.dataset]
                given += ["--root", str(Path(arguments.root).resolve()), "--epochs", str(arguments.epochs)]
                given += ["--phases", *arguments.phases, "--changes", *changes]
                found = run_worker(__file__, given, tree, OMP_NUM_THREADS="1")
                fixed = {
                    "date": today(),
                    "commit": commit_of(tree),
                    "load": round(os.getloadavg()[0], 2),
                    "epochs": arguments.epochs,
                    "version": name,
                    "dataset": arguments.dataset,
                    "setting": setting,
                    "round": turn,
                }
                rows = [{**fixed, "phase": p, "processor_seconds": round(s, 4)} for p, s in found.items()]
                append_csv(arguments.out, rows, COLUMNS)
                print(name, setting, found, flush=True)
    print(markdown(read_csv(arguments.out)), end="")


if __name__ == "__main__":
    main()
