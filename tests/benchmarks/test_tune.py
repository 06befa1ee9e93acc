"""The tuner without a GPU: candidates that it drops, checks, output. Only the timing needs a GPU."""

import csv
from contextlib import contextmanager

import pytest
import torch
import typer
from known_triton import CHOSEN_WITH, MOST_SPILLED
from typer.testing import CliRunner

pytest.importorskip("triton")

from benchmarks.compiled.cases import Case, launches
from benchmarks.tuning import measuring, tune
from benchmarks.tuning.tunables import TUNABLES
from rbm_kernels._ahead_of_time import Compiled
from rbm_kernels.ops.cosine_topk import launch as cosine_topk_launch
from rbm_kernels.ops.expert_matmul import config
from rbm_kernels.ops.expert_matmul.config import Tile

FORWARD = next(tunable for tunable in TUNABLES if tunable.name == "_FORWARD")
TINY = {"rows": 40, "in_features": 24, "out_features": 16, "num_experts": 4, "top_k": 2}


def run(*arguments: str):
    app = typer.Typer()
    app.command()(tune.main)
    return CliRunner().invoke(app, arguments)


def read(path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
def test_without_a_gpu():
    result = run("--operator", "expert_matmul")
    assert result.exit_code == 2
    assert result.output.strip().count("\n") == 0
    assert "needs an NVIDIA GPU" in result.output


def test_dry_run_lists_what_fits_and_takes_up_its_file(tmp_path):
    out = tmp_path / "tune.csv"
    arguments = ["--operator", "expert_matmul", "--entry", "_BACKWARD", "--precision", "tf32", "--limit", "2"]
    result = run(*arguments, "--dry-run", "--architecture", "90", "--out", str(out))
    assert result.exit_code == 0, result.output
    lines = read(out)
    spilling = {f"spills {count} bytes" for count in range(4, MOST_SPILLED + 1, 4)}
    assert len(lines) == 2
    assert {line["status"] for line in lines} - spilling == {"fits"}
    assert lines[0]["candidate"] == repr(config.backward_tile(90, "tf32", 169_343, 256, 256)._replace(programs=1))
    if CHOSEN_WITH:
        assert f'("tf32", 90): {_row(config._BACKWARD["tf32", 90])},' in result.output
    again = run(*arguments, "--dry-run", "--architecture", "90", "--out", str(out))
    assert again.output == result.output
    assert read(out) == lines


def _row(tile: Tile) -> str:
    return f"Tile({', '.join(map(str, tile[: 5 if tile.programs == 1 else 6]))})"


def test_what_spills_or_does_not_fit_is_dropped():
    def kernel(**changes) -> Compiled:
        held = {"registers": 128, "spilled_bytes": 0, "shared_bytes": 1024, "tensor_columns": 0}
        return Compiled(
            name="k", blocks={}, num_warps=8, num_stages=2, instructions={}, main_loop={}, **{**held, **changes}
        )

    assert tune._verdict([kernel(), kernel(registers=100)], 2, 90) == ("fits", {"registers": 128, "programs": 2})
    assert tune._verdict([kernel()], 2, 90) == ("does not compile", {})
    assert tune._verdict([kernel(), kernel(spilled_bytes=8)], 2, 90)[0] == "spills 8 bytes"
    assert tune._verdict([kernel(shared_bytes=228 * 1024)], 1, 90)[0] == "does not fit with 228 KB"


@pytest.mark.parametrize("tunable", TUNABLES, ids=lambda tunable: f"{tunable.operator}-{tunable.name}")
def test_every_candidate_takes_its_place_and_leaves_it(tunable):
    case = Case(tunable.operator, "bfloat16")
    tables = (config._FORWARD, config._BACKWARD, config._WEIGHT)
    before, waves = [dict(table) for table in tables], dict(config._WEIGHT_WAVES)
    rule = cosine_topk_launch.configuration
    candidates, by_rule = tunable.candidates(case, 90), ("cosine_topk", "memory_update")
    assert len(candidates) == len(set(candidates)) > 3
    with tunable.using(candidates[1], case, 90):
        assert tunable.candidates(case, 90)[0] == candidates[1] or tunable.operator in by_rule
        assert (cosine_topk_launch.configuration is rule) == (tunable.operator != "cosine_topk")
    assert [dict(table) for table in tables] == before
    assert waves == config._WEIGHT_WAVES
    assert cosine_topk_launch.configuration is rule


def test_many_experts_have_rows_of_their_own():
    """They come in passes, whose tiles stand in another table: candidates in the first would change nothing."""
    many = Case("expert_matmul", "bfloat16", num_experts=64, top_k=8)
    tile = config._FORWARD_IN_PASSES["half", 100]
    assert FORWARD.candidates(many, 100)[0] == tile != config._FORWARD["half", 100]
    with FORWARD.using(Tile(64, 64, 64, 4, 2), many, 100):
        assert config.forward_tile(100, "half", 169_343, 256, 256, 2) == Tile(64, 64, 64, 4, 2)
    assert FORWARD.line(tile, many, 100).endswith("),  # _FORWARD_IN_PASSES")
    everything = tile._replace(all_registers=True)
    assert FORWARD.line(everything, many, 100) == FORWARD.line(tile, many, 100).replace("),", ", all_registers=True),")


def test_odd_widths_have_rows_of_their_own():
    odd = Case("expert_matmul", "bfloat16", in_features=1433)
    assert FORWARD.line(Tile(64, 64, 32, 4, 2), odd, 90) == '("odd half", 90): Tile(64, 64, 32, 4, 2),'
    assert FORWARD.candidates(odd, 90)[0] == config._FORWARD["odd half", 90]


@pytest.mark.parametrize("tunable", TUNABLES, ids=lambda tunable: f"{tunable.operator}-{tunable.name}")
def test_candidates_are_checked_and_timed(tunable, device, tmp_path):
    """On the interpreter, by a clock that makes each call and counts them."""
    case = Case(tunable.operator, "float32", **TINY)
    assert tunable.affects(case)
    candidates = tunable.candidates(case, 90)[:2]
    outcomes = tune.Outcomes(tmp_path / "tune.csv")
    for candidate in candidates:
        outcomes.add(tunable, case, 90, candidate, "fits", registers=100, programs=2)

    def clock(calls):
        for (call,) in calls:
            call()
        return [10.0 + place for place in range(len(calls))]

    assert tune.measure(tunable, case, 90, candidates, outcomes, clock) == {
        candidate: 10.0 + place for place, candidate in enumerate(candidates)
    }
    timed = read(tmp_path / "tune.csv")[2:]
    assert [(line["status"], line["microseconds"], line["registers"]) for line in timed] == [
        ("timed", "10.0", "100"),
        ("timed", "11.0", "100"),
    ]


@pytest.mark.parametrize("wrong", ["an element", "unwritten"])
def test_a_wrong_candidate_is_not_timed(wrong, device, tmp_path, monkeypatch):
    case = Case("expert_matmul", "float32", **TINY)
    outcomes = tune.Outcomes(tmp_path / "tune.csv")
    candidates = FORWARD.candidates(case, 90)[:2]
    for candidate in candidates:
        outcomes.add(FORWARD, case, 90, candidate, "fits", registers=100, programs=2)
    using, multiply = type(FORWARD).using, tune.cases.expert_matmul_launch.expert_matmul

    def spoilt(*arguments):
        y = multiply(*arguments)
        if wrong == "unwritten":
            fresh = torch.empty(y.shape, device=device)
            return torch.where(fresh.isnan(), fresh, y)  # right, unless fresh memory is filled with NaN
        y[7, 3] += 1e-3
        return y

    @contextmanager
    def spoiling(self, candidate, *about):
        with using(self, candidate, *about), monkeypatch.context() as patch:
            if candidate == candidates[1]:
                patch.setattr(tune.cases.expert_matmul_launch, "expert_matmul", spoilt)
            yield

    monkeypatch.setattr(type(FORWARD), "using", spoiling)
    timed = tune.measure(FORWARD, case, 90, candidates, outcomes, lambda calls: [5.0] * len(calls))
    assert timed == {candidates[0]: 5.0}
    assert outcomes.of(FORWARD, case, 90, candidates[1])["status"].startswith("is wrong")


def test_an_entry_is_tuned_only_where_its_kernel_runs(monkeypatch):
    """The weight's gradient of few rows has another kernel: each candidate would be compiled, and called a failure."""
    monkeypatch.setattr(tune, "TUNED", [Case("expert_matmul", "bfloat16", rows=rows) for rows in (64, 4096)])
    monkeypatch.setattr(config, "sums_all_rows", lambda rows, *_: rows <= 256)
    seen = {64: [], 4096: []}
    monkeypatch.setattr(tune, "tune", lambda tunable, case, *_, **__: seen[case.rows].append(tunable.name))
    assert run("--operator", "expert_matmul", "--dry-run").exit_code == 0
    assert seen == {64: ["_FORWARD", "_BACKWARD"], 4096: ["_FORWARD", "_BACKWARD", "_WEIGHT", "_WEIGHT_WAVES"]}


def test_every_timed_launch_has_a_reference():
    for tunable in TUNABLES:
        case = Case(tunable.operator, "float32", **TINY)
        tensors = tune.Tensors.of(case, "cpu")
        assert tunable.labels[0] in launches(case, tensors)
        assert all(x.isfinite().all() for x in measuring.reference(case, tunable.labels[0], tensors))
