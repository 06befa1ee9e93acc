"""Stages of ``gpu.sh`` where something is broken: libraries, a case of the smoke test, a process that lost its GPU."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import libraries, sanitized_cases, stages
from benchmarks.gpu.plan import Options, Step
from benchmarks.gpu.run import Ended, Run

ROOT = Path(__file__).resolve().parents[2]
NOT_BUILT = "libraries: not built, see log.txt"


@pytest.fixture
def make_run(tmp_path):
    """A run with the given options."""
    made = []

    def make(**options) -> Run:
        made.append(Run(Options(tmp_path / "out", **options)))
        return made[-1]

    yield make
    for run in made:
        run.stop()
        run.close()


@pytest.fixture
def called(make_run, monkeypatch, tmp_path):
    """A run whose programs end with the statuses that are given for each kind of them, and what was called."""
    monkeypatch.setattr(libraries, "LIBRARY", tmp_path / "lib")
    monkeypatch.setattr(libraries, "ROOT", tmp_path)
    monkeypatch.setattr(libraries.HERE, "architecture", lambda: 90, raising=False)
    monkeypatch.setattr(libraries.shutil, "which", lambda name, path=None: f"/bin/{name}")

    def make(statuses: dict[str, list[int]], **options):
        run, seen = make_run(**options), []

        def call(command, seconds, environment=None, *, logged=True):
            kind = "load" if "-c" in command else "build" if "--build" in command else "configure"
            about = command[3:] if kind == "load" else [environment["RBM_BUILD_CUDA"]]
            seen.append(" ".join([kind, *about]))
            return Ended(statuses.get(kind, []).pop(0) if statuses.get(kind) else 0, 0.1, f"said by {kind}")

        run.call = call
        return run, seen

    return make


@pytest.mark.parametrize(
    ("statuses", "options", "seen", "told"),
    [
        ({}, {}, ["configure 1", "build 1", "load cpu cuda"], "libraries: built here; said by load"),
        ({}, {"prebuilt": True}, ["load cpu cuda"], "libraries: built elsewhere; said by load"),
        (
            {"load": [1]},
            {"prebuilt": True},
            ["load cpu cuda", "configure 1", "build 1", "load cpu cuda"],
            "libraries: built elsewhere, but not loaded; they are built here",
        ),
        (
            {"configure": [1]},
            {},
            ["configure 1", "configure 0", "build 0", "load"],
            NOT_BUILT,
        ),
        ({"build": [1]}, {}, ["configure 1", "build 1", "load"], NOT_BUILT),
    ],
    ids=["built", "carried", "carried, of no use", "no CUDA", "one of two"],
)
def test_a_library_that_is_not_there_ends_nothing(called, statuses, options, seen, told):
    run, calls = called(statuses, **options)
    assert libraries.build(run, Step("build"))
    assert calls == seen
    assert run.notes[0] == told
    assert run.failed == ("not built" in told)


def test_without_libraries_triton_goes_on(called, tmp_path):
    """The package becomes one without libraries, as its own loader understands it."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "librbm_cpu.so").touch()
    run, calls = called({"configure": [1, 1], "load": [1, 0]})
    assert libraries.build(run, Step("build"))
    assert calls == ["configure 1", "configure 0", "load", "load"]
    assert json.loads((tmp_path / "lib" / "build_info.json").read_text()) == {"build_type": "none"}
    assert not list((tmp_path / "lib").glob("*.so"))
    assert run.failed
    assert "libraries: none; Triton serves the GPU, and eager PyTorch the CPU" in run.notes
    run, _ = called({"configure": [1, 1], "load": [1, 1]})
    assert not libraries.build(run, Step("build")), "nothing can be imported"


