"""The space of a search. A *point* is one choice of everything: a name and a value for each part of it.

``configs/auto.yaml`` lists teachers, and for each method the settings that decide most. Every list is completed by the
values of the configuration that the search starts from and by the defaults, so that both are points themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib import resources
from itertools import zip_longest
from typing import Any

import yaml

from rbm.config import Config, flat, nested
from rbm.config.presets import features_only as without_encodings
from rbm.config.presets import preset_config, teacher_settings
from rbm.distillation.registry import METHODS

Point = dict[str, Any]
GIVEN, DEFAULTS = "given", "defaults"
MODULE = "module"
# Name -> (random walks, label propagation), the switches of the section ``encoding``.
ENCODINGS = {"none": (False, False), "walks": (True, False), "labels": (False, True), "both": (True, True)}
# Settings that say which run it is, not how it learns.
_OF_THE_RUN = ("dataset", "root", "protocol", "evaluate_on", "sparse_features", "setting", "preset", "seed", "inflate")
_OF_A_TEACHER = ("teacher", "attention")


@dataclass(frozen=True)
class Space:
    """Everything that one search may choose.

    Attributes:
        given: the configuration that it starts from: a preset's, or a user's own.
        methods: students, of ``rbm.distillation.registry.METHODS``.
        teacher: the one that all trials have, by its name (:data:`MODULE` for a trained module), or None where it is to
            be chosen.
        features_only: leaves encodings out of the choice: no student has any. ``given`` then has none either.
    """

    given: Config
    methods: tuple[str, ...]
    teacher: str | None = None
    features_only: bool = False

    @cached_property
    def bases(self) -> dict[str, Config]:
        """Where points start: the given configuration, and the defaults where they differ from it."""
        defaults = Config().updated(teacher_settings(self.given.teacher.name))
        defaults = replace(defaults, **{name: getattr(self.given, name) for name in _OF_THE_RUN})
        defaults = defaults.updated({"teacher": {"name": self.given.teacher.name}}).updated(nested(self._own))
        if self.features_only:
            defaults = without_encodings(defaults)
        return {GIVEN: self.given} | ({} if defaults == self.given else {DEFAULTS: defaults})

    @cached_property
    def teachers(self) -> tuple[str, ...]:
        """Those that may be chosen; the given one first."""
        if self.teacher is not None:
            return (self.teacher,)
        return tuple(dict.fromkeys([self.given.teacher.name, *filter(self._has_settings, _choices()["teachers"])]))

    @cached_property
    def encodings(self) -> tuple[str, ...]:
        """Names of :data:`ENCODINGS`; the given ones first."""
        others = () if self.features_only else ENCODINGS
        return tuple(dict.fromkeys([encoding_of(self.given), *others]))

    @cached_property
    def settings(self) -> dict[str, dict[str, tuple[Any, ...]]]:
        """Method -> setting -> values; first that of the given configuration."""
        found = {}
        for method in self.methods:
            lists = _choices()["settings"].get(method, {})  # methods of plug-ins have none
            found[method] = {
                name: tuple(dict.fromkeys([*(_value(base, name) for base in self.bases.values()), *values]))
                for name, values in lists.items()
            }
        return found

    def draw(self, choose: Callable[[str, tuple[Any, ...]], Any]) -> Point:
        """A point, each part of it chosen by ``choose(name, choices)``; parts without a choice are not asked for."""

        def chosen(name: str, choices: Sequence[Any]) -> Any:
            return choices[0] if len(choices) == 1 else choose(name, tuple(choices))

        point = {"start": chosen("start", tuple(self.bases)), "method": chosen("method", self.methods)}
        point["teacher"] = chosen("teacher", self.teachers)
        if "encoding" in METHODS[point["method"]].sections:
            point["encoding"] = chosen("encoding", self.encodings)
        return point | {name: chosen(name, values) for name, values in self.settings[point["method"]].items()}

    def starts(self) -> list[Point]:
        """The given configuration and the defaults, each with every method."""
        return [self._as_it_is(start, method) for start in self.bases for method in self.methods]

    def openings(self) -> list[Point]:
        """What is tried before the sampler proposes, with the first method: other encodings and other teachers in turn,
        everything else as given. The MLP, which sees no edge, comes without encodings: what do features alone tell?
        """
        first = self._as_it_is(GIVEN, self.methods[0])
        teachers = [first | {"teacher": name} for name in self.teachers[1:]]
        encodings = [first | {"encoding": name} for name in self.encodings[1:]] if "encoding" in first else []
        for point in teachers if encodings else []:
            point |= {"encoding": "none"} if point["teacher"] == "mlp" else {}
        return [point for pair in zip_longest(encodings, teachers) for point in pair if point is not None]

    def config(self, point: Point) -> Config:
        """The configuration of a point. Whose soft labels students learn (``distill.source``) is not searched: a point
        is judged as a run with its settings would go.

        Raises:
            ValueError: values that do not go together.
        """
        base = self.bases[point["start"]]
        if point["teacher"] not in (base.teacher.name, MODULE):
            base = base.updated(self._teacher_sections(point["start"], point["teacher"]))
        if "encoding" in point:
            walks, labels = ENCODINGS[point["encoding"]]
            base = base.updated({"encoding": {"deepwalk": walks, "label_propagation": labels}})
        return base.updated(nested({name: point[name] for name in self.settings[point["method"]]}))

    def _as_it_is(self, start: str, method: str) -> Point:
        base = self.bases[start]
        point = {"start": start, "method": method, "teacher": self.teacher or base.teacher.name}
        if "encoding" in METHODS[method].sections:
            point["encoding"] = encoding_of(base)
        return point | {name: _value(base, name) for name in self.settings[method]}

    @cached_property
    def _own(self) -> dict[str, Any]:
        """What a user changed of the preset that the configuration started from; the defaults are changed so too."""
        try:
            preset = flat(asdict(self._preset(self.given.teacher.name)))
        except ValueError:  # the paper has no settings for it
            return {}
        own = {name: value for name, value in flat(asdict(self.given)).items() if value != preset[name]}
        return {name: value for name, value in own.items() if name not in (*_OF_THE_RUN, "teacher.name")}

    def _teacher_sections(self, start: str, name: str) -> dict[str, Any]:
        """The sections of another teacher: its preset's or its defaults, and what the user changed of them."""
        config = self._preset(name) if start == GIVEN else Config().updated(teacher_settings(name))
        own = {key: value for key, value in self._own.items() if key.split(".")[0] in _OF_A_TEACHER}
        config = config.updated(nested(own)).updated({"teacher": {"name": name}})
        return {section: asdict(getattr(config, section)) for section in _OF_A_TEACHER}

    def _preset(self, teacher: str) -> Config:
        given = self.given
        return preset_config(given.preset, given.dataset, given.setting, teacher, given.protocol)

    def _has_settings(self, teacher: str) -> bool:
        try:
            self._preset(teacher)
        except ValueError:
            return False
        return True


def encoding_of(config: Config) -> str:
    """The name of its encodings in :data:`ENCODINGS`."""
    switches = (config.encoding.deepwalk, config.encoding.label_propagation)
    return next(name for name, known in ENCODINGS.items() if known == switches)


def _value(config: Config, name: str) -> Any:
    return flat(asdict(config))[name]


def _choices() -> dict[str, Any]:
    return yaml.safe_load((resources.files("rbm") / "config" / "configs" / "auto.yaml").read_text())
