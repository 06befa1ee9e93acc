"""Options of the suites, selection of workloads, pace of a run, and a table of ratios at the end.

``--results FILE`` (``.benchmarks/results.csv``), ``--seconds S``, ``--shapes``, ``--precisions P,...``, ``--budget S``,
``--keep-memory``.
"""

import math
import os
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import pytest
import torch

from benchmarks.measure.allocator import REMARK, keep_freed_memory
from benchmarks.measure.device import HERE
from benchmarks.measure.harness import Results
from benchmarks.measure.pace import SMOKE, Pace, minutes
from benchmarks.measure.precision import in_hardware, slowness
from benchmarks.measure.shapes import MOST, PRECISIONS, Shape, Workload, for_this_machine, workload_of
from benchmarks.measure.suite import Ceilings, Suite
from benchmarks.peers import missing_libraries

# Limits of a smoke run (``--seconds`` below 0.5): multiplications per forward pass, and sparse rows.
MULTIPLICATIONS, SPARSE_ROWS = 10**9, 4096
_WRITTEN: pytest.StashKey[Results] = pytest.StashKey()
_PACE: pytest.StashKey[Pace] = pytest.StashKey()
# The order of suites. Those that are not listed come before the last ones.
FIRST = ("expert_matmul", "layer", "cosine_topk", "memory_update", "expert_order", "routed_matmul", "student")
LAST = ("distillation_epoch", "cold_start")
ORDER = (*FIRST, *LAST)
# Seconds that a run may take on a CPU. On a borrowed GPU, the caller limits the time.
BUDGET = math.inf if HERE.is_gpu else 600.0


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption("--results", type=Path, default=Path(".benchmarks/results.csv"), help="CSV file for the rows")
    parser.addoption("--seconds", type=float, default=0.5, help="how long variants are compared with one another")
    choices = ("all", "reference", "others")
    parser.addoption("--shapes", choices=choices, default="all", help="only the first shape, or all others")
    help_text = "for example float32,bfloat16; by default those that the processor has in hardware"
    parser.addoption("--precisions", type=_precisions, default=None, help=help_text)
    help_text = "seconds in total: if a run is behind, later comparisons get fewer rounds, or none; 0 for no limit"
    parser.addoption("--budget", type=float, default=BUDGET, help=help_text)
    help_text = "reuse freed memory, so that no page faults are timed; recorded with the device"
    parser.addoption("--keep-memory", action="store_true", help=help_text)
    if not pluginmanager.hasplugin("benchmark"):
        parser.addoption("--benchmark-only", action="store_true", help="accepted; pytest-benchmark is not installed")


def _precisions(text: str) -> tuple[str, ...]:
    wanted = tuple(text.split(","))
    if unknown := [precision for precision in wanted if precision not in PRECISIONS]:
        message = f"{', '.join(unknown)} is not measured here; there are {', '.join(PRECISIONS)}"
        raise ArgumentTypeError(message)
    return wanted


def _left_out() -> list[str]:
    """The precisions that a run skips unless they are requested."""
    return [] if HERE.is_gpu else [precision for precision in PRECISIONS if not in_hardware(precision)]


def _about_precisions(config: pytest.Config) -> str:
    if config.getoption("--precisions") is not None:
        return f"precisions: {', '.join(config.getoption('--precisions'))}, as asked for"
    reasons = [
        f"; {precision} left out: a product takes {slowness(precision):.0f} times as long as in float32 on this"
        f" processor (--precisions {','.join(PRECISIONS)} measures it)"
        for precision in _left_out()
    ]
    return f"precisions: {', '.join(p for p in PRECISIONS if p not in _left_out())}{''.join(reasons)}"


def pytest_report_header(config: pytest.Config) -> str:
    return _about_precisions(config)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("benchmark"):
        config.pluginmanager.register(_WithoutPytestBenchmark())
    if config.getoption("--keep-memory"):
        keep_freed_memory()
    config.stash[_PACE] = Pace(math.inf, [])
    config.pluginmanager.register(_Progress(config))
    # Its table would list one implementation per workload; the table at the end lists all. --benchmark-verbose
    # prints it, and --benchmark-json contains it anyway.
    config.option.benchmark_quiet = True


