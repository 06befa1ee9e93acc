"""The definition of an experiment: the runs that a file describes, each a task with a configuration."""

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from rbm.config import PRESETS, PROTOCOLS, SETTINGS, Config
from rbm.config.presets import preset_config
from rbm.config.section import Section
from rbm.datasets import dataset_name
from rbm.distillation.registry import METHODS, check_teacher_of
from rbm.distillation.request import DEFAULT_METHODS
from rbm.teachers import TEACHERS, check_teacher
from rbm.utils.files import read_yaml

MOST_SEEDS = 10_000
_LISTS = ("datasets", "settings", "methods")
# Settings that name the rows of a run, and the keys of an experiment from which they come.
_NAMING = {
    "teacher.name": "teacher",
    "setting": "settings",
    "dataset": "datasets",
    "seed": "seeds",
    "preset": "preset",
    "protocol": "protocol",
}


def _is_list_of(values: Any, kind: type) -> bool:
    return isinstance(values, tuple) and values != () and all(type(value) is kind for value in values)


def _is_tree(variants: Any) -> bool:
    """Whether there is at least one variant, and each has a name and settings."""
    parts = list(variants.items()) if isinstance(variants, dict) else []
    return parts != [] and all(_is_name(name) and isinstance(changes, dict) for name, changes in parts)


def _is_name(name: Any) -> bool:
    """Whether a name is text in one line: rows with a line break would not be found again in their file."""
    return isinstance(name, str) and name.splitlines() in ([], [name])


_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_LISTS, (lambda value: _is_list_of(value, str), "a list of names, not empty")),
    "seeds": (lambda value: _is_list_of(value, int), "a list of numbers, not empty"),
    **dict.fromkeys(("preset", "protocol", "teacher"), (lambda value: isinstance(value, str), "a name")),
    "changes": (lambda value: isinstance(value, dict), "sections with settings"),
    "dataset_changes": (lambda value: value == {} or _is_tree(value), "sections with settings by dataset"),
    "variants": (_is_tree, "sections with settings by name, each name in one line"),
}


