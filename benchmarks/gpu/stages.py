"""The stages of ``gpu.sh``: each runs one step of the plan and adds its notes to the summary."""

import importlib.util
import re
import shutil
import time
from pathlib import Path

from benchmarks.gpu import outcomes
from benchmarks.gpu.libraries import build
from benchmarks.gpu.plan import ROOT, Step, tested
from benchmarks.gpu.run import TIMED_OUT, Run
from benchmarks.measure.verdicts import FAILED, tested_as, to_environment

# Limits for the smoke test and the core tests in total, and for one test or workload, including compilation.
SMOKE_SECONDS, CORE_SECONDS, TEST_SECONDS, WORKLOAD_SECONDS = 100, 180, 120, 180
# With less time than this nothing is started.
LEAST_SECONDS = 10
# Pytest: all passed, or nothing was chosen.
_GOOD = (0, 5)
_LAST_LINE = re.compile(r"\d (passed|failed|skipped|deselected|errors?)\b.* in \d|no tests ran in \d")
_QUIET = ("-q", "--tb=short", "-p", "no:cacheprovider", "-p", "benchmarks.gpu.broken_device")
# Warnings are reported but are not errors: PyTorch may issue others on a GPU than on a CPU.
_TOLERANT = ("-W", "default")


def smoke(run: Run, step: Step) -> bool:
    """Every operator at a few shapes, each in a separate process: does it launch, terminate, and compute correctly?

    It runs before the tests, so that general problems are found while there is time to fix them. If no case is right,
    in this call or an earlier one, the call ends here: time on a lent GPU is short.
    """
    from benchmarks.gpu.sanitized_cases import CASES, MANY_ROWS  # loads the libraries, which are built by now

    waiting = [[name] for name in (*CASES, *MANY_ROWS) if not run.state.smoked(name)]
    if run.options.rehearse:  # a single process, because importing takes longer than interpreting
        waiting = [[name for one in waiting for name in one]] * bool(waiting)
    program, running, wrong = _program(run, "benchmarks.gpu.sanitized_cases"), [], []
    passed, limit = 0, SMOKE_SECONDS * (10 if run.options.rehearse else 1)
    end = time.monotonic() + limit
    while waiting or running:
        while waiting and len(running) < run.jobs:
            names = waiting.pop(0)
            running.append((names, run.start([*program, *names], max(1.0, end - time.monotonic()))))
        for names, started in list(running):
            if (ended := started.poll()) is not None:
                running.remove((names, started))
                run.log(ended.output)
                failed = [name for name in names if not _is_right(name, ended.output)]
                for name in names:
                    verdict = "failed" if name in failed else "passed"
                    run.state.add_smoke(name, verdict, ended.seconds)
                passed += len(names) - len(failed)
                wrong += failed
                if failed:
                    what = "no answer within its time" if ended.status == TIMED_OUT else f"status {ended.status}"
                    run.say(f"   {', '.join(failed)}: {what}\n{ended.tail(8)}")
        time.sleep(0.05)
    run.say(f"   {passed} cases answered rightly, {len(wrong)} did not")
    if wrong:
        run.note(f"smoke: wrong or without an answer: {'; '.join(wrong)}", failed=True)
    if any(run.state.smoked(name) for name in (*CASES, *MANY_ROWS)):
        return True
    run.note("ended here, because no case was right: read the tracebacks in log.txt first")
    return False


def _is_right(name: str, output: str) -> bool:
    """Whether a case printed its error, and the error was within the limit."""
    found = re.search(rf"^{re.escape(name)}: error (\S+), allowed (\S+)$", output, re.MULTILINE)
    return found is not None and float(found[1]) <= float(found[2])


