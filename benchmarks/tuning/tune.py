"""Finds the fastest tiles on this GPU, and prints them as rows of config.py.

``python -m benchmarks.tuning.tune --operator expert_matmul --out benchmarks/results/tune.csv``. For each entry of the
operator's configuration, precision and shape, a finite set of candidates is compiled ahead of time, and those that
spill or do not fit are dropped. The others are checked against the reference in float64. Then they are timed
alternately, round after round, each with more buffers than fit in the L2 cache. Every outcome is written to the CSV at
once; another call with the same file continues where the first ended. ``--table FILE`` saves the printed rows of
config.py, each followed by the times of all candidates. ``--dry-run`` stops before the GPU is needed.
All entries of an operator have hundreds to thousands of candidates, and a compilation takes about a second: ``--jobs``
compiles several at once, and ``--entry``, ``--precision`` and ``--limit`` take fewer.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from threading import Lock
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.compiled import cases, occupancy
from benchmarks.compiled.cases import CASES, Case, Tensors
from benchmarks.compiled.static_report import made_by
from benchmarks.measure.device import HERE, Device, Gpu
from benchmarks.measure.precision import multiplying_as
from benchmarks.tuning.measuring import Call, Clock, cuda_clock, disagreement, sets_beyond_the_cache
from benchmarks.tuning.tunables import TUNABLES, Candidate, Tunable
from rbm.utils.files import append_csv, read_csv
from rbm_kernels._ahead_of_time import Compiled, compile_launches

# float16 uses the same table entries as bfloat16; a served batch is small.
TUNED = tuple(
    dict.fromkeys(
        cases.at_hand(case)
        for case in (
            *(case for case in CASES if case.precision != "float16"),
            *(Case(operator, "bfloat16", rows=64) for operator in ("cosine_topk", "expert_matmul")),
        )
    )
)
console = Console()


@dataclass(frozen=True)
class Outcome:
    """The outcome for a candidate; the fields are the columns of the CSV."""

    entry: str
    shape: str
    precision: str
    architecture: int
    triton: str
    candidate: str
    status: str
    registers: int | None = None
    programs: int | None = None
    microseconds: float | None = None


class Outcomes:
    """The CSV: existing lines are read, and each outcome adds a line. The last line of a candidate is valid."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._made = made_by()
        lines = [] if path is None else read_csv(path, missing_ok=True)
        self._known = {tuple(line[name] for name in _KEY): line for line in lines}

    def of(self, tunable: Tunable, case: Case, architecture: int, candidate: Candidate) -> dict[str, str] | None:
        """The line of a candidate for the current version of Triton."""
        line = self._outcome(tunable, case, architecture, candidate, "")
        return self._known.get(tuple(str(getattr(line, name)) for name in _KEY))

    def add(
        self, tunable: Tunable, case: Case, architecture: int, candidate: Candidate, status: str, **numbers: float
    ) -> None:
        """Write a line, if there is a file."""
        line = self._outcome(tunable, case, architecture, candidate, status, **numbers)
        written = {name: "" if value is None else str(value) for name, value in vars(line).items()}
        self._known[tuple(written[name] for name in _KEY)] = written
        if self._path is None:
            return
        columns = [field.name for field in fields(Outcome)] + [name for name in self._made if name != "triton"]
        append_csv(self._path, [{**self._made, **written}], columns)

    def _outcome(self, tunable, case, architecture, candidate, status, **numbers) -> Outcome:
        # The number of programs of a tile follows from the other fields, and does not distinguish candidates.
        about = (tunable.name, str(case), case.precision, architecture, self._made["triton"])
        return Outcome(*about, repr(tunable.holding(candidate, 1)), status, **numbers)


_KEY = ("entry", "shape", "precision", "architecture", "triton", "candidate")


def launch_meta(tunable: int, case: Case, architecture: int, candidate: int, label: str) -> None:
    """Launch a candidate, given by its index, on meta tensors, for compilation by ``compile_launches``."""
    chosen = TUNABLES[tunable]
    with chosen.using(chosen.candidates(case, architecture)[candidate], case, architecture):
        cases.launch_meta(case, label)


