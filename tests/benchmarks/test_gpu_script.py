"""``gpu.sh`` before it starts anything: syntax, options, and the plan that they make."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import plan
from benchmarks.gpu.plan import Options, Step

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
OUT = Path("out")
SUITES = ["expert_matmul", "layer", "cosine_topk", "routed_matmul", "another"]


def gpu_sh(*arguments, **environment: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHON": sys.executable, **environment}
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd="/")


def test_syntax():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "OUT_DIR"),
        (["a", "b"], "unrecognized arguments: b"),
        (["a", "--budget", "-3"], "--budget"),
        (["a", "--budget", "soon"], "is 'soon', expected a number of seconds such as 540"),
        (["a", "--fast"], "--fast"),
        (
            ["a", "--only", "layer,leyer"],
            "--only names leyer, expected smoke, tests, tune, ncu, sanitize, or a suite",
        ),
        (["a", "--state", "/no/such.csv"], "--state names /no/such.csv, which is no file"),
        (["a", "--prebuilt", "--skip-build"], "give one of them"),
    ],
)
def test_wrong_options(arguments, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        plan.parse(arguments)
    assert said in " ".join(capsys.readouterr().err.split())


def test_the_usage_names_every_option(capsys):
    with pytest.raises(SystemExit, match="0"):
        plan.parse(["--help"])
    usage = capsys.readouterr().out
    named = [
        "budget",
        "only",
        "state",
        "compare",
        "skip-tests",
        "skip-build",
        "prebuilt",
        "tune",
        "ncu",
        "sanitize",
        "rehearse",
        "time-failed",
    ]
    assert all(f"--{name}" in usage for name in named)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
def test_without_a_gpu_it_says_so(tmp_path):
    result = gpu_sh(tmp_path / "out")
    assert result.returncode == 2
    assert "no GPU found; --rehearse needs none" in result.stderr
    assert not (tmp_path / "out").exists()


def test_paths_are_those_of_the_caller(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("old.csv").touch()
    options = plan.parse(["out", "--state", "old.csv", "--only", "layer, tests"])
    assert (options.out, options.state) == (tmp_path / "out", tmp_path / "old.csv")
    assert options.only == ("layer", "tests")


def test_every_suite_has_its_place():
    found = plan.suites()
    assert found[:5] == list(plan.FIRST)
    everything = {path.stem.removeprefix("test_") for path in SCRIPT.parent.glob("test_*.py")}
    # Peak memory is read as Linux counts it, and few rows are measured on a CPU, not on a GPU.
    assert everything - set(found) == {"few_rows", "peak_memory"}
    assert [step for step in plan.plan(Options(OUT), found) if step.part == "all"] == [
        Step("suite", name, "all") for name in found
    ]


def test_stages_come_in_the_order_of_their_worth():
    told = [str(step) for step in plan.plan(Options(OUT), SUITES)]
    assert told == [
        *(
            "build",
            "smoke",
            "tests (core)",
            "expert_matmul (first)",
            "layer (first)",
            "cosine_topk (first)",
            "tests (rest)",
        ),
        *(
            "expert_matmul (all)",
            "layer (all)",
            "cosine_topk (all)",
            "routed_matmul (all)",
            "another (all)",
            "sanitize",
        ),
    ]
    asked = [str(step) for step in plan.plan(Options(OUT, tune=True, sanitize=True), SUITES)]
    assert asked[6:9] == ["tune", "sanitize", "tests (rest)"]
    assert asked.count("sanitize") == 1
    failed = [str(step) for step in plan.plan(Options(OUT, time_failed=True, only=("layer", "cosine_topk")), SUITES)]
    assert failed[-2:] == ["layer (failed)", "cosine_topk (failed)"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"only": ("layer",)}, ["build", "tests (core)", "layer (first)", "tests (rest)", "layer (all)"]),
        ({"only": ("layer",), "skip_tests": True}, ["build", "layer (first)", "layer (all)"]),
        ({"only": ("tests",)}, ["build", "tests (core)", "tests (rest)"]),
        ({"only": ("smoke",)}, ["build", "smoke"]),
        ({"only": ("tune", "sanitize")}, ["build", "tune", "sanitize"]),
    ],
)
def test_only_what_is_named(options, expected):
    assert [str(step) for step in plan.plan(Options(OUT, **options), SUITES)] == expected


def test_a_rehearsal_has_every_stage():
    stages = {step.stage for step in plan.plan(Options(OUT, rehearse=True), SUITES)}
    assert stages == {"build", "suite", *plan.STAGES}


def test_tests_belong_to_operators(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "ROOT", tmp_path)
    for name, text in {
        "gpu/test_layer": "",
        "gpu/test_expert_matmul": "",
        "gpu/test_expert_matmul_widths": "",
        "gpu/test_students": "",
        "rbm/test_dropout": "@pytest.mark.gpu\n",
        "rbm/test_losses": "no GPU is needed\n",
        "benchmarks/test_plan": "@pytest.mark.gpu\n",
    }.items():
        path = tmp_path / "tests" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = plan.operators(rehearse=False)
    assert list(found) == ["expert_matmul", "layer", "dropout", "students"]
    assert [path.stem for path in found["expert_matmul"]] == ["test_expert_matmul", "test_expert_matmul_widths"]
    assert list(plan.operators(rehearse=True)) == ["expert_matmul", "layer", "students"]
    # A suite whose figures another name's tests decide on.
    assert list(plan.tested(Options(OUT, only=("student", "cold_start")))) == ["layer", "students"]
    assert list(plan.tested(Options(OUT, only=("student", "tests")))) == list(found)


def test_every_suite_has_tests_that_decide_on_its_figures():
    """Except two: nothing of ``launches`` runs on a GPU, and sparse rows have no kernel of ours there."""
    without = [name for name in plan.suites() if not plan.tested(Options(OUT, only=(name,)))]
    assert without == ["launches", "sparse_expert_matmul"]
