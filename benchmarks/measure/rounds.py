"""Benchmarks with alternating cases: their options, their rows, and medians over the rounds."""

import argparse
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure.harness import machine, processor
from rbm.utils.files import write_csv

Case = dict[str, Any]
# The first columns of every row; then come the case, "round", and the measurements.
MACHINE = ("date", "commit", "torch", "processor", "cores", "load")


def options(doc: str, rounds: int, seconds: float) -> argparse.Namespace:
    """Parse ``--out``, ``--rounds`` and ``--seconds`` with these defaults."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="CSV file to write")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seconds", type=float, default=seconds, help="seconds per case and round")
    return parser.parse_args()


def take_turns(
    rounds: int, cases: Iterable[Case], measure: Callable[[Case], Case], out: Path | None, columns: Sequence[str]
) -> list[Case]:
    """Measure all cases in turn; return the rows. Those of each round are written to ``out`` when it ends.

    ``load`` is the load of the machine at the start of a measurement.
    """
    known = {name: machine()[name] for name in MACHINE[:3]}
    fixed, records, cases = {**known, "processor": processor(), "cores": os.cpu_count()}, [], list(cases)
    for turn in range(rounds):
        for case in cases:
            load = round(os.getloadavg()[0], 2)
            records.append({**fixed, "load": load, **case, "round": turn, **measure(case)})
        if out is not None:
            write_csv(out, records, columns)
    return records


def medians(records: Iterable[Case], case: Case, names: Iterable[str]) -> list[float]:
    """Medians of some columns over a case's rows, which may come from a file."""
    own = [row for row in records if all(str(row[name]) == str(value) for name, value in case.items())]
    return [statistics.median(float(row[name]) for row in own) for name in names]


def table(titles: Sequence[str], rows: Iterable[Sequence[object]], left: Sequence[str] = ()) -> str:
    """A Markdown table with right-aligned columns, except for those in ``left``."""
    rules = ["---" if title in left else "---:" for title in titles]
    lines = [f"| {' | '.join(titles)} |", f"|{'|'.join(rules)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])