def test_every_case_of_the_smoke_test_is_told_of(make_run, monkeypatch, tmp_path, capsys):
    """One is right, one wrong, one hangs, one takes its process with it; the last three will be tried again."""
    program = tmp_path / "case.py"
    program.write_text(
        "import os, sys, time\n"
        "match sys.argv[1]:\n"
        "    case 'hangs': time.sleep(60)\n"
        "    case 'dies': os.abort()\n"
        "    case name: print(f\"{name}: error {'1e-03' if name == 'right' else 'nan'}, allowed 2e-02\")\n"
    )
    monkeypatch.setattr(sanitized_cases, "CASES", dict.fromkeys(["right", "wrong", "hangs"]))
    monkeypatch.setattr(sanitized_cases, "MANY_ROWS", {"dies": None})
    monkeypatch.setattr(stages, "_program", lambda run, module: [sys.executable, str(program)])
    monkeypatch.setattr(stages, "SMOKE_SECONDS", 2)
    run = make_run()
    assert stages.smoke(run, Step("smoke"))
    assert run.failed
    (told,) = run.notes
    assert {*told.removeprefix("smoke: wrong or without an answer: ").split("; ")} == {"wrong", "hangs", "dies"}
    assert "hangs: no answer within" in capsys.readouterr().out
    verdicts = {row["shape"]: row["implementation"] for row in run.state.rows()}
    assert verdicts == {"right": "passed", "wrong": "failed", "hangs": "failed", "dies": "failed"}
    assert [name for name in verdicts if run.state.smoked(name)] == ["right"]


@pytest.mark.parametrize(("answer", "goes_on"), [("nan", False), ("1e-03", True)])
def test_a_call_ends_if_no_case_of_the_smoke_test_is_right(make_run, monkeypatch, answer, goes_on):
    code = f"import sys; print(f'{{sys.argv[1]}}: error {answer}, allowed 2e-02')"
    monkeypatch.setattr(sanitized_cases, "CASES", dict.fromkeys(["one", "another"]))
    monkeypatch.setattr(sanitized_cases, "MANY_ROWS", {})
    monkeypatch.setattr(stages, "_program", lambda run, module: [sys.executable, "-c", code])
    run = make_run()
    assert stages.smoke(run, Step("smoke")) is goes_on
    assert run.failed is not goes_on
    assert any("no case was right" in note for note in run.notes) is not goes_on


# In the place of PyTorch: its third test breaks the GPU for the process.
TORCH = """
class cuda:
    broken = False
    is_initialized = lambda: True
    def synchronize():
        if cuda.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\\nmore of it")
"""
TESTS = """
import pytest, torch

@pytest.mark.parametrize("number", range(8))
def test(number):
    assert number != 1, "wrong, and no more"
    torch.cuda.broken |= number == 2
    assert not torch.cuda.broken
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_a_process_that_lost_its_gpu_fails_no_other_test(tmp_path, workers):
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "test_it.py").write_text(TESTS)
    outcomes = tmp_path / "tests.csv"
    outcomes.write_text("operator,part,test,outcome,seconds\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        os.devnull,
        f"--rootdir={tmp_path}",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-p", "benchmarks.gpu.broken_device", "-p", "benchmarks.gpu.outcomes", "--about", "layer/core"]
    command += ["--outcomes", str(outcomes), *(["-n", str(workers)] if workers else ["-p", "no:xdist"]), "test_it.py"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**kept, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": ""}
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert run.returncode == (1 if workers else 3), run.stdout + run.stderr
    found = {}
    with outcomes.open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["test"].partition("[")[2][0], set()).add(row["outcome"])
    assert {number for number, told in found.items() if "failed" in told} == {"1", "2"}
    assert {number for number, told in found.items() if told == {"passed"}} == {*("034567" if workers else "0")}
    assert "the GPU is lost to this process, which ends: CUDA error: an illegal" in run.stdout + run.stderr


def test_gpu_tests_and_suites_need_no_settings():
    """GPU machines may lack pydantic; only code that distils a graph may need it."""
    program = (
        "import importlib.util, pathlib, sys\n"
        "sys.modules['pydantic'] = None\n"
        "for path in [*pathlib.Path('tests/gpu').glob('test_*.py'), *pathlib.Path('benchmarks').glob('test_*.py')]:\n"
        "    spec = importlib.util.spec_from_file_location(path.stem, path)\n"
        "    spec.loader.exec_module(importlib.util.module_from_spec(spec))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])}
    command = [sys.executable, "-W", "ignore", "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert run.returncode == 0, run.stderr
