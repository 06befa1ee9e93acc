"""The plan of a call of ``gpu.sh``: its options, and the stages in order of importance."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure.verdicts import tested_as

ROOT = Path(__file__).resolve().parents[2]
# Operators whose reference shape in bfloat16 comes first, and the layer built from them.
FIRST = ("expert_matmul", "layer", "cosine_topk", "expert_order", "memory_update")
# Suites in order of importance. Those that are not listed come last.
ORDER = (*FIRST, "routed_matmul", "launches", "cold_start", "student", "sparse_expert_matmul", "distillation_epoch")
# Only measured on a CPU, where Linux reports memory.
NOT_ON_A_GPU = ("few_rows", "peak_memory")
STAGES = ("smoke", "tests", "tune", "ncu", "sanitize")


@dataclass(frozen=True)
class Step:
    """One step of the plan.

    ``part`` of tests is ``core`` or ``rest``. For a suite it is ``first``, ``all``, or ``failed``: the last runs at the
    end, for suites whose operator's tests failed.
    """

    stage: str
    name: str = ""
    part: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.name or self.stage, self.part and f"({self.part})")))


@dataclass(frozen=True)
class Options:
    """The options of a call; see :func:`parse`."""

    out: Path
    only: tuple[str, ...] = ()
    state: Path | None = None
    budget: float = 540.0
    compare: float = 0.5
    skip_tests: bool = False
    skip_build: bool = False
    prebuilt: bool = False
    tune: bool = False
    ncu: bool = False
    sanitize: bool = False
    rehearse: bool = False
    time_failed: bool = False


def suites() -> list[str]:
    """Every suite that runs on a GPU, the most important first."""
    found = {path.stem.removeprefix("test_") for path in (ROOT / "benchmarks").glob("test_*.py")} - {*NOT_ON_A_GPU}
    return [name for name in ORDER if name in found] + sorted(found - {*ORDER})


def operators(*, rehearse: bool) -> dict[str, list[Path]]:
    """The files of GPU tests by operator: everything in ``tests/gpu``, and other files with the marker ``gpu``.

    ``test_expert_matmul.py`` and ``test_expert_matmul_widths.py`` belong to ``expert_matmul``. A rehearsal only uses
    ``tests/gpu``, which also runs on CPU tensors. ``tests/benchmarks`` speaks of the marker, but needs no GPU.
    """
    tests = ROOT / "tests"
    paths = sorted((tests / "gpu").glob("test_*.py"))
    if not rehearse:
        others = (path for path in sorted(tests.rglob("test_*.py")) if path.parent.name not in ("gpu", "benchmarks"))
        paths += [path for path in others if re.search(r"mark\.gpu\b", path.read_text(encoding="utf-8"))]
    stems = {path.stem.removeprefix("test_") for path in paths}
    found: dict[str, list[Path]] = {}
    for path in paths:
        own = path.stem.removeprefix("test_")
        shorter = (stem for stem in sorted({*stems, *ORDER}, key=len) if own == stem or own.startswith(f"{stem}_"))
        found.setdefault(next(shorter), []).append(path)
    known = [name for name in ORDER if name in found]
    return {name: found[name] for name in [*known, *sorted(found.keys() - {*known})]}


def plan(options: Options, known: Sequence[str]) -> list[Step]:
    """The steps of a call, given the existing suites."""
    chosen = [name for name in known if not options.only or name in options.only]
    wants_all = not options.only
    tests = not options.skip_tests and (wants_all or "tests" in options.only or bool(chosen))
    asked = {
        "tune": options.tune or (options.rehearse and wants_all) or "tune" in options.only,
        "ncu": options.ncu or (options.rehearse and wants_all) or "ncu" in options.only,
        "sanitize": options.sanitize or "sanitize" in options.only,
    }
    steps = [Step("build")]
    steps += [Step("smoke")] * (wants_all or "smoke" in options.only)
    steps += [Step("tests", part="core")] * tests
    steps += [Step("suite", name, "first") for name in FIRST if name in chosen]
    steps += [Step(stage) for stage, is_asked in asked.items() if is_asked]
    steps += [Step("tests", part="rest")] * tests
    steps += [Step("suite", name, "all") for name in chosen]
    if wants_all and not asked["sanitize"]:
        steps.append(Step("sanitize"))
    if options.time_failed:
        steps += [Step("suite", name, "failed") for name in chosen]
    if options.rehearse:  # CI runs these tests separately; here they must not take time from a stage
        steps.sort(key=lambda step: step == Step("tests", part="rest"))
    return steps


def tested(options: Options) -> dict[str, list[Path]]:
    """The tests that a call runs: for every operator, or for those that the chosen suites measure."""
    files = operators(rehearse=options.rehearse)
    wanted = {tested_as(name) for name in options.only if name not in STAGES}
    if not wanted or "tests" in options.only:
        return files
    return {name: paths for name, paths in files.items() if name in wanted}


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Parse a command line; exits with status 2 and a message if it is invalid."""
    parser = argparse.ArgumentParser(
        prog="gpu.sh",
        description="Builds, tests, measures and summarises on a GPU, the most important first. Every figure is in "
        "OUT_DIR/results.csv as soon as it is measured.",
        epilog="Status: 0 if everything that ran succeeded, 1 if something failed, 2 if it could not start. PYTHON is "
        "the Python to use, RBM_COMMIT the commit of a tree without .git.",
    )
    stages = f"{', '.join(STAGES)}, or a suite: {', '.join(suites())}"
    parser.add_argument("out", metavar="OUT_DIR", type=Path, help="gets at most 8 files of at most 16 MiB")
    parser.add_argument("--budget", metavar="S", type=_seconds, default=540.0, help="seconds in total (540)")
    parser.add_argument("--only", metavar="NAME,...", type=_names, default=(), help=f"only these: {stages}")
    state_help = "results.csv of an earlier call: its rows of this commit are kept and not measured again"
    parser.add_argument("--state", metavar="FILE", type=Path, help=state_help)
    parser.add_argument("--compare", metavar="S", type=_seconds, default=0.5, help="seconds of each comparison (0.5)")
    flags = {
        "--skip-tests": "no tests: verdicts come from --state",
        "--skip-build": "use libraries that an earlier call on this machine built",
        "--prebuilt": "use the libraries in rbm_kernels/lib; those that cannot be loaded are built",
        "--tune": "time candidate tiles, after the reference shape: tune.txt has the table to copy",
        "--ncu": "profile each kernel with Nsight Compute, after the reference shape",
        "--sanitize": "run compute-sanitizer after the reference shape, instead of only if time is left",
        "--time-failed": "at the end, also time operators whose tests failed; a workload with errors is not timed",
        "--rehearse": "every stage on CPU tensors of tiny shapes; needs no GPU, figures have no meaning",
    }
    for flag, help_ in flags.items():
        parser.add_argument(flag, action="store_true", help=help_)
    options = parser.parse_args(arguments)
    unknown = [name for name in options.only if name not in (*STAGES, *suites())]
    if unknown:
        parser.error(f"--only names {', '.join(unknown)}, expected {stages}")
    if options.state is not None and not options.state.is_file():
        parser.error(f"--state names {options.state}, which is no file: give the results.csv of an earlier piece")
    if options.skip_build and options.prebuilt:
        parser.error("--skip-build and --prebuilt say two things of one build: give one of them")
    paths = {"out": options.out.absolute(), "state": options.state and options.state.absolute()}
    return Options(**{**vars(options), **paths})


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise argparse.ArgumentTypeError(f"is {text!r}, expected a number of seconds such as 540")
    return float(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
