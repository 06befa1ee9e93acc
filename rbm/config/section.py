"""The base class of the configuration's sections. Pydantic checks their values, and values are changed by name.

Each field declares its range. A value outside it raises ValueError with the key, the value, and what was expected.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from typing_extensions import dataclass_transform

from rbm.utils.suggestions import did_you_mean

T = TypeVar("T", bound=type)
_MOST_SHOWN = 200


def _number(value: Any) -> Any:
    # YAML 1.1 reads 1e-7 as a string. The released hyperparameters contain such strings, so they are converted.
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


Float = Annotated[float, BeforeValidator(_number)]
Positive = Annotated[Float, Field(gt=0)]
# Divides numbers of float32, in which a smaller one is zero, or its inverse infinite.
Divisor = Annotated[Float, Field(ge=1.2e-38, le=3.4e38)]
NonNegative = Annotated[Float, Field(ge=0)]
Share = Annotated[Float, Field(ge=0, le=1)]
Probability = Annotated[Float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
# Sizes of modules have upper limits: a typo or a damaged file must not use up all memory or run forever.
Layers = Annotated[int, Field(ge=1, le=1000)]
Width = Annotated[int, Field(ge=1, le=2**20)]
Experts = Annotated[int, Field(ge=1, le=2**16)]


@dataclass_transform(frozen_default=True)
def section(cls: T) -> T:
    """Make a class a frozen dataclass checked by pydantic; the first invalid value raises a one-sentence ValueError."""
    made = dataclass(frozen=True, config=ConfigDict(strict=True, allow_inf_nan=False, extra="forbid"))(cls)
    checked = made.__init__

    @wraps(checked)
    def build(self, *args, **kwargs) -> None:
        try:
            checked(self, *args, **kwargs)
        except ValidationError as error:
            raise ValueError(_sentence(made, error.errors(include_url=False)[0])) from None

    made.__init__ = build
    return made


@section
class Section:
    """A part of the configuration tree. Its values are checked when it is built."""

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise ValueError if values contradict one another; each value on its own has been checked before."""

    def require(self, name: str, fits: bool, expected: str) -> None:
        if not fits:
            raise ValueError(f"{_prefix(type(self))}{name} is {shown(getattr(self, name))}, expected {expected}")


def updated(section: Any, changes: dict[str, Any], path: str) -> Any:
    """A copy of a section with nested ``changes``; ``path`` names it in messages."""
    known = {item.name for item in fields(section)}
    values = {}
    for key, value in changes.items():
        if key not in known:
            name = str(key)[:_MOST_SHOWN]
            raise ValueError(
                f"unknown setting {path}{name}; known here: {', '.join(sorted(known))}{_hint(section, name, path)}"
            )
        current = getattr(section, key)
        if is_dataclass(current):
            if not isinstance(value, dict):
                raise ValueError(f"{path}{key} is {shown(value)}, expected a section with keys such as lr")
            value = updated(current, value, f"{path}{key}.")
        values[key] = value
    try:
        return replace(section, **values)
    except ValueError as error:
        # A section does not know the one that it is in: tokenizer.lr becomes vqgraph.tokenizer.lr.
        message, own = str(error), _prefix(type(section))
        raise ValueError(f"{path}{message.removeprefix(own)}" if message.startswith(own) else message) from None


def settings_of(section: type[Section]) -> Iterator[tuple[str, str, Any]]:
    """Name, accepted values in words, and default of each setting; a section within the section has no default."""
    for name, known in section.__pydantic_fields__.items():
        if known.default_factory is not None:
            yield name, f"a section, {known.annotation.__name__}", ""
        else:
            yield name, _accepted(known), known.default


def _accepted(known: FieldInfo) -> str:
    kind = {bool: "true or false", str: "text", int: "a whole number", float: "a number"}.get(known.annotation)
    bounds = _range(known)
    if kind is None or bounds == "a positive number":
        return bounds
    return kind if bounds == "a finite number" else f"{kind}, {bounds}"


def _hint(section: Any, name: str, path: str) -> str:
    """Which setting may have been meant: one of a section if its prefix was left out, or one with a similar name."""
    parts = {item.name: getattr(section, item.name) for item in fields(section)}
    inner = {key: {item.name for item in fields(part)} for key, part in parts.items() if is_dataclass(part)}
    outer, dot, rest = name.partition(".")
    if dot and inner.get(outer):
        return f"; write {outer}: {{{rest}: VALUE}}, as sections are nested"
    short = "".join(word[:1] for word in name.split("_"))  # lr of learning_rate
    if len(short) > 1 and short in parts:
        return f"; did you mean {path + short!r}?"
    for wanted in (name, short):
        if having := [f"{path}{key}.{wanted}" for key, names in inner.items() if wanted in names]:
            return f"; did you mean one of {', '.join(having)}?"
    # Without the path, which is the same for all and would make any two of them look alike.
    return did_you_mean(name, parts, path=path, cutoff=0.5)


def shown(value: Any) -> str:
    """A value as shown in messages, truncated if long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of thousands of digits, which YAML may read from 0xfff...
        return "a number of thousands of digits"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _prefix(section: type) -> str:
    name = section.__name__.removesuffix("Config").replace("Plus", "_plus").lower()
    return f"{name}." if name else ""


def _sentence(section: type, error: dict[str, Any]) -> str:
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    name, value = error["loc"][0], error["input"]
    if isinstance(name, int) and name < len(section.__pydantic_fields__):  # given by its position
        name = list(section.__pydantic_fields__)[name]
    if name not in section.__pydantic_fields__:
        return f"unknown setting {_prefix(section)}{name}"
    known = section.__pydantic_fields__[name]
    out_of_range = error["type"] in _OUT_OF_RANGE
    given = shown(value) if out_of_range else f"{shown(value)} ({type(value).__name__})"
    expected = _range(known) if out_of_range else _kind(known)
    if error["type"] == "finite_number" and "number" not in expected:
        expected = f"a finite number, {expected}"
    return f"{_prefix(section)}{name} is {given}, expected {expected}"


_OUT_OF_RANGE = (
    *("greater_than", "greater_than_equal", "less_than", "less_than_equal"),
    *("literal_error", "finite_number"),
)


def _kind(known: FieldInfo) -> str:
    return "str" if get_origin(known.annotation) is Literal else known.annotation.__name__


def _range(known: FieldInfo) -> str:
    """The values that a field accepts, in words: its description if it has one."""
    if known.description:
        return known.description
    if get_origin(known.annotation) is Literal:
        return f"one of {', '.join(get_args(known.annotation))}"
    bounds = {type(bound): bound for bound in known.metadata}
    if Ge in bounds and Le in bounds:
        return f"between {bounds[Ge].ge} and {bounds[Le].le}"
    words = [
        f"at least {bounds[Ge].ge}" if Ge in bounds else "",
        f"above {bounds[Gt].gt}" if Gt in bounds else "",
        f"below {bounds[Lt].lt}" if Lt in bounds else "",
        f"at most {bounds[Le].le}" if Le in bounds else "",
    ]
    bounds_text = " and ".join(filter(None, words))
    return {"above 0": "a positive number", "": "a finite number"}.get(bounds_text, bounds_text)
