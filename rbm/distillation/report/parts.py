"""The parts of a report's page: sections with charts and tables, and the formats of figures."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rbm.distillation.summary import short_count


class Cell(NamedTuple):
    """A cell of a table: what is shown, and the key to sort by. A figure that is None has no text and comes first."""

    shown: str
    key: Any

    @classmethod
    def text(cls, shown: str) -> "Cell":
        """A text."""
        return cls(shown, shown)

    @classmethod
    def number(cls, value: float | None, form: str = ",") -> "Cell":
        """A number in a format."""
        return cls("", -1) if value is None else cls(format(value, form), value)

    @classmethod
    def share(cls, value: float | None, digits: int = 2) -> "Cell":
        """A share in [0, 1], shown in per cent."""
        return cls("", -1) if value is None else cls(f"{100 * value:.{digits}f}", value)

    @classmethod
    def interval(cls, low: float, high: float) -> "Cell":
        """An interval in per cent."""
        return cls(f"{low:.1f} to {high:.1f}", low)

    @classmethod
    def parameters(cls, count: int | None) -> "Cell":
        """A number of parameters."""
        return cls(short_count(count, "unknown"), count or -1)


@dataclass
class Chart:
    """A picture of a section: heading, ``<svg>``, and a sentence that describes it."""

    title: str
    svg: str
    caption: str


@dataclass
class Grid:
    """A table of a section: columns (heading, whether it is a number), rows of cells, and a note."""

    columns: list[tuple[str, bool]]
    rows: list[list[Cell]]
    note: str = ""
    sortable: bool = False
    strong: int | None = None  # index of the emphasised row


@dataclass
class Section:
    """A part of the page."""

    name: str
    title: str
    charts: list[Chart] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)
    text: str = ""
    code: str = ""


def percent(value: float) -> str:
    """Text of a figure that is already in per cent."""
    return f"{value:.1f} %"
