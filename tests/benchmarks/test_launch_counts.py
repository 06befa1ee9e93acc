"""Launches of a layer, counted; the rows from which notes/gpu.md has them are of the code as it is."""

import csv

import pytest

pytest.importorskip("triton")

from benchmarks import test_launches
from benchmarks.measure.shapes import Shape
from benchmarks.report.medians import RESULTS


@pytest.mark.filterwarnings("ignore:.*verrid.*:UserWarning")
@pytest.mark.parametrize("rows", test_launches.COUNTED)
def test_launches_by_rows(rows, monkeypatch):
    monkeypatch.undo()  # of tests/conftest.py, which puts few rows in order
    counts = [test_launches.count_launches(Shape(rows, 256, 256), training=training) for training in (False, True)]
    assert tuple(counts) == test_launches.COUNTED[rows]


def test_the_committed_counts_are_these():
    with (RESULTS / "launches.csv").open(newline="") as file:
        lines = {(line["shape"], line["metric"]): float(line["median"]) for line in csv.DictReader(file)}
    for rows, counts in test_launches.COUNTED.items():
        shape = f"{Shape(rows, 256, 256)}"
        assert tuple(lines[shape, metric] for metric in test_launches.METRICS) == counts