def tests(run: Run, step: Step) -> bool:
    """A part of the GPU tests, with separate processes per operator, so that a crash only affects one operator."""
    waiting = {name: files for name, files in tested(run.options).items() if not run.state.tested(name, step.part)}
    if not waiting:
        run.say("   every operator was tested before")
        return True
    # The remaining tests must leave time for the figures.
    limit = min(CORE_SECONDS, run.left()) if step.part == "core" else run.left() / 2
    end = time.monotonic() + limit
    kept = run.out / "tests.csv"
    if not kept.exists():
        kept.write_text(",".join(outcomes.COLUMNS) + "\n", encoding="utf-8")
    at_once = min(len(waiting), max(1, run.jobs))
    workers = max(1, 3 * run.jobs // (2 * at_once))
    running: dict = {}
    while waiting or running:
        while waiting and len(running) < at_once and time.monotonic() < end:
            operator = next(iter(waiting))
            running[operator] = _start_tests(run, operator, waiting.pop(operator), step.part, kept, end, workers)
        if time.monotonic() >= end and waiting:
            run.note(f"not run, out of time: tests of {', '.join(waiting)} ({step.part})")
            waiting.clear()
        for operator, program in list(running.items()):
            if (ended := program.poll()) is not None:
                del running[operator]
                run.log(ended.output)
                _record_tests(run, operator, step.part, kept, ended)
        time.sleep(0.05)
    run.state.mark()
    return True


def _start_tests(run: Run, operator: str, files: list[Path], part: str, kept: Path, end: float, workers: int):
    where = "not gpu" if run.options.rehearse else "gpu"
    command = _pytest(run, "-p", "benchmarks.gpu.outcomes", "-m")
    command += [f"{where} and {'core' if part == 'core' else 'not core'}", "--about", f"{operator}/{part}"]
    command += ["--outcomes", str(kept)]
    if _has("pytest_timeout"):  # the thread method ends the process: a hanging kernel does not react to signals
        command += ["--timeout", str(TEST_SECONDS), "--timeout-method", "thread"]
    if _has("xdist") and workers > 1:
        command += ["-n", str(workers), "--dist", "worksteal", "--max-worker-restart", "1000"]
    threads = str(max(1, run.jobs // workers))
    # GPU tests rehearse on their own, whatever this process does.
    environment = {**run.environment(), "OMP_NUM_THREADS": threads}
    environment.pop("RBM_REHEARSE", None)
    return run.start([*command, *(str(path) for path in files)], end - time.monotonic(), environment)


def _record_tests(run: Run, operator: str, part: str, kept: Path, ended) -> None:
    found = outcomes.read(kept, operator, part)
    failures = found.count("failed")
    if ended.status not in (*_GOOD, TIMED_OUT) and not failures:
        found.append("failed")  # not a test, but the process itself failed
        failures = 1
    if failures or ended.status != TIMED_OUT:
        run.state.add_tests(operator, part, found)
    counts = f"{found.count('passed')} passed" + f", {failures} failed" * bool(failures)
    run.say(f"   {operator}: {counts}, {ended.seconds:.0f} s")
    if failures:
        run.say(ended.tail())
        run.note(f"tests failed: {operator} ({part}), {failures} of {len(found)}", failed=True)
    elif ended.status == TIMED_OUT:
        run.note(f"cut off: tests of {operator} ({part})")


def suite(run: Run, step: Step) -> bool:
    """A suite without the workloads that are already measured; skipped if its operator failed."""
    verdicts = run.state.verdicts()
    if (verdicts.get(tested_as(step.name)) == FAILED) != (step.part == "failed"):
        if step.part != "failed" and not run.options.time_failed:
            run.note(f"not timed, its tests failed: {step.name}")
        return True
    environment = run.environment(**to_environment(verdicts))
    if run.options.rehearse:
        environment["RBM_DATA_ROOT"] = str(ROOT / "no-such-folder")  # the GPU machine has no datasets
        if step.name == "cold_start":  # its processes would otherwise run a C++ compiler for minutes
            environment |= {"TORCH_COMPILE_DISABLE": "1", "TORCHDYNAMO_DISABLE": "1"}
    # Nothing is captured: suites print why a call was not captured in a graph, or a library not measured.
    command = _pytest(run, "--capture=no", f"--seconds={run.options.compare}")
    command += ["-p", "benchmarks.gpu.workloads", f"--begun={run.begun}"]
    command += [f"--part={'first' if step.part == 'first' else 'all'}"]
    command += [f"--results={run.state.path}", f"benchmarks/test_{step.name}.py"]
    if run.options.rehearse:
        command += ["-p", "benchmarks.gpu.rehearsing"]
    if _has("pytest_timeout"):
        command += ["--timeout", str(WORKLOAD_SECONDS), "--timeout-method", "thread"]
    while True:
        begun = _lines(run.begun)
        ended = run.call(command, run.left(), environment)
        last_line = next(filter(_LAST_LINE.search, reversed(ended.output.splitlines())), "").strip("= ")
        run.say(f"   {last_line or f'status {ended.status}'}")
        if ended.status in _GOOD:
            return True
        if ended.status == TIMED_OUT:
            run.note(f"cut off: {step}")
            return True
        run.say(ended.tail())
        run.note(f"failed (status {ended.status}): {step}", failed=True)
        # If pytest reached its last line, every workload was started. If one crashed the process or hung, the others
        # get a new process.
        if last_line or _lines(run.begun) == begun or run.left() < LEAST_SECONDS:
            return True


def tune(run: Run, step: Step) -> bool:
    """The fastest of the candidate tiles: ``tune.txt`` for copying, ``tune.csv`` for continuing."""
    earlier = run.options.state and run.options.state.parent / "tune.csv"
    if earlier and earlier.is_file() and not (run.out / "tune.csv").exists():
        shutil.copyfile(earlier, run.out / "tune.csv")
    (run.out / "tune.txt").unlink(missing_ok=True)  # recreated from tune.csv, whose times are not measured again
    entries = {"expert_matmul": "_FORWARD", "cosine_topk": "forward", "memory_update": "sums", "routed_matmul": "tile"}
    for operator, entry in list(entries.items())[: 2 if run.options.rehearse else None]:
        if run.left() < LEAST_SECONDS:
            run.note(f"not run, out of time: tune {operator}")
            continue
        command = [*_program(run, "benchmarks.tuning.tune"), "--operator", operator, "--jobs", str(run.jobs)]
        command += ["--out", str(run.out / "tune.csv"), "--table", str(run.out / "tune.txt")]
        command += ["--budget", f"{run.left():.0f}"]
        if run.options.rehearse:
            command += ["--entry", entry, "--limit", "2", "--precision", "float32"]
        ended = run.call(command, run.left())
        if ended.status == TIMED_OUT:
            run.note(f"cut off: tune {operator}")
        elif ended.status:
            run.say(ended.tail())
            run.note(f"failed (status {ended.status}): tune {operator}", failed=True)
        else:
            run.say(ended.tail(4))
    return True


SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis", "Occupancy", "LaunchStats")


def ncu(run: Run, step: Step) -> bool:
    """Every kernel once under Nsight Compute, without changing its clocks."""
    command = _program(run, "benchmarks.compiled.profile_launches")
    if not run.options.rehearse:
        if shutil.which("ncu") is None:
            run.note("profiles: ncu is missing")
            return True
        profiler = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv"]
        profiler += ["--page", "details", "--print-details", "all"]
        command = [*profiler, *(part for name in SECTIONS for part in ("--section", name)), *command]
    ended = run.call(command, run.left(), logged=run.options.rehearse)
    if not run.options.rehearse:
        run.keep(ended.output, "ncu.csv")
    if ended.status:
        run.say(ended.tail(5))
        run.note(f"profiles: failed (status {ended.status})", failed=ended.status != TIMED_OUT)
    return True


# Tool -> its options, and the cases it runs.
SANITIZERS = {
    "memcheck": (["--leak-check", "no"], ()),
    "initcheck": ([], ()),
    "racecheck": ([], ("memory_update",)),
}


def sanitize(run: Run, step: Step) -> bool:
    """Small cases under compute-sanitizer, without PyTorch's caching allocator, so that it knows each tensor."""
    program = _program(run, "benchmarks.gpu.sanitized_cases")
    environment = run.environment(PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    tool = shutil.which("compute-sanitizer")
    if run.options.rehearse:
        tools = {"cases": program}
    elif tool is None:
        run.note("sanitizers: compute-sanitizer is missing")
        return True
    else:
        tools = {
            name: [tool, "--tool", name, "--error-exitcode", "86", *options, *program, *cases]
            for name, (options, cases) in SANITIZERS.items()
        }
    verdicts, report = [], []
    for name, command in tools.items():
        if run.left() < LEAST_SECONDS:
            verdicts.append(f"{name} out of time")
            continue
        ended = run.call(command, run.left(), environment)
        run.failed |= ended.status not in (0, TIMED_OUT)
        verdict = {0: "clean", TIMED_OUT: "cut off"}.get(ended.status, f"FAILED (status {ended.status})")
        verdicts.append(f"{name} {verdict}")
        report.append(f"== {name}\n{ended.output}")
        run.keep("\n".join(report), "sanitizer.txt")
        if ended.status not in (0, TIMED_OUT):
            run.say(ended.tail())
    is_clean = all(line.endswith("clean") for line in verdicts)
    (run.say if is_clean else run.note)(f"sanitizers: {', '.join(verdicts)}")
    return True


STAGES = {function.__name__: function for function in (build, smoke, tests, suite, tune, ncu, sanitize)}


def _program(run: Run, module: str) -> list[str]:
    """Command of a program that launches kernels: on the GPU, or in Triton's interpreter."""
    return run.python("-m", *(["benchmarks.gpu.interpreted"] if run.options.rehearse else []), module)


def _pytest(run: Run, *arguments: str) -> list[str]:
    """Pytest command shared by tests and suites."""
    return run.python("-m", "pytest", *_QUIET, *(() if run.options.rehearse else _TOLERANT), *arguments)


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _lines(path: Path) -> set[str]:
    return set(path.read_text(encoding="utf-8").splitlines()) if path.exists() else set()
