"""The table of narrow students in docs/experts.md, on rows made by hand."""

from search_rows import rows

from benchmarks.report.widths import HEADER, by_width


def test_each_width_is_compared_with_mlps_of_its_and_of_three_times_its_width():
    found = [
        *rows({"a": 0.02, "b": 0.06}, "rbm", "width 4"),
        *rows({"a": 0, "b": 0}, "mlp", "width 4"),
        *rows({"a": 0.05, "b": 0.05}, "mlp", "width 12"),
        *rows({"a": 0.2, "b": 0.2}, "mlp", "width 8"),  # of no line
    ]
    [line] = by_width(found, [4])
    assert len(line) == len(HEADER)
    assert line[:4] == ["4", "74.0", "70.0", "75.0"]
    assert line[4].startswith("+4.0 ± ")
    assert line[5].startswith("-1.0 ± ")
    assert line[4].endswith("(< 0.001)")
