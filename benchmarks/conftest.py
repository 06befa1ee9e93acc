"""Options ``--results FILE`` (``.benchmarks/results.csv``) and ``--seconds S``, and a table of ratios at the end."""

from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import pytest
import torch

from benchmarks.measure.harness import Results
from benchmarks.measure.shapes import MOST, Shape, Workload, for_this_machine
from benchmarks.measure.suite import Ceilings, Suite
from benchmarks.peers import missing_libraries

# What a smoke run (``--seconds`` below 0.5) still multiplies, forward, and how many sparse rows.
MULTIPLICATIONS, SPARSE_ROWS = 10**9, 4096


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption("--results", type=Path, default=Path(".benchmarks/results.csv"), help="CSV file that rows go to")
    parser.addoption("--seconds", type=float, default=0.5, help="how long variants are compared with one another")
    choices = ("all", "reference", "others")
    parser.addoption("--shapes", choices=choices, default="all", help="the first shape alone, or all but it")
    if not pluginmanager.hasplugin("benchmark"):
        parser.addoption("--benchmark-only", action="store_true", help="accepted; pytest-benchmark is not installed")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("benchmark"):
        config.pluginmanager.register(_WithoutPytestBenchmark())
    # Its table would list one implementation of each workload, the one at the end lists all: --benchmark-verbose asks
    # for it, and --benchmark-json has it anyway.
    config.option.benchmark_quiet = True


class _WithoutPytestBenchmark:
    """Its fixture, as far as suites use it: figures are the harness's own."""

    class Benchmark:
        def pedantic(self, target: Callable, *_, **__) -> object:
            return target()

    @pytest.fixture
    def benchmark(self) -> Benchmark:
        return self.Benchmark()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``--shapes``; and a smoke run leaves out large workloads and other numbers of experts than the usual one."""
    wanted, is_smoke = config.getoption("--shapes"), config.getoption("--seconds") < 0.5
    first = for_this_machine(MOST)[0]

    def is_kept(item: pytest.Item) -> bool:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        match parameters.get("workload", parameters.get("shape")):
            case Workload(shape=shape):
                is_small = shape.multiplications <= MULTIPLICATIONS and shape.experts == Shape.experts
                return (is_small or not is_smoke) and wanted in ("all", "reference" if shape == first else "others")
            case Shape(rows=rows):
                return rows <= SPARSE_ROWS or not is_smoke
        return wanted != "others"

    config.hook.pytest_deselected(items=[item for item in items if not is_kept(item)])
    items[:] = [item for item in items if is_kept(item)]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def seconds(request: pytest.FixtureRequest) -> float:
    """How long variants are compared with one another; a smoke run asks for next to nothing."""
    return request.config.getoption("--seconds")


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest) -> Results:
    written = Results(request.config.getoption("--results"))
    request.config.stash[_WRITTEN] = written
    return written


@pytest.fixture(scope="session")
def ceilings(results: Results, seconds: float) -> Ceilings:
    return Ceilings(results, seconds)


@pytest.fixture
def suite(results: Results, ceilings: Ceilings, seconds: float, benchmark) -> Iterator[Callable[..., Suite]]:
    """Make the :class:`~benchmarks.measure.suite.Suite` of a workload; a wrong answer fails the test."""
    made: list[Suite] = []

    def make(operator: str, workload: Workload) -> Suite:
        made.append(Suite(operator, workload, results, ceilings, seconds, benchmark))
        return made[-1]

    torch.compiler.reset()  # what other workloads compiled would make this one's shapes dynamic
    yield make
    for one in made:
        one.finish()


_WRITTEN: pytest.StashKey[Results] = pytest.StashKey()


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """For every workload what ours took, and how many times as long each other implementation did."""
    written = config.stash.get(_WRITTEN, None)
    if written is None or not written.rows:
        return
    terminalreporter.section(f"figures, written to {written.path}")

    def about(row: dict) -> tuple[str, ...]:
        return tuple(row[name] for name in ("operator", "shape", "dtype", "routing", "metric"))

    for key, group in groupby(sorted(written.rows, key=about), key=about):
        values = {row["implementation"]: float(row["median"]) for row in group}
        ours = values.pop("rbm", None) if key[-1].endswith("seconds") else None
        if ours is not None:
            told = [f"rbm {ours:.3g} s", *(f"{name} {value / ours:.2f} x" for name, value in values.items())]
        else:
            told = [f"{name} {value:.3g}" for name, value in values.items()]
        terminalreporter.line(f"{' '.join(key)}: {', '.join(told)}")
    if missing := missing_libraries():
        terminalreporter.line(f"not installed, so not measured: {', '.join(missing)}")
