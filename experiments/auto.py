"""Compares the choices of `rbm distill --auto` within a budget with the graph's preset (made graphs: the defaults).

Each argument is GRAPH:BUDGET:SEED. A graph is a name, or `made-H`: a contextual stochastic block model with 3,000 nodes
in five classes, where a share H of the edges is within a class. Rows go to `OUT/runs.csv`, and the trials of each
search to `OUT/GRAPH-BUDGET-SEED.csv`. Existing rows are not made again, and an interrupted search continues.

    OMP_NUM_THREADS=1 python experiments/auto.py ROOT results/auto digits:5m:0 digits:2m:0 made-0.1:10m:0

Here a budget is in CPU seconds, not in elapsed time. With one thread these are equal on an idle machine, and on a busy
one the same work fits into a budget. Searches of one graph with several budgets share trainings, which run only once;
each search counts the seconds that they took.
"""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from block_graphs import block_graph
from optuna.trial import TrialState
from rich.console import Console
from torch_geometric.data import Data

import rbm
from rbm.config.presets import preset_config
from rbm.distillation.auto import run as auto_run
from rbm.distillation.auto import search
from rbm.distillation.auto.folder import new_study
from rbm.distillation.auto.space import Space
from rbm.distillation.verdict import Comparison, kept_student
from rbm.experiments.results import made_by
from rbm.training import time_limit
from rbm.utils.files import as_json, read_csv, write_csv, write_text
from rbm.utils.studies import open_trials

RUNS = Path("runs") / "auto"
METHODS = ("mlp", "rbm")


class ProcessorClock:
    """CPU seconds of this process, plus those of trainings that another search has run."""

    def __init__(self) -> None:
        self.replayed = 0.0

    def __call__(self) -> float:
        return time.process_time() + self.replayed


class Known:
    """Results computed for one graph and seed, by a text that identifies them: a JSON file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def get(self, what: str, compute: Callable[[], Any]) -> tuple[Any, bool]:
        """The known or newly computed result, and whether it was known."""
        name = hashlib.sha256(what.encode()).hexdigest()[:16]
        if name in self.found:
            return self.found[name], True
        self.found[name] = compute()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, as_json(self.found))
        return self.found[name], False


CLOCK = ProcessorClock()


class SharedJudge(auto_run.Judge):
    """A judge that runs no training twice, whichever search asks for it."""

    known: Known

    def __call__(self, point: dict[str, Any], half: int) -> str:
        def train() -> list[Any]:
            began = CLOCK()
            return [super(SharedJudge, self).__call__(point, half), CLOCK() - began]

        (answers, seconds), before = SharedJudge.known.get(json.dumps([point, half], sort_keys=True), train)
        if before:
            CLOCK.replayed += seconds
            time_limit.current_limit().check("replayed")  # the known training may exceed this budget
        return answers


def graph_of(name: str, root: str, seed: int) -> Data:
    if not name.startswith("made-"):
        return rbm.load_dataset(name, root, seed=seed)
    homophily = float(name.removeprefix("made-"))
    return block_graph(homophily, nodes=3000, classes=5, degree=20, features=32, signal=0.4, seed=seed)


def config_of(name: str, seed: int) -> rbm.Config:
    own = name.startswith("made-")
    return preset_config("clean", f"{name}.pt" if own else name).updated({"seed": seed})


def searched(name: str, budget: str, seed: int, data: Data) -> auto_run.Chosen:
    """Run the search of ``rbm distill --auto`` in its own run folder."""
    folder = RUNS / f"{name}-{seed}-{budget}"
    SharedJudge.known = Known(RUNS / f"judged-{name}-{seed}.json")
    return auto_run.choose(
        rbm.distill,
        data,
        None,
        config_of(name, seed),
        teacher_name=None,
        methods=METHODS,
        run=METHODS,
        budget=auto_run.parse_budget(budget),
        folder=folder,
        resume=(folder / "auto.yaml").is_file(),
        overwrite=False,
        cache=RUNS / f"cache-{name}-{seed}",
        unseen_fraction=None,
        console=Console(stderr=True),
    )


def best_point(folder: Path) -> dict[str, Any]:
    """The point of a search's best complete trial, whether it was chosen or not."""
    with open_trials(folder / "auto.db", "delete the folder") as storage:
        trials = new_study(storage).get_trials(states=(TrialState.COMPLETE,))
    return search.point_of(max(trials, key=lambda trial: (trial.value, -trial.number)))