@dataclass(frozen=True)
class Experiment:
    """An experiment: every combination of the lists is run.

    Attributes:
        datasets: names, see :func:`rbm.load_dataset`.
        settings: ``transductive``, ``inductive``.
        methods: names in ``rbm.distillation.registry.METHODS``; a row of the teacher is always added.
        seeds: seeds of splits, initialisation and dropout.
        preset, protocol, teacher: as for ``rbm distill``.
        changes: settings for all runs, applied after the preset's. They cannot contradict the attributes above, which
            name the rows: ``teacher`` chooses the teacher.
        dataset_changes: settings for the runs of one dataset, by its name, applied after ``changes``.
        variants: further changes by name; every variant is run. The default is a single variant without a name.
    """

    datasets: tuple[str, ...] = ("digits",)
    settings: tuple[str, ...] = ("transductive",)
    methods: tuple[str, ...] = DEFAULT_METHODS
    seeds: tuple[int, ...] = (0,)
    preset: str = "clean"
    protocol: str = "rbm"
    teacher: str = "sage"
    changes: dict[str, Any] = field(default_factory=dict)
    dataset_changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = field(default_factory=lambda: {"": {}})
    _configs: dict[tuple[str, str, str], Config] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, (fits, expected) in _TYPES.items():
            if not fits(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected {expected}")
        object.__setattr__(self, "datasets", tuple(dataset_name(name) for name in self.datasets))
        changes = {dataset_name(name): changes for name, changes in self.dataset_changes.items()}
        object.__setattr__(self, "dataset_changes", changes)
        for name in (*_LISTS, "seeds"):
            values = getattr(self, name)
            if twice := [value for value in values if values.count(value) > 1]:
                raise ValueError(f"{name} holds {twice[0]!r} twice, which would be trained twice; expected each once")
        lists = (("settings", SETTINGS), ("methods", METHODS), ("dataset_changes", self.datasets))
        for name, known in lists:
            if unknown := [value for value in getattr(self, name) if value not in known]:
                raise ValueError(f"{name} holds {unknown[0]!r}, expected some of {', '.join(known)}")
        for name, known in (("preset", PRESETS), ("protocol", PROTOCOLS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(known)}")
        if self.teacher == "logits":
            check_teacher_of(self.methods, None)
        else:
            check_teacher(self.teacher)
            check_teacher_of(self.methods, TEACHERS[self.teacher])
        if changed := [name for name, changes in self.variants.items() if "teacher" in changes]:
            raise ValueError(
                f"variant {changed[0]!r} changes the teacher, which all variants share; put that into changes, in a"
                " file of its own"
            )
        for task in self.tasks():
            self._check_shared_teacher(task)

    def _check_shared_teacher(self, task: "Task") -> None:
        """Raise ValueError if variants of a graph have different teachers: all share the row of one."""
        first = self.config(replace(task, variant=next(iter(self.variants))))
        config = self.config(task)
        # Sections of students do not matter, nor does inflate, which widens students.
        plain = {item.name for item in fields(Config) if not isinstance(getattr(config, item.name), Section)}
        read = {*plain, *first.teacher_sections, *config.teacher_sections} - {"inflate"}
        if changed := sorted(name for name in read if getattr(first, name) != getattr(config, name)):
            raise ValueError(
                f"variant {task.variant!r} changes {changed[0]}, on which the teacher depends, but all variants share"
                " its row; put that into changes, in a file of its own"
            )

    @classmethod
    def from_yaml(cls, path: Path | str) -> "Experiment":
        """Read an experiment file: its keys are the attributes, and ``seeds`` may be a string such as ``0-9``.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: invalid YAML, an unknown key, or an invalid value; raised before anything runs.
        """
        content = read_yaml("experiment file", path)
        known = {item.name for item in fields(cls) if item.init}
        if not isinstance(content, dict) or not set(content) <= known:
            given = sorted(set(content) - known, key=str) if isinstance(content, dict) else type(content).__name__
            raise ValueError(f"{path} holds {given}, expected the keys {', '.join(sorted(known))}")
        lists = {key: tuple(content[key]) for key in _LISTS if isinstance(content.get(key), list)}
        try:
            if "seeds" in content:
                content["seeds"] = parse_seeds(content["seeds"])
            return cls(**{**content, **lists})
        except ValueError as error:
            raise ValueError(f"experiment file {path}: {error}") from error

    def tasks(self) -> Iterator["Task"]:
        """One task per dataset, setting, variant and seed; seeds are the outer loop, so that rows fill evenly."""
        for seed, *of_seed in itertools.product(self.seeds, self.datasets, self.settings, self.variants):
            yield Task(*of_seed, seed)

    def config(self, task: "Task") -> Config:
        """The complete configuration of a task."""
        key = (task.dataset, task.setting, task.variant)
        if key not in self._configs:
            config = preset_config(self.preset, task.dataset, task.setting, self.teacher, self.protocol)
            start = config
            for changes in (self.changes, self.dataset_changes.get(task.dataset, {}), self.variants[task.variant]):
                config = config.updated(changes)
            _check_names(start, config)
            self._configs[key] = config
        return replace(self._configs[key], seed=task.seed)


def _check_names(start: Config, changed: Config) -> None:
    """Raise ValueError if changes replaced a setting that names a row, which would then name another run."""
    for setting, key in _NAMING.items():
        named, trained = (attrgetter(setting)(config) for config in (start, changed))
        if trained != named:
            raise ValueError(
                f"changes set {setting} to {trained!r}, but the rows would be written as those of {named!r}; set the"
                f" key {key} of the experiment instead"
            )


@dataclass(frozen=True)
class Task:
    """One graph, one split, one teacher, and the students that learn from it."""

    dataset: str
    setting: str
    variant: str
    seed: int


def parse_seeds(text: str | int | list[int]) -> tuple[int, ...]:
    """Parse seeds from ``"0-9"``, ``"0,3,7-9"``, ``5`` or a list of numbers, without duplicates.

    Raises:
        ValueError: anything else, no seeds, more than :data:`MOST_SEEDS`, or a seed that is not below 2^31.
    """
    parts = [str(text)] if type(text) is int else text.split(",") if isinstance(text, str) else text
    if not isinstance(parts, list) or not all(type(part) in (int, str) for part in parts):
        raise ValueError(f"seeds is {text!r}, expected numbers and ranges such as 0-9 or 0,3,7-9")
    ranges = []
    for part in parts:
        found = re.fullmatch(r"\s*(\d{1,10})(?:-(\d{1,10}))?\s*", str(part), re.ASCII)
        if found is None:
            raise ValueError(f"seeds is {text!r}, expected numbers below 2^31 and ranges such as 0-9 or 0,3,7-9")
        ranges.append(range(int(found[1]), int(found[2] or found[1]) + 1))
    count, largest = sum(map(len, ranges)), max((seeds.stop - 1 for seeds in ranges), default=0)
    if not 0 < count <= MOST_SEEDS or largest >= 2**31:
        raise ValueError(
            f"seeds is {text!r}, which names {count:,} seeds, up to {largest}; expected 1 to {MOST_SEEDS:,}, below"
            " 2^31, such as 0-9"
        )
    return tuple(dict.fromkeys(seed for seeds in ranges for seed in seeds))
