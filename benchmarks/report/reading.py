"""Reading results back: rows by what they are of."""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Key(NamedTuple):
    """What a figure is of. Two runs that agree in it can be compared."""

    operator: str
    shape: str
    dtype: str
    routing: str
    implementation: str
    metric: str
    device: str


def read(paths: Iterable[Path]) -> dict[Key, float]:
    """The median of every row; of a row that is there twice the last, which is the newest."""
    medians = {}
    for path in paths:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                medians[Key(*(row[name] for name in Key._fields))] = float(row["median"])
    return medians
