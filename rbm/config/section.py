"""What every part of the configuration shares: its values are typed, checked when it is built, and changed by name."""

from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, get_type_hints


@dataclass(frozen=True)
class Section:
    """A part of the tree. Values are checked when it is built, with messages that name the key."""

    def __post_init__(self) -> None:
        hints = _hints(type(self))
        for item in fields(self):
            value = getattr(self, item.name)
            if is_dataclass(hints[item.name]):
                continue
            object.__setattr__(self, item.name, _typed(f"{self.section}{item.name}", value, hints[item.name]))
        self.validate()

    @property
    def section(self) -> str:
        name = type(self).__name__.removesuffix("Config").lower()
        return f"{name}." if name else ""

    def validate(self) -> None:
        """Raise ValueError where a value is out of range."""

    def require(self, name: str, fits: bool, expected: str) -> None:
        if not fits:
            raise ValueError(f"{self.section}{name} is {getattr(self, name)!r}, expected {expected}")


@cache
def _hints(section: type) -> dict[str, Any]:
    return get_type_hints(section)


def updated(section: Any, changes: dict[str, Any], path: str) -> Any:
    known = {item.name for item in fields(section)}
    values = {}
    for key, value in changes.items():
        if key not in known:
            raise ValueError(f"unknown setting {path}{key}; known here: {', '.join(sorted(known))}")
        current = getattr(section, key)
        if is_dataclass(current):
            if not isinstance(value, dict):
                raise ValueError(f"{path}{key} is {value!r}, expected a section with keys such as lr")
            value = updated(current, value, f"{path}{key}.")
        values[key] = value
    return replace(section, **values)


def _typed(name: str, value: Any, kind: type) -> Any:
    # YAML 1.1 reads 1e-7 as text, and so did the released hyperparameters; a number that is meant is taken as one.
    if kind is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ValueError(f"{name} is {value!r} ({type(value).__name__}), expected {kind.__name__}")
    return value
