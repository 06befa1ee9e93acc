"""Reads results back: rows by what they describe."""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure.verdicts import FAILED


class Key(NamedTuple):
    """What a figure describes. Runs can be compared if their keys are equal."""

    operator: str
    shape: str
    dtype: str
    routing: str
    implementation: str
    metric: str
    device: str


def read(paths: Iterable[Path]) -> dict[Key, float]:
    """The median of every row. If a row occurs twice, the last one counts, because it is the newest.

    Rows of an operator that failed its tests are skipped. Files from before 2026-11-22 do not record this.
    """
    medians = {}
    for path in paths:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row.get("verified") == FAILED:
                    continue
                medians[Key(*(row[name] for name in Key._fields))] = float(row["median"])
    return medians
