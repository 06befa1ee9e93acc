"""The static report of an operator for every architecture, for tests: compiled, or read from the committed report.

Compiling every case takes minutes. For its own cache, Triton hashes everything that a kernel is compiled from: source,
called functions, constants, types, architecture, and Triton itself. If the committed report has a kernel with the same
hash, its row is used; everything else is compiled. A test compiles some known kernels and compares the rows.
"""

import csv
import types
import typing
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.compiled import cases
from benchmarks.compiled.cases import ARCHITECTURES, CASES, Case
from benchmarks.compiled.static_report import ROOT, Row, programs_of, reader_hash, row
from rbm_kernels._ahead_of_time import Compiled, Known, compile_for_all

REPORT = ROOT / "benchmarks" / "results" / "static_report.csv"


@cache
def compiled_everywhere(operator: str, report: Path | None = REPORT) -> dict[int, list[tuple[Case, Row]]]:
    """All rows of an operator by architecture, once per process and on all cores. Without a report, compile all."""
    return compiled_cases([case for case in CASES if case.operator == operator], ARCHITECTURES, report)


def compiled_cases(
    chosen: list[Case], architectures: tuple[int, ...], report: Path | None
) -> dict[int, list[tuple[Case, Row]]]:
    """All rows of some cases by architecture, like :func:`compiled_everywhere`."""
    known = {} if report is None else read_rows(report)
    launches, programs = programs_of(chosen)
    # The imports triggered by the first meta tensors take seconds.
    before = f"from benchmarks.compiled import cases; cases.labels(cases.{chosen[0]!r})"
    found: dict[int, list[tuple[Case, Row]]] = {}
    for architecture, kernels in compile_for_all(programs, architectures, before=before, known=known).items():
        about = [(*launches[place], compiled) for place, compiled in kernels]
        found[architecture] = [
            (case, _row(case, label, architecture, compiled, known)) for case, label, compiled in about
        ]
    return found


def read_rows(report: Path) -> dict[str, Row]:
    """The rows of a report by hash; none if another version of the code that reads machine code made it."""
    with report.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    reader = reader_hash()
    return {
        line["source_hash"]: Row(**{field.name: _value(field.type, line[field.name]) for field in fields(Row)})
        for line in lines
        if line.get("source_hash") and line.get("reader") == reader
    }


def _row(case: Case, label: str, architecture: int, compiled: Compiled | Known, known: dict[str, Row]) -> Row:
    if isinstance(compiled, Compiled):
        return row(case, label, architecture, compiled)
    # Launches of several cases may share a kernel. The number of claimed programs does not depend on compilation.
    found = known[compiled.source_hash]
    return replace(
        found,
        operator=case.operator,
        computes=label,
        shape=str(case),
        precision=case.precision,
        programs_claimed=cases.claimed_programs(case, found.kernel, architecture),
        model_bound="",
        model_cycles=None,
    )


def _value(kind: Any, text: str) -> Any:
    """Convert a cell of the report to the field's type."""
    optional = isinstance(kind, types.UnionType)
    if optional and not text:
        return None
    return (typing.get_args(kind)[0] if optional else kind)(text)