def survey(
    tunable: Tunable, case: Case, architecture: int, outcomes: Outcomes, limit: int | None = None, jobs: int = 1
) -> list[Candidate]:
    """Compile candidates without a line in the CSV, and return all that fit, starting with the current entry."""
    candidates = tunable.candidates(case, architecture)[:limit]
    unknown = [
        place
        for place, candidate in enumerate(candidates)
        if outcomes.of(tunable, case, architecture, candidate) is None
    ]
    lock = Lock()

    def compile_some(places: Sequence[int]) -> None:
        for place, kernels in _compiled(tunable, case, architecture, places):
            status, numbers = _verdict(kernels, len(tunable.labels), architecture)
            with lock:
                outcomes.add(tunable, case, architecture, candidates[place], status, **numbers)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(compile_some, [unknown[first::jobs] for first in range(jobs)]))
    fitting = []
    for candidate in candidates:
        line = outcomes.of(tunable, case, architecture, candidate)
        if line["status"] in ("fits", "timed"):
            fitting.append(tunable.holding(candidate, int(line["programs"])))
    return fitting


def _compiled(
    tunable: Tunable, case: Case, architecture: int, places: Sequence[int]
) -> Iterator[tuple[int, list[Compiled]]]:
    """The tuned kernel of each candidate, once for each of its launches that compiles."""
    launches = [(place, label) for place in places for label in tunable.labels]
    if not launches:
        return
    programs = [
        f"from benchmarks.compiled import cases; from benchmarks.tuning import tune;"
        f" tune.launch_meta({TUNABLES.index(tunable)}, cases.{case!r}, {architecture}, {place}, {label!r})"
        for place, label in launches
    ]
    waiting = {place: [] for place in places}
    for launch, compiled in compile_launches(programs, architecture, skip_failures=True):
        # Programs run in order: those before this one are done.
        for place in list(waiting):
            if place == launches[launch][0]:
                break
            yield place, waiting.pop(place)
        if compiled.name == tunable.kernel:
            waiting[launches[launch][0]].append(compiled)
    yield from waiting.items()


def _verdict(kernels: Sequence[Compiled], expected: int, architecture: int) -> tuple[str, dict[str, int]]:
    if len(kernels) < expected:
        return "does not compile", {}
    registers = max(kernel.registers for kernel in kernels)
    shared = max(kernel.shared_bytes for kernel in kernels)
    programs = min(
        occupancy.programs(
            kernel.registers, kernel.num_warps, kernel.shared_bytes, kernel.tensor_columns, architecture
        )
        for kernel in kernels
    )  # fmt: skip
    numbers = {"registers": registers, "programs": programs}
    if spilled := max(kernel.spilled_bytes for kernel in kernels):
        return f"spills {spilled} bytes", numbers
    if programs == 0:
        return f"does not fit with {shared // 1024} KB", numbers
    return "fits", numbers


def measure(
    tunable: Tunable,
    case: Case,
    architecture: int,
    candidates: Sequence[Candidate],
    outcomes: Outcomes,
    clock: Clock = cuda_clock,
    device: Device = HERE,
) -> dict[Candidate, float]:
    """Check candidates, and time the correct ones alternately; return their microseconds."""
    label = tunable.labels[0]
    sets = [Tensors.of(case, device.name) for _ in range(sets_beyond_the_cache(case, device))]
    # Created once, so that ordering the rows is not timed.
    launches = [cases.launches(case, tensors)[label] for tensors in sets]

    def with_candidate(candidate: Candidate, launch: Call) -> Call:
        def call() -> object:
            with tunable.using(candidate, case, architecture), multiplying_as(case.precision):
                return launch()

        return call

    checked = [with_candidate(candidate, launches[0]) for candidate in candidates]
    right = []
    for candidate, error in zip(candidates, disagreement(case, label, sets[0], checked), strict=True):
        if error <= 1:
            right.append(candidate)
        else:
            outcomes.add(tunable, case, architecture, candidate, f"is wrong: {error:.1f} times the error allowed")
    times = clock([[with_candidate(candidate, launch) for launch in launches] for candidate in right])
    timed = dict(zip(right, times, strict=True))
    for candidate, microseconds in timed.items():
        numbers = outcomes.of(tunable, case, architecture, candidate)
        known = {"registers": int(numbers["registers"]), "programs": int(numbers["programs"])}
        outcomes.add(tunable, case, architecture, candidate, "timed", **known, microseconds=round(microseconds, 2))
    return timed