def trained(config: rbm.Config, name: str, seed: int, data: Data) -> dict[str, Any]:
    """Verdict and test accuracies of a run with the configuration."""

    def train() -> dict[str, Any]:
        found = rbm.distill(data, config=config, cache=RUNS / f"cache-{name}-{seed}", measure_latency=False)
        test = {method: found.summary[method]["test_accuracy"] for method in found.students}
        return {"verdict": found.summary["verdict"], "test": test}

    return Known(RUNS / f"run-{name}-{seed}.json").get(config.to_yaml(), train)[0]


def accuracies(result: dict[str, Any], outcome: dict[str, Any]) -> dict[str, object]:
    """The columns of a row about a run, after a search with these results."""
    verdict, test = result["verdict"], result["test"]
    behind = {method: Comparison(**fields) for method, fields in verdict["behind"].items()}
    kept = kept_student(verdict["best"], behind, METHODS, verdict["cost"], auto_run.searched_for(outcome))
    return {
        "kept": kept,
        "best_val": _percent(max(verdict["accuracy"][method] for method in METHODS)),
        "kept_val": _percent(verdict["accuracy"][kept]),
        "kept_test": _percent(test[kept]),
        **{f"{method}_test": _percent(test[method]) for method in METHODS},
    }


def row(name: str, budget: str | None, seed: int, root: str) -> dict[str, object]:
    """The kept student of a search, or of the settings from which it starts."""
    data = graph_of(name, root, seed)
    config, found, best, seconds = config_of(name, seed), {}, {}, ""
    if budget is not None:
        chosen = searched(name, budget, seed, data)
        found = chosen.outcome
        trials = read_csv(RUNS / f"{name}-{seed}-{budget}" / "auto.csv", missing_ok=True)  # none in a small budget
        seconds = f"{sum(float(trial['seconds']) for trial in trials):.0f}"
        if found["choice"] is not None:
            # The student of the best trial, even if not chosen: the result of the search without its rule.
            point = best_point(RUNS / f"{name}-{seed}-{budget}")
            test = trained(Space(config, METHODS).config(point), name, seed, data)["test"]
            tried = " ".join(f"{key}={value}" for key, value in point.items())
            best = {"best_trial": tried, "best_trial_test": _percent(test[point["method"]])}
        config = chosen.config
    made = made_by(config, "rbm")
    return {
        "graph": name,
        "seed": seed,
        "run": "preset" if budget is None else f"auto {budget}",
        "trials": found.get("trials", ""),
        "halves": found.get("halves", ""),
        "held_out": _percent(found.get("accuracy")),
        "held_out_before": _percent(found.get("given_accuracy")),
        "gain": _percent(found.get("gain")),
        "error": _percent(found.get("error")),
        "corrected": _percent(found.get("corrected")),
        "tried": found.get("tried", ""),
        "teacher": config.teacher.name,
        "searched_for": (found.get("choice") or {}).get("method", ""),
        "changed": " ".join(f"{key}={value}" for key, value in found.get("changed", {}).items()),
        **accuracies(trained(config, name, seed, data), found),
        "best_trial": "",
        "best_trial_test": "",
        **best,
        "seconds": seconds,
        "load": f"{os.getloadavg()[1]:.1f}",
        **{key: made[key] for key in ("commit", "date", "threads")},
    }


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"


def main(root: str, out: str, *what: str) -> None:
    auto_run.Judge, search._clock, time_limit._clock = SharedJudge, CLOCK, CLOCK
    table = Path(out) / "runs.csv"
    table.parent.mkdir(parents=True, exist_ok=True)
    rows = read_csv(table, missing_ok=True)
    for run in what:
        name, budget, seed = run.split(":")
        for searches in (None, budget):
            kind = "preset" if searches is None else f"auto {budget}"
            if any((made["graph"], made["seed"], made["run"]) == (name, seed, kind) for made in rows):
                continue
            rows.append({key: str(value) for key, value in row(name, searches, int(seed), root).items()})
            write_csv(table, rows)
            if (trials := RUNS / f"{name}-{seed}-{budget}" / "auto.csv").is_file():
                shutil.copy(trials, table.parent / f"{name}-{budget}-{seed}.csv")


if __name__ == "__main__":
    main(*sys.argv[1:])
