"""The folder of a search: its description, Optuna's file of trials, and the results read from them.

==================  ==============================================================
``search.yaml``     method, seeds, space and starting configuration
``trials.db``       the trials, as Optuna keeps them (SQLite)
``trials.csv``      one row per trial
``best.yaml``       the best settings so far, for ``rbm distill --config``
==================  ==============================================================
"""

import itertools
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rbm.config import Config, differences, flat, nested
from rbm.config.presets import preset_config
from rbm.experiments.tuning.search import Search, Tuned
from rbm.experiments.tuning.space import with_values
from rbm.utils.files import check_writable, read_yaml, write_csv, write_text
from rbm.utils.locks import is_free, only_process
from rbm.utils.studies import import_optuna, open_trials

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

STUDY = "rbm"
FAILED = "failed"  # the attribute of a trial, and the column, with the reason for which it counts as 0
# Number of trials that run to the end before worse trials are stopped early.
BEFORE_PRUNING = 5


@contextmanager
def claimed(folder: Path, search: Search) -> Iterator[None]:
    """Lock a folder for a search: describe the search in an empty folder, or check that the same one is there.

    Raises:
        ValueError: the folder contains another search, or a damaged one.
        FileExistsError: the folder contains something else.
        BlockingIOError: another process is searching there.
    """
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; give a folder by --out")
    if not (folder / "search.yaml").is_file() and not is_free(folder):
        raise FileExistsError(
            f"{folder} is not empty and holds no search (no search.yaml); give another folder by --out"
        )
    check_writable(f"search folder {folder}", folder, "give another folder by --out, or allow it")
    folder.mkdir(parents=True, exist_ok=True)
    advice = "more --jobs share one search; wait until it has ended, or give another folder by --out"
    with only_process(folder / ".search.lock", f"search folder {folder}", advice):
        _claim(folder, search)
        yield


def _claim(folder: Path, search: Search) -> None:
    file, given = folder / "search.yaml", search.description()
    if file.is_file():
        stored = read_yaml("search", file)
        if not isinstance(stored, dict):
            raise ValueError(f"search {file} holds {type(stored).__name__}, expected what a search wrote")
        if "graph" not in stored:  # in searches of earlier versions
            given.pop("graph", None)
        for name, was, now in differences(stored, given):
            raise ValueError(
                f"{folder} holds a search of other settings: {name} (was {was}, now {now}); give them as they were,"
                " to go on, or another folder by --out"
            )
        return
    write_text(file, yaml.safe_dump(given, sort_keys=False))


@contextmanager
def open_study(folder: Path, search: Search) -> Iterator[tuple["Study", "BaseStorage"]]:
    """Open the trials of a folder.

    Interrupted trials, and the starting point if it has no result yet, are queued before any new trial. A trial that
    was killed before all its values were stored is drawn again, with the same values.

    Raises:
        OSError: the file of trials is damaged or cannot be written.
    """
    optuna = import_optuna()
    pruner = optuna.pruners.MedianPruner(n_startup_trials=BEFORE_PRUNING)
    with open_trials(folder / "trials.db", "remove its folder, or give another by --out") as storage:
        study = optuna.create_study(
            storage=storage, study_name=STUDY, direction="maximize", pruner=pruner, load_if_exists=True
        )
        state = optuna.trial.TrialState
        for trial in study.get_trials(deepcopy=False, states=(state.RUNNING,)):
            if _proposed(trial).keys() == search.lines.keys():
                study.enqueue_trial(_proposed(trial))
            study.tell(trial.number, state=state.FAIL)
        start = search.starting_values()
        if start not in [_proposed(trial) for trial in study.get_trials(deepcopy=False) if trial.state != state.FAIL]:
            study.enqueue_trial(start)
        yield study, storage


def _proposed(trial: "FrozenTrial") -> dict[str, Any]:
    """A trial's values; Optuna stores fixed values separately until the trial asks for them."""
    return trial.system_attrs.get("fixed_params", trial.params)


def finished(study: "Study") -> list["FrozenTrial"]:
    """Trials with a result, complete or pruned."""
    state = import_optuna().trial.TrialState
    trials = study.get_trials(deepcopy=False, states=(state.COMPLETE, state.PRUNED))
    return [trial for trial in trials if trial.intermediate_values]


def summary(search: Search, done: list["FrozenTrial"]) -> Tuned | None:
    """The result of a search so far; None until the starting point has a result."""
    complete = [trial for trial in done if trial.state.name == "COMPLETE"]
    start = next((trial for trial in complete if trial.params == search.starting_values()), None)
    if start is None:
        return None
    best = max(complete, key=lambda trial: (trial.value, -trial.number))
    config = with_values(search.start, best.params).updated({"evaluate_on": "test"})
    return Tuned(config, best.params, best.value, start.params, start.value, [_row(search, trial) for trial in done])


def write(folder: Path, search: Search, found: Tuned) -> None:
    """Write ``trials.csv`` and ``best.yaml`` for the current state."""
    write_csv(folder / "trials.csv", found.rows)
    best = shlex.quote(str(folder / "best.yaml"))
    about = (
        f"# {search.method}, seeds {', '.join(map(str, search.seeds))}: {found.accuracy:.2%} of held-out validation"
        f" nodes, {found.start_accuracy:.2%} at the start. rbm distill --config {best}\n"
    )
    text = about + yaml.safe_dump(_changes(found.config), sort_keys=False)
    write_text(folder / "best.yaml", text)


def _row(search: Search, trial: "FrozenTrial") -> dict[str, Any]:
    means = [mean for _, mean in sorted(trial.intermediate_values.items())]
    sums = [0.0, *(count * mean for count, mean in enumerate(means, 1))]
    of_seeds = [f"{after - before:.5f}" for before, after in itertools.pairwise(sums)]
    of_seeds += [""] * (len(search.seeds) - len(means))
    return {
        "trial": trial.number,
        "state": trial.state.name.lower(),
        "accuracy": f"{means[-1]:.5f}",
        **{f"seed {seed}": accuracy for seed, accuracy in zip(search.seeds, of_seeds, strict=True)},
        **trial.params,
        "seconds": f"{trial.duration.total_seconds():.1f}",
        FAILED: trial.user_attrs.get(FAILED, ""),
    }


def _changes(config: Config) -> dict[str, Any]:
    """The content of a file for ``rbm distill --config``: the starting point, and the settings that differ from it."""
    origin = {name: getattr(config, name) for name in ("dataset", "setting", "protocol", "preset")}
    origin["teacher.name"] = config.teacher.name
    known = flat(asdict(preset_config(teacher=config.teacher.name, **_without(origin, "teacher.name"))))
    changed = {name: value for name, value in flat(asdict(config)).items() if value != known[name]}
    return nested({**origin, **_without(changed, "seed")})


def _without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}
