"""The search space. A *point* is one complete choice, a dictionary from names to values.

``configs/auto.yaml`` lists teachers and, for each method, the most important settings. Every list is extended by the
value of the configuration that the search starts from and by the default, so both are points as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any

from rbm.config import Config, flat, nested
from rbm.config.presets import features_only as without_encodings
from rbm.config.presets import preset_config, read_own, teacher_settings
from rbm.distillation.registry import METHODS, check_teacher_of
from rbm.teachers import TEACHERS

Point = dict[str, Any]
GIVEN, DEFAULTS = "given", "defaults"
MODULE = "module"
# Name -> (random walks, label propagation), the switches of the section ``encoding``.
ENCODINGS = {"none": (False, False), "walks": (True, False), "labels": (False, True), "both": (True, True)}
# Settings that identify the run and do not affect how it learns.
_OF_THE_RUN = (
    *("dataset", "root", "protocol", "evaluate_on", "sparse_features", "undirected"),
    *("setting", "preset", "precision", "seed", "inflate"),
)
_OF_A_TEACHER = ("teacher", "attention")


@dataclass(frozen=True)
class Space:
    """The space of one search.

    Attributes:
        given: the configuration that the search starts from: a preset or the user's own.
        methods: methods from ``rbm.distillation.registry.METHODS``.
        teacher: name of the teacher of all trials (:data:`MODULE` for a trained module), or None to search for it.
        features_only: students have no encodings, and encodings are not searched. ``given`` must not have any either.
        run: methods that the run trains after the search. Only teachers that these and ``methods`` support are
            searched, besides the given one.
    """

    given: Config
    methods: tuple[str, ...]
    teacher: str | None = None
    features_only: bool = False
    run: tuple[str, ...] = ()

    @cached_property
    def bases(self) -> dict[str, Config]:
        """Configurations that points start from: the given one, and the defaults if they differ from it."""
        defaults = Config().updated(teacher_settings(self.given.teacher.name))
        defaults = replace(defaults, **{name: getattr(self.given, name) for name in _OF_THE_RUN})
        defaults = defaults.updated({"teacher": {"name": self.given.teacher.name}}).updated(nested(self._own))
        if self.features_only:
            defaults = without_encodings(defaults)
        return {GIVEN: self.given} | ({} if defaults == self.given else {DEFAULTS: defaults})

    @cached_property
    def teachers(self) -> tuple[str, ...]:
        """Teachers to choose from, the given one first."""
        if self.teacher is not None:
            return (self.teacher,)
        others = [
            name for name in read_own("auto.yaml")["teachers"] if self._has_settings(name) and self._is_supported(name)
        ]
        return tuple(dict.fromkeys([self.given.teacher.name, *others]))

    @cached_property
    def encodings(self) -> tuple[str, ...]:
        """Names from :data:`ENCODINGS` to choose from, the given one first."""
        others = () if self.features_only else ENCODINGS
        return tuple(dict.fromkeys([encoding_of(self.given), *others]))

    @cached_property
    def settings(self) -> dict[str, dict[str, tuple[Any, ...]]]:
        """Method -> setting -> values, the value of the given configuration first."""
        found = {}
        for method in self.methods:
            lists = read_own("auto.yaml")["settings"].get(method, {})  # none for methods of plug-ins
            found[method] = {
                name: tuple(dict.fromkeys([*(_value(base, name) for base in self.bases.values()), *values]))
                for name, values in lists.items()
            }
        return found

    def draw(self, choose: Callable[[str, tuple[Any, ...]], Any]) -> Point:
        """A point with values from ``choose(name, choices)``, which is not called for a single choice."""

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
        """Points that are tried after :meth:`starts`, before the sampler proposes any, with the first method:
        alternately another encoding and another teacher, everything else as given. The teacher ``mlp``, which uses no
        edges, is tried without encodings, to measure the features alone.
        """
        first = self._as_it_is(GIVEN, self.methods[0])
        teachers = [first | {"teacher": name} for name in self.teachers[1:]]
        encodings = [first | {"encoding": name} for name in self.encodings[1:]] if "encoding" in first else []
        for point in teachers if encodings else []:
            point |= {"encoding": "none"} if point["teacher"] == "mlp" else {}
        return [point for pair in zip_longest(encodings, teachers) for point in pair if point is not None]

    def config(self, point: Point) -> Config:
        """The configuration of a point. The source of soft labels (``distill.source``) is not searched: each trial
        decides it as a run with the same settings does.

        Raises:
            ValueError: the values are not compatible.
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
        """Settings in which the given configuration differs from its preset; they are applied to the defaults too."""
        try:
            preset = flat(asdict(self._preset(self.given.teacher.name)))
        except ValueError:  # the paper has no settings for this teacher
            return {}
        own = {name: value for name, value in flat(asdict(self.given)).items() if value != preset[name]}
        return {name: value for name, value in own.items() if name not in (*_OF_THE_RUN, "teacher.name")}

    def _teacher_sections(self, start: str, name: str) -> dict[str, Any]:
        """The sections of another teacher: its preset or its defaults, with the user's changes."""
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

    def _is_supported(self, teacher: str) -> bool:
        try:
            check_teacher_of((*self.methods, *self.run), TEACHERS[teacher])
        except ValueError:
            return False
        return True


def encoding_of(config: Config) -> str:
    """The name in :data:`ENCODINGS` of a configuration's encodings."""
    switches = (config.encoding.deepwalk, config.encoding.label_propagation)
    return next(name for name, known in ENCODINGS.items() if known == switches)


def _value(config: Config, name: str) -> Any:
    return flat(asdict(config))[name]
