"""Pytest plugin of ``gpu.sh`` for tests (``-p benchmarks.gpu.outcomes``): writes each outcome to a CSV file at once.

A line has the test's operator and part, its name, its outcome (``passed``, ``failed`` or ``skipped``) and its seconds.
A test whose process died counts as failed.
"""

import csv
from pathlib import Path

import pytest

COLUMNS = ("operator", "part", "test", "outcome", "seconds")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True, help="CSV file, one line per test")
    parser.addoption("--about", required=True, help="operator and part, separated by a slash")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # with pytest-xdist, only the main process receives all outcomes
        config.pluginmanager.register(_Outcomes(config.getoption("--outcomes"), config.getoption("--about")))


class _Outcomes:
    def __init__(self, path: Path, about: str) -> None:
        self._path, (self._operator, self._part) = path, about.split("/")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Use a test's call report, and reports of its setup and teardown that failed or were skipped."""
        if report.when != "call" and report.passed:
            return
        line = (self._operator, self._part, report.nodeid, report.outcome, round(report.duration, 3))
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerow(line)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a file that cannot be imported as one failure."""
        if report.failed:
            with self._path.open("a", newline="", encoding="utf-8") as file:
                line = (self._operator, self._part, report.nodeid, "failed", 0)
                csv.writer(file, lineterminator="\n").writerow(line)


def read(path: Path, operator: str, part: str) -> list[str]:
    """The outcomes of a part of an operator's tests: the worst outcome of each test."""
    worst: dict[str, str] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                if (line["operator"], line["part"]) == (operator, part) and worst.get(line["test"]) != "failed":
                    worst[line["test"]] = line["outcome"]
    return list(worst.values())
