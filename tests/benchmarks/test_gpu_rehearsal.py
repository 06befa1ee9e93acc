"""``gpu.sh --rehearse``, in a copy of the tree without its history: what a broken operator costs, and what a kill."""

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = ("expert_order", "routed_matmul")
# GPU tests in the place of the tree's own, which take minutes in the interpreter: operator, call, reference.
TESTS = {
    "expert_order": ("expert_order", "{}(experts, 6, 16)[:3]", "reference.expert_order"),
    "routed_matmul": ("routed_matmul", "{}(x, memory, weight, bias, 2)", "reference.routed_matmul"),
}
# Breaks an operator for whoever imports it, without a word about it in the tree.
BREAKER = """
import rbm_kernels
real = rbm_kernels.expert_order

def upside_down(*arguments):
    order, *rest = real(*arguments)
    return order.flip(0), *rest

rbm_kernels.expert_order = upside_down
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """This checkout without ``.git``, its libraries as they lie there, with GPU tests that take a second."""
    found = tmp_path_factory.mktemp("copied") / "tree"
    left_out = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "gpu_*", "node_modules")
    shutil.copytree(ROOT, found, ignore=left_out)
    shutil.rmtree(found / "tests" / "gpu", ignore_errors=True)
    (found / "tests" / "gpu").mkdir()
    for operator, (name, call, reference) in TESTS.items():
        (found / "tests" / "gpu" / f"test_{operator}.py").write_text(
            "import pytest\nimport torch\n"
            f"from rbm_kernels import {name}\nfrom rbm_kernels.ops.{operator} import reference\n\n\n"
            '@pytest.mark.parametrize("width", [8, pytest.param(33, marks=pytest.mark.core)])\n'
            f"def test_{operator}(width):\n"
            "    x, memory = torch.randn(40, width), torch.randn(6, width)\n"
            "    experts = torch.rand(40, 6).topk(2).indices.int()\n"
            "    weight, bias = torch.randn(6, 5, width), torch.randn(6, 5)\n"
            f"    got, expected = ({call.format('f')} for f in ({name}, {reference}))\n"
            "    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)\n"
        )
    return found


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "RBM_", "PYTHONPATH"))}
    return {**kept, "PYTHON": sys.executable, "RBM_COMMIT": "abc1234", **more}


def rehearse(tree: Path, out: Path, *arguments: object, **more: str) -> subprocess.CompletedProcess:
    command = ["bash", str(tree / "benchmarks" / "gpu.sh"), str(out), "--rehearse", "--prebuilt", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment(**more), cwd=out.parent, timeout=600
    )


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def timed(out: Path) -> dict[str, set[str]]:
    """The operators of ours whose times are there, and what is said of them."""
    found: dict[str, set[str]] = {}
    for row in rows(out):
        if row["implementation"] == "rbm" and row["metric"].endswith("seconds"):
            found.setdefault(row["operator"], set()).add(row["verified"])
    return found


@pytest.mark.slow
def test_a_broken_operator_costs_its_own_figures_and_no_others(tree, tmp_path):
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "breaker.py").write_text(BREAKER)
    broken = {"PYTEST_ADDOPTS": "-p breaker", "PYTHONPATH": str(tmp_path / "plugins")}
    first = tmp_path / "first"
    run = rehearse(tree, first, "--only", ",".join(OPERATORS), **broken)
    assert run.returncode == 1, run.stdout + run.stderr
    assert timed(first) == {"routed_matmul": {"passed"}}
    summary = run.stdout.splitlines()[-10:]
    assert summary[2] == "correctness: FAILED: expert_order; passed: routed_matmul (2 tests passed, 2 failed)"
    assert "tests failed: expert_order (core), 1 of 1" in summary[8]
    assert "not timed, its tests failed: expert_order" in summary[8]
    assert len(list(first.iterdir())) <= 8
    with (first / "tests.csv").open(newline="") as file:
        outcomes = {(row["operator"], row["part"]): row["outcome"] for row in csv.DictReader(file)}
    assert outcomes == {
        **{("expert_order", part): "failed" for part in ("core", "rest")},
        **{("routed_matmul", part): "passed" for part in ("core", "rest")},
    }

    # The next piece of time: what is there is not measured again, and what failed at this commit has failed.
    second = tmp_path / "second"
    run = rehearse(
        tree, second, "--only", ",".join(OPERATORS), "--skip-tests", "--state", first / "results.csv", "--compare", 0.1
    )
    assert run.returncode == 0, run.stdout + run.stderr
    kept = rows(first)
    assert rows(second)[: len(kept)] == kept
    assert [row["operator"] for row in rows(second)[len(kept) :]] == ["build"]


@pytest.mark.slow
def test_a_workload_that_takes_its_process_with_it_costs_no_other(tree, tmp_path):
    suite = tree / "benchmarks" / "test_dying.py"
    suite.write_text(
        "import os\nimport pytest\n\n\n"
        '@pytest.mark.parametrize("number", range(4))\n'
        "def test_dying(results, number):\n"
        '    print(f"why {number} was not captured")\n'
        "    if number == 1:\n"
        "        os._exit(1)  # as pytest-timeout ends a process that hangs\n"
        '    assert number != 2, "a wrong answer"\n'
        '    results.add("dying", str(number), "rbm", "forward seconds", 1.0)\n'
    )
    try:
        run = rehearse(tree, tmp_path / "out", "--skip-tests", "--only", "dying")
    finally:
        suite.unlink()
    assert run.returncode == 1
    assert [row["shape"] for row in rows(tmp_path / "out") if row["operator"] == "dying"] == ["0", "3"]
    assert run.stdout.splitlines()[-2].count("failed (status 1): dying (all)") == 2
    log = (tmp_path / "out" / "log.txt").read_text()
    assert [number for number in range(4) if f"why {number} was not captured" in log] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_kill_leaves_every_row_that_was_measured(tree, tmp_path):
    out = tmp_path / "out"
    command = ["bash", str(tree / "benchmarks" / "gpu.sh"), str(out), "--rehearse", "--prebuilt", "--skip-tests"]
    process = subprocess.Popen(
        [*command, "--only", "expert_order"], env=environment(), start_new_session=True, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 300
    while not (out / "results.csv").exists() or len(rows(out)) < 20:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for name in (process.pid, *_children(process.pid)):
        os.kill(name, signal.SIGKILL)
    process.wait()
    done = [row["shape"] for row in rows(out) if row["operator"] == "suite"]
    before = rows(out)
    run = rehearse(tree, out, "--skip-tests", "--only", "expert_order")
    assert run.returncode == 0, run.stdout + run.stderr
    after = rows(out)
    assert after[: len(before)] == before
    again = [row["shape"] for row in after[len(before) :] if row["operator"] == "suite"]
    assert not {*done} & {*again}
    assert len(done) + len(again) == 13, "every workload, once"


def _children(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            about = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended since
            continue
        if int(about[1]) == parent:
            child = int(path.parent.name)
            found += [child, *_children(child)]
    return found
