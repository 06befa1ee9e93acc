"""The budget of a run of the suites: limits of comparisons, precisions left out, progress."""

import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.measure import harness, precision
from benchmarks.measure.device import Device
from benchmarks.measure.harness import Results, interleave
from benchmarks.measure.pace import COMPARISONS, Pace, minutes
from benchmarks.measure.shapes import Shape, Workload
from benchmarks.measure.suite import Ceilings, Suite

ROOT = Path(__file__).resolve().parents[2]


def test_a_slow_variant_gets_its_share_of_the_limit_and_no_more():
    calls = dict.fromkeys("abc", 0)

    def taking(name: str, seconds: float) -> float:
        calls[name] += 1
        return seconds

    variants = {name: partial(taking, name, seconds) for name, seconds in (("a", 0.01), ("b", 0.7), ("c", 50.0))}
    clock = Device()
    clock.seconds = lambda turn: _last(turn)
    timings = interleave(variants, seconds=0.0, least=5, limit=6.0, device=clock)
    assert {name: timing.rounds for name, timing in timings.items()} == {"a": 5, "b": 2, "c": 1}
    assert calls["c"] == 1
    assert timings["c"].median == 50.0
    # Without a limit all of them get as many rounds.
    assert {t.rounds for t in interleave(variants, seconds=0.0, least=5, device=clock).values()} == {5}


def _last(turn) -> float:
    """What a call says that it took, or the next call of a turn."""
    if isinstance(turn, partial) and turn.func is harness._run:
        return next(turn.args[0])()
    return turn()


def test_limit_shrinks_where_a_run_falls_behind():
    now = [0.0]
    pace = Pace(100.0, [1.0] * 10, lambda: now[0])
    assert pace.limit(0.5) == 0.5 * COMPARISONS
    assert pace.limit(0.02) == math.inf  # a smoke run
    assert math.isnan(pace.left)
    now[0] = 10.0
    pace.next()
    assert pace.limit(0.5) == 0.5 * COMPARISONS
    assert pace.left == pytest.approx(90.0)
    assert pace.place == "2/10"
    now[0] = 55.0  # 45 seconds for nine tests, which were to have 90
    assert pace.limit(0.5) == pytest.approx(0.25 * COMPARISONS)
    assert pace.may_compile
    now[0] = 99.0
    assert pace.limit(0.5) == pytest.approx(0.05 * COMPARISONS)
    assert not pace.may_compile
    for _ in range(9):
        pace.next()
    assert pace.limit(0.5) == pytest.approx(0.05 * COMPARISONS)
    assert not pace.is_over
    now[0] = 101.0
    assert pace.is_over


def test_without_a_budget_nothing_shrinks():
    pace = Pace(math.inf, [1.0], lambda: 1e6)
    assert pace.limit(0.5) == 0.5 * COMPARISONS
    assert pace.may_compile
    assert minutes(245.3) == "4:05"
    assert minutes(math.nan) == "?:??"


@pytest.fixture
def suite(tmp_path) -> Suite:
    results = Results(tmp_path / "results.csv")
    return Suite("expert_matmul", Workload(Shape(40), "float32"), results, Ceilings(results, 0.5), 0.5)


def test_what_is_too_slow_is_marked_and_not_called_again(suite, monkeypatch):
    calls = {"eager": 0, "peer": 0, "rbm": 0}
    took = {"eager": 0.1, "peer": 11.0, "rbm": 12.0}

    def named(name: str):
        def call(_) -> tuple[torch.Tensor]:
            calls[name] += 1
            last[0] = took[name]
            return (torch.ones(1),)

        return call

    last = [0.0]

    def seconds(turn) -> float:
        turn()
        return last[0]

    monkeypatch.setattr("benchmarks.measure.suite.HERE.seconds", seconds)
    implementations = {name: named(name) for name in calls}
    exact = (torch.ones(1, dtype=torch.float64),)
    right = suite.check("forward", implementations, lambda f, p: f(p), None, exact)
    assert set(right) == {"eager", "peer", "rbm"}
    assert suite.too_slow == {"peer": 11.0}  # ours is timed whatever it takes
    timed = suite.time("forward", right, lambda f, p: f(p), [None])
    assert set(timed) == {"eager", "rbm"}
    assert set(suite.check("forward + backward", right, lambda f, p: f(p), None, exact)) == {"eager", "rbm"}
    assert calls["peer"] == 1
    rows = {(row["implementation"], row["metric"]): float(row["median"]) for row in suite.results.rows}
    assert rows["peer", "forward too slow"] == rows["peer", "forward + backward too slow"] == 11.0
    assert ("peer", "forward seconds") not in rows
    assert rows["rbm", "forward seconds rounds"] == 1
    assert ("eager", "forward seconds rounds") not in rows
    suite.finish()