class _WithoutPytestBenchmark:
    """The part of pytest-benchmark's fixture that suites use. The figures come from the harness."""

    class Benchmark:
        def pedantic(self, target: Callable[[], object], *, rounds: int = 1) -> object:
            return target()

    @pytest.fixture
    def benchmark(self) -> Benchmark:
        return self.Benchmark()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``--shapes`` and ``--precisions``. A smoke run also skips large workloads and other numbers of experts."""
    wanted, is_smoke = config.getoption("--shapes"), config.getoption("--seconds") < SMOKE
    first, requested = for_this_machine(MOST)[0], config.getoption("--precisions")
    left_out = _left_out() if requested is None else [p for p in PRECISIONS if p not in requested]

    def is_kept(item: pytest.Item) -> bool:
        match workload_of(item):
            case Workload(precision=precision) if precision in left_out:
                return False
            case Workload(shape=shape):
                is_small = shape.multiplications <= MULTIPLICATIONS and shape.experts == Shape.experts
                return (is_small or not is_smoke) and wanted in ("all", "reference" if shape == first else "others")
            case Shape(rows=rows):
                return rows <= SPARSE_ROWS or not is_smoke
        return wanted != "others"

    config.hook.pytest_deselected(items=[item for item in items if not is_kept(item)])
    items[:] = sorted((item for item in items if is_kept(item)), key=_place)
    budget = math.inf if is_smoke else config.getoption("--budget") or math.inf
    config.stash[_PACE] = Pace(budget, [_weight(item) for item in items])


def _suite(item: pytest.Item) -> str:
    """Name of the suite, such as ``expert_matmul``."""
    return item.path.stem.removeprefix("test_")


def _place(item: pytest.Item) -> float:
    """The most important suites first: if time is short, the last ones are skipped."""
    return ORDER.index(_suite(item)) if _suite(item) in ORDER else len(FIRST) - 0.5


def _weight(item: pytest.Item) -> float:
    """Approximate seconds of a test, for the pace of a run: two cores, in float32."""
    workload = workload_of(item)
    shape = workload.shape if isinstance(workload, Workload) else workload
    if _suite(item) in ("expert_matmul", "layer", "ffn") and isinstance(shape, Shape):
        is_first = shape == for_this_machine(MOST)[0] and workload.routing == "uniform"
        return 3 + shape.multiplications / 1e8 + (20 if is_first else 0)
    return {"cold_start": 8.0, "distillation_epoch": 15.0}.get(_suite(item), 2.0)


class _Progress:
    """Counts finished tests for the pace. Prints a line before each test, unless with ``-q`` or in a smoke run.

    Once the budget is spent, the remaining tests are skipped, with that reason.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._shows_progress = config.getoption("--seconds") >= SMOKE and config.option.verbose >= 0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Print the workload, its number, the elapsed time and the estimated remaining time."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if self._shows_progress and reporter is not None:
            pace = self._config.stash[_PACE]
            times = f"{minutes(pace.elapsed)}, about {minutes(pace.left)} left"
            reporter.ensure_newline()
            reporter.line(f"[{pace.place}, {times}] {nodeid.rpartition('/')[2]}")

    def pytest_runtest_setup(self) -> None:
        """Skip the test if the budget has no time for it."""
        if self._config.stash[_PACE].is_over:
            pytest.skip("left out for time: --budget is spent; a larger one, or 0 for none, measures it")

    def pytest_runtest_logfinish(self) -> None:
        """Count a finished test."""
        self._config.stash[_PACE].next()


@pytest.fixture(scope="session", autouse=True)
def _own_compile_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let this run compile the compiled peers itself, unless ``TORCHINDUCTOR_CACHE_DIR`` is set.

    Runs that shared a cache with other runs (interrupted ones, or with other vector settings) ended with a corrupted
    heap. With a separate cache they did not. The cause was not found.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def seconds(request: pytest.FixtureRequest) -> float:
    """How long variants are compared with one another; almost no time in a smoke run."""
    return request.config.getoption("--seconds")


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest) -> Results:
    remark = REMARK if request.config.getoption("--keep-memory") else ""
    written = Results(request.config.getoption("--results"), remark)
    request.config.stash[_WRITTEN] = written
    return written


@pytest.fixture(scope="session")
def ceilings(results: Results, seconds: float) -> Ceilings:
    return Ceilings(results, seconds)


@pytest.fixture
def pace(pytestconfig: pytest.Config) -> Pace:
    """How much of the run's time is left."""
    return pytestconfig.stash[_PACE]


@pytest.fixture
def suite(
    results: Results, ceilings: Ceilings, seconds: float, pace: Pace, benchmark
) -> Iterator[Callable[..., Suite]]:
    """Make the :class:`~benchmarks.measure.suite.Suite` of a workload; a wrong answer fails the test."""
    made: list[Suite] = []

    def make(operator: str, workload: Workload) -> Suite:
        made.append(Suite(operator, workload, results, ceilings, seconds, benchmark, pace))
        return made[-1]

    torch.compiler.reset()  # otherwise graphs compiled for other workloads would make this one's shapes dynamic
    yield make
    for one in made:
        one.finish()


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """For every workload, the time of our implementation, and the ratios of the others to it."""
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
            ratios = [f"rbm {ours:.3g} s", *(f"{name} {value / ours:.2f} x" for name, value in values.items())]
        else:
            ratios = [f"{name} {value:.3g}" for name, value in values.items()]
        terminalreporter.line(f"{' '.join(key)}: {', '.join(ratios)}")
    terminalreporter.line(_about_precisions(config))
    if missing := missing_libraries():
        terminalreporter.line(f"libraries that were not measured: {', '.join(missing)}")
