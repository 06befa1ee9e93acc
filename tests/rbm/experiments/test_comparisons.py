"""Gains over many graphs: compared with SciPy where it has the test, and on hand-made rows."""

import math

import pytest
from scipy.stats import ttest_1samp
from typer.testing import CliRunner

from rbm.cli import app
from rbm.experiments.comparisons import gain, gains_table, holm, kinds
from rbm.experiments.results import COLUMNS, append_rows


def row(dataset, method, variant, seed, accuracy, setting="transductive"):
    values = dict.fromkeys(COLUMNS, "1") | {"dataset": dataset, "setting": setting, "method": method}
    values |= {"protocol": "rbm", "teacher": "sage", "preset": "clean", "variant": variant, "seed": str(seed)}
    return values | {"test_at_best_val": f"{accuracy:.5f}", "val": f"{1 - accuracy:.5f}"}


ROWS = [
    *(row("cora", "mlp", "", seed, 0.80) for seed in range(3)),
    *(row("cora", "rbm", "pull", seed, 0.80 + 0.01 * seed) for seed in range(3)),
    *(row("citeseer", "mlp", "", seed, 0.70) for seed in range(2)),
    *(row("citeseer", "rbm", "pull", seed, 0.73 + 0.01 * seed) for seed in range(3)),
    row("cora", "teacher", "", 0, 0.5),
]


def test_one_cell_is_a_paired_t_test():
    ours, theirs = {("cora",): {0: 3.0, 1: 5.0, 2: 4.5}}, {("cora",): {0: 1.0, 1: 4.0, 2: 5.0, 7: 9.0}}
    found = gain(ours, theirs)
    expected = ttest_1samp([2.0, 1.0, -0.5], 0.0)
    assert (found.difference, found.p) == (pytest.approx(2.5 / 3), pytest.approx(expected.pvalue))
    assert found.difference / found.error == pytest.approx(expected.statistic)
    assert found.pairs == 3


def test_cells_weigh_alike_however_many_seeds_they_have():
    found = gain({("a",): {0: 1.0, 1: 3.0}, ("b",): {0: 6.0, 1: 6.0, 2: 9.0, 3: 9.0}}, {
        ("a",): {0: 0.0, 1: 0.0}, ("b",): {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0}
    })  # fmt: skip
    assert found.difference == pytest.approx((2.0 + 7.5) / 2)
    assert found.error == pytest.approx(math.sqrt(2.0 / 2 + 3.0 / 4) / 2)
    assert found.cells == {("a",): 2.0, ("b",): 7.5}


def test_a_single_seed_has_no_error_and_nothing_in_common_is_said():
    found = gain({("a",): {0: 1.0}}, {("a",): {0: 0.0}})
    assert found.difference == 1.0
    assert math.isnan(found.error)
    assert math.isnan(found.p)
    with pytest.raises(ValueError, match="needs the same runs"):
        gain({("a",): {0: 1.0}}, {("a",): {1: 1.0}})


def test_equal_differences_have_no_p_value_unless_there_is_none():
    alike = {("a",): {0: 1.0, 1: 1.0}}
    assert gain(alike, alike).p == 1.0
    assert math.isnan(gain(alike, {("a",): {0: 0.0, 1: 0.0}}).p)
    rounded = gain({("a",): {0: 81.15, 1: 81.57}}, {("a",): {0: 80.0, 1: 80.42}})
    assert (rounded.difference, rounded.error) == (1.15, 0.0)
    assert math.isnan(rounded.p), "equal but for the rounding of subtractions, which gave a p of 4e-15"


def test_holm_is_what_its_paper_says():
    nan = float("nan")
    assert holm([0.01, 0.04, nan, 0.03]) == pytest.approx([0.03, 0.06, nan, 0.06], nan_ok=True)
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_kinds_are_methods_with_their_variants():
    found = kinds(ROWS)
    assert set(found) == {"mlp", "rbm, pull", "teacher"}
    assert found["rbm, pull"][("cora", "transductive")] == pytest.approx({0: 80.0, 1: 81.0, 2: 82.0})
    assert kinds(ROWS, "val")["mlp"][("cora", "transductive")][0] == pytest.approx(20.0)
    with pytest.raises(ValueError, match="column is 'seconds'"):
        kinds(ROWS, "seconds")


def test_the_table_names_cells_and_joint_mean(tmp_path):
    path = tmp_path / "rows.csv"
    append_rows(path, ROWS)
    found = CliRunner().invoke(app, ["table", str(path), "--against", "mlp"])
    assert found.exit_code == 0, found.output
    head, _, line = found.output.splitlines()
    assert head == "|  | runs | citeseer transductive | cora transductive | mean | standard error | p (Holm) |"
    assert line.startswith("| rbm, pull | 5 | +3.50 | +1.00 | +2.25 | 0.38 | ")
    assert found.output == gains_table(ROWS, "mlp")


def test_a_student_without_a_common_seed_has_no_line():
    assert gains_table([*ROWS, row("cora", "glnn", "", 9, 0.7)], "mlp") == gains_table(ROWS, "mlp")
    with pytest.raises(ValueError, match=r"against is .glnn., but no other student has rows of its graphs"):
        gains_table([*ROWS, row("cora", "glnn", "", 9, 0.7)], "glnn")


def test_a_wrong_kind_lists_those_that_there_are(tmp_path):
    with pytest.raises(ValueError, match=r"against is .moe., expected one of these kinds of row: mlp; t"):
        gains_table(ROWS, "moe")
    with pytest.raises(ValueError, match=r"against is .mlp., but no other student has rows of its graphs"):
        gains_table([row for row in ROWS if row["method"] == "mlp"], "mlp")
