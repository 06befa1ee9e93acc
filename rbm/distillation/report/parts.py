"""The parts of a report's page: sections with charts and tables."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Chart:
    """A picture of a section: heading, ``<svg>``, and a sentence that describes it."""

    title: str
    svg: str
    caption: str


@dataclass
class Grid:
    """A table of a section: columns (heading, whether it is a number), rows of (shown, sort key) cells, and a note."""

    columns: list[tuple[str, bool]]
    rows: list[list[tuple[str, Any]]]
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
