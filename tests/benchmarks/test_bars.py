"""The table of the bar in docs/experts.md, on rows made by hand."""

from search_rows import NOISE, row, rows

from benchmarks.report.bars import HEADER, against_the_mlp
from rbm.experiments.comparisons import gain


def test_lines_of_all_searches_are_corrected_together():
    first = [*rows({"a": 0, "b": 0}, "mlp"), *rows({"a": 0.05, "b": -0.05}, "rbm", "mixed")]
    second = [*rows({"a": 0, "b": 0}, "mlp"), *rows({"a": 0.03, "b": 0.04}, "ahead"), row("a", "teacher", "", 0, 0.1)]
    searches = (("128", ("one",)), ("256", ("two",)))
    ahead, mixed = against_the_mlp({"one": first, "two": second}.get, searches)
    assert ahead[:6] == ["ahead", "256", "8", "2", "2", "0"]
    assert mixed[:6] == ["rbm, mixed", "128", "8", "2", "1", "1"]
    assert [len(line) for line in (ahead, mixed)] == [len(HEADER)] * 2
    expected = gain(
        {(name,): {seed: 3 + 100 * NOISE[seed] + extra for seed in range(4)} for name, extra in (("a", 0), ("b", 1))},
        {(name,): dict.fromkeys(range(4), 0.0) for name in "ab"},
    )
    assert ahead[6:8] == [f"{expected.difference:+.2f}", f"{expected.error:.2f}"]
    assert ahead[8] == "< 0.001"
    assert float(mixed[8]) > 0.05


def test_cells_of_one_seed_are_left_out():
    known = [*rows({"a": 0, "b": 0}, "mlp"), *rows({"a": 0.05}, "x"), *rows({"b": 0.05}, "x", seeds=1)]
    (line,) = against_the_mlp(lambda name: known, (("128", ("one",)),))
    assert line[2:4] == ["4", "1"]
    assert against_the_mlp(lambda name: rows({"a": 0}, "mlp"), (("128", ("one",)),)) == []
