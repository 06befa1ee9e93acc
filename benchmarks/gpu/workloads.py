"""Pytest plugin of ``gpu.sh`` for suites (``-p benchmarks.gpu.workloads``): skips what is already measured.

A completely measured workload is a row ``suite`` of the results. A workload that was started in this run is a line of
``--begun FILE``. It is not tried again, even if it failed or crashed its process.
"""

from pathlib import Path

import pytest

from benchmarks.gpu.state import WORKLOAD, State
from benchmarks.measure.harness import Results, machine
from benchmarks.measure.shapes import PRECISIONS, REFERENCE, Workload, workload_of

METRIC = "seconds of the workload"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--begun", type=Path, required=True, help="file of the workloads that this run has started")
    parser.addoption("--part", choices=("first", "all"), default="all", help="first: the reference shape in bfloat16")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Workloads(config))


class _Workloads:
    def __init__(self, config: pytest.Config) -> None:
        self._results, self._begun = config.getoption("--results"), config.getoption("--begun")
        self._is_first = config.getoption("--part") == "first"
        self._seconds: dict[str, float] = {}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Drop workloads that were measured or started, and those of other parts."""
        commit = machine()["commit"]
        done = {row["shape"] for row in State(self._results).rows() if _is_workload(row, commit)}
        begun = set(self._begun.read_text(encoding="utf-8").splitlines()) if self._begun.exists() else set()
        left_out = [i for i in items if i.nodeid in done | begun or (self._is_first and not _is_reference(i))]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        with self._begun.open("a", encoding="utf-8") as file:
            file.write(f"{item.nodeid}\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A workload is done after its teardown, which raises if a result was wrong."""
        if report.when == "call" and report.passed:
            self._seconds[report.nodeid] = report.duration
        if report.when == "teardown" and report.passed and report.nodeid in self._seconds:
            about = {"dtype": "", "routing": ""}
            seconds = round(self._seconds[report.nodeid], 3)
            Results(self._results).add(WORKLOAD, report.nodeid, "gpu.sh", METRIC, seconds, **about)


def _is_workload(row: dict[str, str], commit: str) -> bool:
    return row["operator"] == WORKLOAD and row["commit"] == commit


def _is_reference(item: pytest.Item) -> bool:
    """The reference shape in the first precision; ordering alone uses int32."""
    workload = workload_of(item)
    if not isinstance(workload, Workload):
        return False
    about = (workload.shape, workload.routing)
    return about == (REFERENCE, "uniform") and workload.precision in (PRECISIONS[0], "int32")