def test_compiled_peers_are_left_out_where_time_is_short_and_a_row_says_so(suite, monkeypatch):
    suite.workload = Workload(Shape(18_333), "float32")
    monkeypatch.setattr("benchmarks.measure.suite.for_this_machine", lambda _: (Shape(18_333),))
    assert suite.compiles
    late = Pace(10.0, [1.0, 1.0], iter([0.0, *[9.9] * 9]).__next__)
    suite.pace = late
    assert not suite.compiles
    assert suite.results.rows[-1]["metric"] == "left out for time"


def test_on_a_gpu_only_bfloat16_is_compiled(suite, monkeypatch):
    monkeypatch.setattr("benchmarks.measure.suite.for_this_machine", lambda _: (Shape(18_333),))
    monkeypatch.setattr("benchmarks.measure.suite.HERE.is_gpu", True)
    compiled = []
    for dtype in ("bfloat16", "float32", "tf32", "float16"):
        suite.workload = Workload(Shape(18_333), dtype)
        compiled += [dtype] if suite.compiles else []
    assert compiled == ["bfloat16"]


def test_hardware_is_probed_once_and_by_time(monkeypatch):
    asked = []

    def seconds(dtype: torch.dtype) -> float:
        asked.append(dtype)
        return {torch.float32: 1.0, torch.bfloat16: 0.5, torch.float16: 40.0}[dtype]

    monkeypatch.setattr(precision, "_product_seconds", seconds)
    precision.slowness.cache_clear()
    try:
        assert precision.in_hardware("bfloat16")
        assert not precision.in_hardware("float16")
        assert precision.in_hardware("tf32")
        assert not precision.in_hardware("float16")
        assert asked.count(torch.float16) == 1
    finally:
        precision.slowness.cache_clear()


ROUTED, STUDENT = "benchmarks/test_routed_matmul.py", "benchmarks/test_student.py::test_student_of_cora_width[1]"


def run_suites(tmp_path: Path, *options: str) -> subprocess.CompletedProcess:
    """Small suites in a process of their own, on a processor that has float32 alone in hardware."""
    (tmp_path / "plugin.py").write_text(
        "import torch\nfrom benchmarks.measure import precision\n"
        "precision._product_seconds = lambda dtype: 1.0 if dtype == torch.float32 else 100.0\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "plugin", *options]
    return subprocess.run(
        [*command, "--results", str(tmp_path / "results.csv"), "-p", "no:cacheprovider"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def dtypes(tmp_path: Path) -> set[str]:
    lines = (tmp_path / "results.csv").read_text().splitlines()
    return {line.split(",")[2] for line in lines if line.startswith("routed_matmul")}


def test_a_precision_that_is_not_in_hardware_is_left_out_and_named(tmp_path):
    run = run_suites(tmp_path, ROUTED, "--seconds=0.02")
    assert run.returncode == 0, run.stdout
    assert "bfloat16 left out: a product takes 100 times as long" in run.stdout
    assert dtypes(tmp_path) == {"float32"}


def test_a_precision_that_is_asked_for_is_measured(tmp_path):
    run = run_suites(tmp_path, ROUTED, "--seconds=0.02", "--precisions", "bfloat16")
    assert run.returncode == 0, run.stdout
    assert dtypes(tmp_path) == {"bfloat16"}
    unknown = run_suites(tmp_path, ROUTED, "--precisions", "float8")
    assert unknown.returncode == 4
    assert "there are float32, bfloat16" in unknown.stderr


def test_progress_names_each_workload(tmp_path):
    run = run_suites(tmp_path, STUDENT)
    assert run.returncode == 0, run.stdout
    assert "[1/1, 0:00, about ?:?? left] test_student.py::test_student_of_cora_width[1]" in run.stdout


def test_what_the_budget_has_no_time_for_is_skipped_and_says_so(tmp_path):
    run = run_suites(tmp_path, STUDENT, "--budget", "1e-9")
    assert run.returncode == 0, run.stdout
    assert "1 skipped" in run.stdout
    assert "left out for time: --budget is spent" in run.stdout


def test_suites_need_no_pytest_benchmark(tmp_path):
    """A lent machine may lack it."""
    run = run_suites(tmp_path, "-p", "no:benchmark", "benchmarks/test_peak_memory.py", "-k", "serving")
    assert run.returncode == 0, run.stdout
    assert "1 passed" in run.stdout
