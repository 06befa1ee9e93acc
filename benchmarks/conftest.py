"""Options ``--results FILE`` (``.benchmarks/results.csv``) and ``--seconds S``, and a table of ratios at the end."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from benchmarks.harness import Results, Timing, interleave


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, default=Path(".benchmarks/results.csv"), help="CSV file that rows go to")
    parser.addoption("--seconds", type=float, default=1.0, help="how long variants are compared with one another")


@pytest.fixture(scope="session")
def compare(request: pytest.FixtureRequest) -> Callable[..., dict[str, Timing]]:
    """:func:`benchmarks.harness.interleave` for as long as ``--seconds`` says; a smoke run asks for next to nothing."""
    seconds = request.config.getoption("--seconds")
    return partial(interleave, seconds=seconds, least=5 if seconds >= 0.5 else 1)


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest) -> Results:
    written = Results(request.config.getoption("--results"))
    request.config.stash[_WRITTEN] = written
    return written


_WRITTEN: pytest.StashKey[Results] = pytest.StashKey()


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """For every shape what each implementation took, and how many times as long as ours that is."""
    written = config.stash.get(_WRITTEN, None)
    if written is None or not written.rows:
        return
    terminalreporter.section(f"figures, written to {written.path}")
    ours: dict[tuple, float] = {}
    for row in written.rows:
        key = (row["operator"], row["shape"], row["dtype"], row["metric"])
        value = float(row["median"])
        if row["implementation"] == "rbm":
            ours[key] = value
        ratio = f"  {value / ours[key]:7.2f} x" if key in ours and row["metric"].endswith("seconds") else ""
        terminalreporter.line(f"{' '.join(key):64} {row['implementation']:12} {value:10.3g}{ratio}")
