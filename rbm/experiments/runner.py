"""Runs over datasets, settings, variants and seeds, resumable; each model is a row (:mod:`rbm.experiments.results`)."""

from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from torch_geometric.data import Data

from rbm.config import PRESETS, PROTOCOLS, SETTINGS, Config
from rbm.config.presets import preset_config
from rbm.datasets import check_files, dataset_name, load_dataset
from rbm.distillation.distill import DEFAULT_METHODS, distill
from rbm.distillation.registry import METHODS
from rbm.experiments.results import append_rows, config_fingerprint, figures, made_by, read_rows, row_key
from rbm.utils.files import read_yaml
from rbm.utils.parallel import worker_pool
from rbm.utils.progress import count_runs

_MOST_SEEDS = 10_000


@dataclass(frozen=True)
class Experiment:
    """What to run: every combination of the lists.

    Attributes:
        datasets: names, see :func:`rbm.load_dataset`.
        settings: ``transductive``, ``inductive``.
        methods: of ``rbm.distillation.registry.METHODS``; the teacher's row comes with any of them.
        seeds: of splits, initialisation and dropout.
        preset, protocol, teacher: as for ``rbm distill``.
        changes: settings for all runs, after the preset's.
        variants: further changes by name; every variant is run. The default is one without a name.
    """

    datasets: tuple[str, ...] = ("digits",)
    settings: tuple[str, ...] = ("transductive",)
    methods: tuple[str, ...] = DEFAULT_METHODS
    seeds: tuple[int, ...] = (0,)
    preset: str = "clean"
    protocol: str = "rbm"
    teacher: str = "sage"
    changes: dict[str, Any] = field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = field(default_factory=lambda: {"": {}})
    _configs: dict[tuple[str, str, str], Config] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "datasets", tuple(dataset_name(name) for name in self.datasets))
        for name, known in (("settings", SETTINGS), ("methods", METHODS)):
            if unknown := [value for value in getattr(self, name) if value not in known]:
                raise ValueError(f"{name} holds {unknown[0]!r}, expected some of {', '.join(known)}")
        for name, known in (("preset", PRESETS), ("protocol", PROTOCOLS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(known)}")
        if changed := [name for name, changes in self.variants.items() if "teacher" in changes]:
            raise ValueError(
                f"variant {changed[0]!r} changes the teacher, which all variants share; put that into changes, in a"
                " file of its own"
            )
        for task in self.tasks():
            self.config(task)

    @classmethod
    def from_yaml(cls, path: Path | str) -> "Experiment":
        """Read an experiment file: the attributes as keys, ``seeds`` also as text such as ``0-9``.

        Raises:
            FileNotFoundError: no such file.
            ValueError: no YAML, an unknown key, or a value that does not fit; before anything runs.
        """
        content = read_yaml("experiment file", path)
        known = {item.name for item in fields(cls) if item.init}
        if not isinstance(content, dict) or not set(content) <= known:
            given = sorted(set(content) - known) if isinstance(content, dict) else type(content).__name__
            raise ValueError(f"{path} holds {given}, expected the keys {', '.join(sorted(known))}")
        for key, value in content.items():
            if expected := _misfit(key, value):
                raise ValueError(f"{path}: {key} is {value!r}, expected {expected}")
        if "seeds" in content:
            content["seeds"] = parse_seeds(content["seeds"])
        lists = {key: tuple(content[key]) for key in ("datasets", "settings", "methods") if key in content}
        return cls(**{**content, **lists})

    def tasks(self) -> Iterator["Task"]:
        """One for each dataset, setting, variant and seed; seeds turn slowest, so that rows fill evenly."""
        for seed in self.seeds:
            for dataset in self.datasets:
                for setting in self.settings:
                    for variant in self.variants:
                        yield Task(dataset, setting, variant, seed)

    def config(self, task: "Task") -> Config:
        """The whole configuration of a task."""
        key = (task.dataset, task.setting, task.variant)
        if key not in self._configs:
            config = preset_config(self.preset, task.dataset, task.setting, self.teacher, self.protocol)
            for changes in (self.changes, self.variants[task.variant]):
                config = config.updated(changes)
            self._configs[key] = config
        return replace(self._configs[key], seed=task.seed)


def _misfit(key: str, value: Any) -> str:
    """What a key of an experiment file takes, where ``value`` is something else."""
    if key in ("datasets", "settings", "methods"):
        fits = isinstance(value, list) and all(isinstance(name, str) for name in value)
        return "" if fits else "a list of names"
    if key in ("preset", "protocol", "teacher"):
        return "" if isinstance(value, str) else "a name"
    if key == "changes":
        return "" if isinstance(value, dict) else "sections with settings"
    if key == "variants":
        fits = isinstance(value, dict) and all(isinstance(changes, dict) for changes in value.values())
        return "" if fits else "sections with settings by name"
    return ""


@dataclass(frozen=True)
class Task:
    """One graph, one split, one teacher, and the students that learn from it."""

    dataset: str
    setting: str
    variant: str
    seed: int


def parse_seeds(text: str | int | list[int]) -> tuple[int, ...]:
    """``"0-9"``, ``"0,3,7-9"``, ``5`` or a list of numbers.

    Raises:
        ValueError: anything else, or no seed at all.
    """
    if isinstance(text, int):
        return (text,)
    if isinstance(text, list) and text and all(isinstance(seed, int) for seed in text):
        return tuple(text)
    if not isinstance(text, str):
        raise ValueError(f"seeds is {text!r}, expected numbers and ranges such as 0-9 or 0,3,7-9")
    seeds: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.strip().partition("-")
            seeds.extend(_seed_range(int(first), int(last)) if dash else [int(first)])
    except ValueError as error:
        raise ValueError(f"seeds is {text!r}, expected numbers and ranges such as 0-9 or 0,3,7-9") from error
    if not seeds:
        raise ValueError(f"seeds is {text!r}, which names no seed; expected for example 0-9")
    return tuple(dict.fromkeys(seeds))


def _seed_range(first: int, last: int) -> range:
    if last - first >= _MOST_SEEDS:
        raise ValueError(f"{first}-{last} are more than {_MOST_SEEDS} seeds")
    return range(first, last + 1)


def run_experiment(
    experiment: Experiment | Sequence[Experiment],
    out: Path | str,
    *,
    root: str | None = None,
    cache: Path | str | None = None,
    jobs: int = 1,
    device: str = "cpu",
    console: Console | None = None,
) -> list[dict[str, str]]:
    """Run what ``out`` does not hold yet, and append a row for each model as soon as it is trained.

    Args:
        experiment: what to run; several take turns, seed after seed.
        out: CSV file with :data:`rbm.experiments.results.COLUMNS`; made where it is missing. An experiment run again
            with the same file goes on.
        root: folder of the datasets.
        cache: folder of trained teachers and encodings, which all models share; without one they are kept for the time
            of the experiment.
        jobs: processes that train models side by side; they share the cores.
        device: where models are trained.
        console: shows progress there.

    Returns:
        All rows of the experiments, those of earlier runs too.

    Raises:
        ValueError: ``out`` is no such file, or holds a row of this experiment that other settings made.
        FileNotFoundError: a graph's files are missing; before anything runs.
    """
    out, done = Path(out), {}
    experiments = [experiment] if isinstance(experiment, Experiment) else list(experiment)
    for each in experiments:
        done |= check_rows(read_rows(out), each)
    tasks = [(each, task) for each in experiments for task in each.tasks()]
    tasks.sort(key=lambda pair: pair[0].seeds.index(pair[1].seed))
    waiting = [(each, task, method) for each, task in tasks for method in _missing(task, each, done)]
    if jobs > 1:  # one method after the other: processes that start with the same teacher would wait for it
        waiting.sort(key=lambda what: (what[0].seeds.index(what[1].seed), what[0].methods.index(what[2])))
    for name, protocol in dict.fromkeys((task.dataset, each.protocol) for each, task, _ in waiting):
        check_files(name, root, protocol=protocol)
    total = sum(len(each.methods) for each, _ in tasks)
    with count_runs(console) as bar, _shared(cache) as folder:
        shown = bar.add_task("runs", total=total, completed=total - len(waiting), what="")
        arguments = [(*what, root, folder, device) for what in waiting]
        for task, rows in _results(arguments, jobs):
            new = [row for row in rows if row_key(row) not in done]
            append_rows(out, new)
            done |= {row_key(row): row for row in new}
            what = f"{task.dataset} {task.setting} {task.variant} seed {task.seed}"
            bar.update(shown, advance=1, what=what)
    keys = {row_key(row) for each, task in tasks for row in _expected(task, each)}
    return [row for key, row in done.items() if key in keys]


@contextmanager
def _shared(cache: Path | str | None) -> Iterator[Path]:
    if cache is not None:
        yield Path(cache)
        return
    with TemporaryDirectory(prefix="rbm-") as folder:
        yield Path(folder)


def _results(arguments: list[tuple], jobs: int) -> Iterator[tuple[Task, list[dict[str, str]]]]:
    if jobs == 1:
        for given in arguments:
            yield given[1], _run_task(*given)
        return
    with worker_pool(jobs) as pool:
        futures = {pool.submit(_run_task, *given): given[1] for given in arguments}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _run_task(
    experiment: Experiment,
    task: Task,
    method: str,
    root: str | None,
    cache: Path,
    device: str,
) -> list[dict[str, str]]:
    """The rows of a student and of its teacher."""
    config = experiment.config(task)
    result = distill(
        remembered_dataset(task.dataset, root, config.protocol, task.seed, config.sparse_features, device),
        config=config,
        methods=[method],
        cache=cache,
        measure_latency=False,
    )
    return [
        {**row, **figures(result.summary[made], result.timings[made]["seconds"]), **made_by(config, made)}
        for row in _expected(task, experiment, [method])
        for made in [row["method"]]
    ]


@lru_cache(maxsize=2)
def remembered_dataset(
    name: str, root: str | None, protocol: str, seed: int, sparse_features: str, device: str
) -> Data:
    """A graph as :func:`rbm.load_dataset` gives it, on a device; this process keeps the last two."""
    return load_dataset(name, root, protocol=protocol, seed=seed, sparse_features=sparse_features).to(device)


def _expected(task: Task, experiment: Experiment, methods: list[str] | None = None) -> list[dict[str, str]]:
    """The keys of a task's rows. A teacher is the same for all variants of the students."""
    shared = {name: getattr(experiment, name) for name in ("protocol", "teacher", "preset")}
    shared |= {"dataset": task.dataset, "setting": task.setting, "seed": str(task.seed)}
    students = experiment.methods if methods is None else methods
    rows = [{"method": "teacher", "variant": ""}, *({"method": m, "variant": task.variant} for m in students)]
    return [{**shared, **row} for row in rows]


def _missing(task: Task, experiment: Experiment, done: dict[tuple, dict[str, str]]) -> list[str]:
    rows = _expected(task, experiment)[1:]
    return [row["method"] for row in rows if row_key(row) not in done]


def check_rows(rows: list[dict[str, str]], experiment: Experiment) -> dict[tuple, dict[str, str]]:
    """The rows by their keys.

    Raises:
        ValueError: one of them is of this experiment by its key, but other settings made it.
    """
    done = {row_key(row): row for row in rows}
    for task in experiment.tasks():
        config = experiment.config(task)
        for row in _expected(task, experiment)[1:]:
            known, expected = done.get(row_key(row)), config_fingerprint(config, row["method"])
            if known is not None and known["config"] != expected:
                raise ValueError(
                    f"the results file holds {' '.join(row_key(row))} from other settings ({known['config']}, now"
                    f" {expected}); give this experiment a file of its own, or its variant another name"
                )
    return done
