"""The static report of an operator for every architecture, as tests take it: compiled, or read where it is known.

Compiling every case takes minutes. Triton hashes all that a kernel is compiled from, for its own cache: the source,
what it calls, constants, types, architecture, and Triton itself. Where the committed report has a kernel of the same
hash, its row is taken; everything else is compiled. A test compiles some of the known ones and compares.
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
    """All rows of an operator by architecture, once a process and on all cores; without a report all are compiled."""
    return compiled_cases([case for case in CASES if case.operator == operator], ARCHITECTURES, report)


def compiled_cases(
    chosen: list[Case], architectures: tuple[int, ...], report: Path | None
) -> dict[int, list[tuple[Case, Row]]]:
    """All rows of some cases by architecture, as :func:`compiled_everywhere`."""
    known = {} if report is None else read_rows(report)
    launches, programs = programs_of(chosen)
    # What meta tensors import when they are first made takes seconds.
    before = f"from benchmarks.compiled import cases; cases.labels(cases.{chosen[0]!r})"
    found: dict[int, list[tuple[Case, Row]]] = {}
    for architecture, kernels in compile_for_all(programs, architectures, before=before, known=known).items():
        about = [(*launches[place], compiled) for place, compiled in kernels]
        found[architecture] = [
            (case, _row(case, label, architecture, compiled, known)) for case, label, compiled in about
        ]
    return found


def read_rows(report: Path) -> dict[str, Row]:
    """The rows of a report by hash; none where it was made by another way of reading machine code."""
    with report.open(newline="") as file:
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
    # Launches of several cases may share a kernel. How many programs are claimed is no matter of compiling.
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
    """A cell of the report as the field's type has it."""
    optional = isinstance(kind, types.UnionType)
    if optional and not text:
        return None
    return (typing.get_args(kind)[0] if optional else kind)(text)
