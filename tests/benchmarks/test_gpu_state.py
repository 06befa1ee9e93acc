"""The state of a run of ``gpu.sh``: verdicts, rows of an earlier call, and files that a kill cuts off."""

import csv

import pytest

from benchmarks.gpu.state import State
from benchmarks.measure import harness, verdicts
from benchmarks.measure.harness import COLUMNS, Results
from benchmarks.measure.shapes import REFERENCE
from benchmarks.report import reading, summary, tables


@pytest.fixture
def commit(monkeypatch):
    """Name the commit that figures are of."""

    def name(commit: str) -> None:
        monkeypatch.setenv("RBM_COMMIT", commit)
        harness.machine.cache_clear()

    yield name
    monkeypatch.undo()
    harness.machine.cache_clear()


def add(path, operator: str, implementation: str = "rbm", value: float = 1e-3) -> None:
    Results(path).add(operator, str(REFERENCE), implementation, "forward seconds", value, dtype="bfloat16")


def verified(path) -> dict[str, str]:
    return {row["operator"]: row["verified"] for row in State(path).rows()}


def test_rows_say_whether_their_operator_passed(tmp_path, monkeypatch):
    path = tmp_path / "results.csv"
    told = "expert_matmul=passed;memory_update=failed;students=core;feed_forward=passed"
    monkeypatch.setenv(verdicts.VARIABLE, told)
    names = ("expert_matmul", "memory_update_", "memory_statistics", "student, 128 hidden", "layer", "ceiling", "ffn")
    for operator in names:
        add(path, operator)
    assert list(verified(path).values()) == ["passed", "failed", "failed", "core", "not tested", "", "passed"]


def test_a_verdict_is_of_all_parts_and_marks_every_row(tmp_path):
    state = State(tmp_path / "results.csv")
    for operator in ("layer", "expert_matmul", "cosine_topk", "expert_order"):
        add(state.path, operator)
    state.add_tests("layer", "core", ["passed", "passed", "skipped"])
    state.add_tests("expert_matmul", "core", ["passed"])
    state.add_tests("expert_matmul", "rest", ["passed"] * 5)
    state.add_tests("cosine_topk", "core", ["passed"])
    state.add_tests("cosine_topk", "rest", ["passed", "failed"])
    state.add_tests("expert_order", "core", ["skipped"])
    expected = {"layer": "core", "expert_matmul": "passed", "cosine_topk": "failed", "expert_order": "not tested"}
    assert state.verdicts() == expected
    assert state.counts() == (10, 1)
    assert state.tested("layer", "core")
    assert not state.tested("layer", "rest")
    state.mark()
    assert {**verified(state.path), "correctness": ""} == {**expected, "correctness": ""}
    assert tuple(next(csv.reader(state.path.open()))) == COLUMNS


def test_figures_of_an_operator_that_failed_are_in_no_table(tmp_path):
    state = State(tmp_path / "results.csv")
    for operator in ("layer", "expert_matmul"):
        add(state.path, operator)
        add(state.path, operator, "dense", 2e-3)
    shown = tables.gpu(state.path)
    assert shown.count("2.0 x") == 2
    state.add_tests("expert_matmul", "core", ["failed"])
    state.mark()
    shown = tables.gpu(state.path)
    assert "| experts: forward |  |" in shown
    assert "| layer: forward | 1.0 ms |" in shown
    assert {key.operator for key in reading.read([state.path])} == {"layer", "correctness"}
    told = summary.lines(state.path, ["tests failed: expert_matmul (core), 1 of 1"], state.verdicts(), state.counts())
    assert told[2] == "correctness: FAILED: expert_matmul (0 tests passed, 1 failed)"
    assert told[4] == "  expert_matmul forward: not measured"
    assert told[8] == "not complete: tests failed: expert_matmul (core), 1 of 1"
    assert told[9].startswith("2 figures")


def test_an_earlier_piece_is_carried_if_it_is_of_this_commit(tmp_path, commit):
    old, new = tmp_path / "old.csv", State(tmp_path / "new.csv")
    commit("aaa")
    add(old, "layer")
    State(old).add_tests("layer", "core", ["passed"])
    commit("bbb")
    add(old, "expert_matmul")
    assert new.carry(old) == (1, 3)
    assert list(verified(new.path)) == ["expert_matmul"]
    commit("aaa")
    later = State(tmp_path / "later.csv")
    assert later.carry(old) == (3, 1)
    assert later.tested("layer", "core")
    assert later.carry(later.path) == (3, 0)  # a run that takes up its own folder
    before = old.read_text()
    with pytest.raises(ValueError, match="name another OUT_DIR"):
        State(old).carry(old)
    assert old.read_text() == before


def test_a_tree_without_a_name_is_of_no_commit(tmp_path, commit, monkeypatch):
    commit("aaa")
    add(tmp_path / "old.csv", "layer")
    commit("")
    monkeypatch.setattr(harness, "_output", lambda *command: "")
    harness.machine.cache_clear()
    with pytest.raises(ValueError, match="name it in RBM_COMMIT"):
        State(tmp_path / "new.csv").carry(tmp_path / "old.csv")


@pytest.mark.parametrize("cut", [3, 40, 90])
def test_a_row_that_a_kill_cut_off_is_dropped_and_the_others_are_there(tmp_path, cut):
    state = State(tmp_path / "results.csv")
    for operator in ("layer", "expert_matmul", "cosine_topk"):
        add(state.path, operator)
    text = state.path.read_text()
    state.path.write_text(text[:-cut])
    assert list(verified(state.path)) == ["layer", "expert_matmul"]
    state.mark()
    add(state.path, "expert_order")
    assert list(verified(state.path)) == ["layer", "expert_matmul", "expert_order"]


def test_rows_are_added_to_a_file_of_before_in_its_own_columns(tmp_path):
    path, before = tmp_path / "old.csv", COLUMNS[:-1]
    path.write_text(",".join(before) + "\n")
    add(path, "layer")
    (row,) = csv.DictReader(path.open())
    assert tuple(row) == before
    assert row["operator"] == "layer"
    assert reading.read([path])
