"""The space of a search: settings by name, each with choices or a range.

A space is written in YAML, with one line per setting::

    rbm.dropout: [0.0, 0.3, 0.6]                     # one of these
    rbm.num_experts: {low: 4, high: 8}               # whole numbers, because the setting is one
    rbm.lr: {low: 0.001, high: 0.02, log: true}      # uniform on a logarithmic scale
"""

from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rbm.config import ATTENTION_TEACHERS, Config, nested
from rbm.config.presets import read_own
from rbm.distillation.registry import METHODS, learns_soft_labels
from rbm.teachers import check_teacher
from rbm.teachers.neighbor_sampling import check_sampler
from rbm.utils.files import read_yaml
from rbm.utils.studies import import_optuna

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Space = dict[str, "BaseDistribution"]

_RANGE = {"low", "high", "log"}


def read_space(path: Path | str) -> dict[str, Any]:
    """Read the lines of a space from a YAML file; :func:`build_space` checks them.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: invalid YAML, or not a mapping of settings by name.
    """
    content = read_yaml("search space", path)
    if not isinstance(content, dict):
        raise ValueError(
            f"search space {path} holds {type(content).__name__}, expected a line a setting, such as"
            " rbm.lr: [0.01, 0.001]"
        )
    return content


def default_space(method: str) -> dict[str, Any]:
    """The lines of ``configs/spaces.yaml`` for a method.

    Raises:
        ValueError: there are none, as for methods of plugins.
    """
    spaces = read_own("spaces.yaml")
    if method not in spaces:
        raise ValueError(
            f"method {method!r} has no search space of its own; describe one in a file, and pass it by --space"
        )
    return spaces[method]


def build_space(lines: dict[str, Any], start: Config, method: str) -> Space:
    """Optuna's distributions by setting, with the starting point among them.

    If the starting point's value is not in the space, it is added to the choices, or the range is extended to it. A
    value may contradict the starting point, such as a ``top_k`` above its number of experts, if it fits a value that
    the space has for another setting of its section.

    Args:
        lines: as returned by :func:`read_space`.
        start: the configuration that the search starts from.
        method: a name in ``rbm.distillation.registry.METHODS``.

    Raises:
        ValueError: an unknown setting, or one that the method does not read; invalid values; or Optuna is not
            installed.
    """
    if not lines:
        raise ValueError("search space: got no setting at all, expected at least one")
    return {name: _distribution(name, line, start, method, lines) for name, line in lines.items()}


def with_values(config: Config, values: dict[str, Any]) -> Config:
    """A copy of ``config`` with settings changed by name, for example ``{"rbm.lr": 0.01}``."""
    return config.updated(nested(values))


def value_of(config: Config, name: str) -> Any:
    """The value of a setting by its name.

    Raises:
        ValueError: the name is unknown, or that of a section.
    """
    value: Any = config
    for part in str(name).split("."):
        if not is_dataclass(value) or part not in {item.name for item in fields(value)}:
            raise ValueError(f"search space: unknown setting {name!r}, expected a name such as rbm.lr")
        value = getattr(value, part)
    if is_dataclass(value):
        raise ValueError(f"search space: {name} is a section, expected one of its settings, such as rbm.lr")
    return value


def _distribution(name: str, line: Any, start: Config, method: str, lines: dict[str, Any]) -> "BaseDistribution":
    known = value_of(start, name)
    _check_read(name, start, method, lines)
    if isinstance(line, list) and line:
        values = [_accepted(name, value, start, lines) for value in line]
        _check_installed(name, values, start)
        return import_optuna().distributions.CategoricalDistribution(tuple(dict.fromkeys([*values, known])))
    if not isinstance(line, dict) or not {"low", "high"} <= set(line) <= _RANGE:
        raise ValueError(
            f"search space: {name} is {line!r}, expected a list of values, or low, high and perhaps log: true"
        )
    if isinstance(known, (bool, str)):
        raise ValueError(f"search space: {name} holds {type(known).__name__}, expected a list of values, not a range")
    low, high = (_accepted(name, line[end], start, lines) for end in ("low", "high"))
    log = line.get("log", False)
    if low > high or not isinstance(log, bool):
        raise ValueError(f"search space: {name} is {line!r}, expected low not above high, and log true or false")
    low, high = min(low, known), max(high, known)
    _check_installed(name, [high], start)
    if log and low <= 0:
        raise ValueError(
            f"search space: {name} reaches from {low} (it starts at {known}), which a range with log: true cannot hold;"
            " expected positive numbers: let it start from one, or leave out log"
        )
    distributions = import_optuna().distributions
    kind = distributions.IntDistribution if isinstance(known, int) else distributions.FloatDistribution
    return kind(low, high, log=log)


def _accepted(name: str, value: Any, start: Config, lines: dict[str, Any]) -> Any:
    """The value as stored in the configuration; strings are converted to numbers if needed."""
    try:
        if name == "teacher.name" and value != "logits":
            check_teacher(value)
        return value_of(with_values(start, {name: value}), name)
    except ValueError as error:
        section = name.rpartition(".")[0]
        beside = [other for other in lines if other != name and str(other).rpartition(".")[0] == section]
        for other in beside:
            for also in _values(lines[other]):
                with suppress(ValueError):
                    return value_of(with_values(start, {name: value, other: also}), name)
        raise ValueError(f"search space: {error}") from error


def _check_installed(name: str, values: list[Any], start: Config) -> None:
    """Reject batches of sampled neighbourhoods without the library that samples: each trial with them would fail."""
    if name == "sampling.batch_size" and max(values) > 0:
        check_sampler(replace(start.sampling, batch_size=max(values)))


def _values(line: Any) -> list[Any]:
    """The values of a list, or the ends of a range."""
    if isinstance(line, dict):
        return [line[end] for end in ("low", "high") if end in line]
    return line if isinstance(line, list) else []


def _check_read(name: str, start: Config, method: str, lines: dict[str, Any]) -> None:
    """Reject settings outside the sections that the method reads: a search over them would have no effect."""
    read = ("inflate", *METHODS[method].sections)
    if "teacher" in read:
        teachers = [start.teacher.name, *_values(lines.get("teacher.name", []))]
        read += ("attention",) if any(teacher in ATTENTION_TEACHERS for teacher in teachers) else ()
        read += ("sampling",) if start.sampling.batch_size > 0 or "sampling.batch_size" in lines else ()
    if name == "distill.source" and learns_soft_labels(method):
        return
    if name.split(".")[0] not in read:
        raise ValueError(
            f"search space: {name} does not change what the method {method} learns; expected settings of"
            f" {', '.join(read)}"
        )
