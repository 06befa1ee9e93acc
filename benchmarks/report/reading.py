"""Reading results back: rows by what they are of."""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure.verdicts import FAILED


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
    """The median of every row; of a row that is there twice the last, which is the newest.

    Rows of an operator that failed its tests are left out. Files of before 2026-11-22 do not say who passed.
    """
    medians = {}
    for path in paths:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if row.get("verified") == FAILED:
                    continue
                medians[Key(*(row[name] for name in Key._fields))] = float(row["median"])
    return medians