def tune(
    tunable: Tunable,
    case: Case,
    architecture: int,
    outcomes: Outcomes,
    *,
    limit: int | None,
    jobs: int,
    dry_run: bool,
    table: Path | None = None,
) -> None:
    """Tune one entry for one case: print the candidates that fit or, after timing, the row to copy.

    The file ``table`` gets the row, and the times of the other candidates as comments.
    """
    about = f"{tunable.name}, {case}, {case.precision}, sm_{architecture}"
    tried = len(tunable.candidates(case, architecture)[:limit])
    _say(f"# {about}: {tried} candidates to compile")
    with console.status(f"compiling candidates: {about}"):
        fitting = survey(tunable, case, architecture, outcomes, limit, jobs)
    _say(f"# {len(fitting)} of {tried} fit")
    if dry_run:
        for candidate in fitting:
            registers = outcomes.of(tunable, case, architecture, candidate)["registers"]
            _say(f"    {tunable.line(candidate, case, architecture)}  # {registers} registers")
        return
    if not fitting:
        return
    known = [outcomes.of(tunable, case, architecture, candidate)["microseconds"] for candidate in fitting]
    if all(known):
        timed = dict(zip(fitting, map(float, known), strict=True))
    else:  # some or all are missing: only times of the same session can be compared
        with console.status(f"timing {len(fitting)} candidates: {about}"):
            timed = measure(tunable, case, architecture, fitting, outcomes)
    if not timed:
        return
    best = min(timed, key=timed.__getitem__)
    current = tunable.candidates(case, architecture)[0]
    stands = [timed[candidate] for candidate in timed if tunable.holding(candidate, 1) == tunable.holding(current, 1)]
    comparison = f"; as it stands {stands[0]:.1f}" if stands else ""
    line = tunable.line(best, case, architecture)
    row = f"    {line}  # {timed[best]:.1f} us{comparison}"
    _say(row)
    if table is not None:
        others = sorted((candidate for candidate in timed if candidate != best), key=timed.__getitem__)
        lines = [
            f"# {about}",
            row,
            *(f"    # {timed[c]:.1f} us: {tunable.line(c, case, architecture)}" for c in others),
        ]
        with table.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


def _say(line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def main(
    operator: Annotated[str, typer.Option(help="One of cosine_topk, expert_matmul, memory_update, routed_matmul.")],
    out: Annotated[Path | None, typer.Option(help="CSV of all outcomes; an existing one is continued.")] = None,
    entry: Annotated[list[str] | None, typer.Option(help="Only this entry, such as _FORWARD; repeatable.")] = None,
    precision: Annotated[list[str] | None, typer.Option(help="Only bfloat16, tf32 or float32; repeatable.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first candidates.")] = None,
    jobs: Annotated[int, typer.Option(help="Number of compiling processes.")] = 1,
    table: Annotated[Path | None, typer.Option(help="File that gets the rows to paste.")] = None,
    budget: Annotated[float, typer.Option(help="Seconds after which no entry is started.")] = float("inf"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the candidates that fit; needs no GPU.")] = False,
    architecture: Annotated[int, typer.Option(help="With --dry-run: 80, 90, 100 or 120.")] = 90,
) -> None:
    """Time candidate tiles on this GPU and print rows for config.py."""
    if not dry_run:
        if not isinstance(HERE, Gpu):
            typer.echo(
                "benchmarks.tuning.tune times kernels and needs an NVIDIA GPU; --dry-run lists what it would time.",
                err=True,
            )
            raise typer.Exit(2)
        architecture = HERE.architecture()
    chosen = [tunable for tunable in TUNABLES if tunable.operator == operator and (not entry or tunable.name in entry)]
    if not chosen:
        known = ", ".join(f"{tunable.operator} {tunable.name}" for tunable in TUNABLES)
        raise typer.BadParameter(f"nothing to tune at {operator} {' '.join(entry or [])}: there are {known}")
    outcomes, end = Outcomes(out), time.monotonic() + budget
    options = {"limit": limit, "jobs": jobs, "dry_run": dry_run, "table": table}
    wanted = [c for c in TUNED if c.operator == operator and (not precision or c.precision in precision)]
    # Case by case: if time is short, every entry of the first cases is worth more than one entry of all cases.
    for case in wanted:
        for tunable in (tunable for tunable in chosen if tunable.affects(case)):
            if time.monotonic() > end:
                _say(f"# out of time: {tunable.name}, {case}, {case.precision}")
            else:
                tune(tunable, case, architecture, outcomes, **options)


if __name__ == "__main__":
    typer.run(main)
