"""Reading results back: ratios of two runs, tables, pictures, the summary of a run on a GPU."""

import re

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.measure.harness import Results
from benchmarks.measure.shapes import CORA, REFERENCE, Shape
from benchmarks.report import headline, medians, overview, plot, regression, summary, tables

LAYER = Shape(64)


def write(path, figures: dict[tuple[str, str], float], operator="layer", shape=LAYER, dtype="float32", remark=""):
    results = Results(path, remark)
    for (implementation, metric), value in figures.items():
        results.add(operator, str(shape), implementation, metric, value, dtype=dtype)
    return path


def run(main, *arguments):
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, list(map(str, arguments)))


TIMES = {("rbm", "forward seconds"): 1e-3, ("eager", "forward seconds"): 4e-3, ("rbm", "saved bytes"): 10.0}


@pytest.mark.parametrize(("factor", "limit", "code"), [(1.0, 1.1, 0), (1.2, 1.1, 1), (1.2, 1.3, 0), (0.5, 1.1, 0)])
def test_regression(tmp_path, factor, limit, code):
    old = write(tmp_path / "old.csv", TIMES)
    slower = {**TIMES, ("rbm", "forward seconds"): 1e-3 * factor, ("rbm", "saved bytes"): 1e6}
    new = write(tmp_path / "new.csv", slower)
    result = run(regression.main, old, new, "--limit", limit)
    assert result.exit_code == code, result.output
    assert f"2 times compared, {code} slower" in result.output
    assert f"{factor:.2f}" in result.output
    assert run(regression.main, old, new, "--limit", limit, "--implementation", "eager").exit_code == 0


def test_regression_counts_the_newest_of_two_rows_and_wants_something_in_common(tmp_path):
    old, new = write(tmp_path / "old.csv", TIMES), write(tmp_path / "new.csv", {("rbm", "forward seconds"): 1.0})
    assert run(regression.main, old, new).exit_code == 1
    write(new, TIMES)
    assert run(regression.main, old, new).exit_code == 0
    other = write(tmp_path / "other.csv", TIMES, operator="another")
    assert run(regression.main, old, other).exit_code == 2


def test_plot(tmp_path):
    path = write(tmp_path / "new.csv", TIMES)
    result = run(plot.main, path, "--out", tmp_path / "pictures")
    assert result.exit_code == 0, result.output
    (picture,) = (tmp_path / "pictures").iterdir()
    assert "<svg" in picture.read_text()
    ((groups),) = plot.pictures(plot.read([path])).values()
    assert groups == {str(LAYER): {"eager": 4.0}}


def texts(picture):
    return re.findall(r"<text[^>]*>([^<]*)</text>", picture.read_text())


def test_the_committed_picture_is_what_the_committed_results_give(tmp_path):
    result = run(overview.main, "--out", tmp_path / "overview.svg")
    assert result.exit_code == 0, result.output
    committed = texts(tables.RESULTS / "overview.svg")
    assert texts(tmp_path / "overview.svg") == committed, "run python -m benchmarks.report.overview"
    assert tables.human(headline.one_node()["rbm"]) in committed


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_pages_show_what_the_committed_results_give(page):
    text = page.read_text()
    assert tables.MARKED.search(text)
    assert tables.fill(text) == text, "run python -m benchmarks.report.tables"


def test_tables_take_their_cells_from_results(tmp_path, monkeypatch):
    layer = write(tmp_path / "layer.csv", {("rbm", "forward seconds"): 2e-3, ("eager", "forward seconds"): 4e-3})
    monkeypatch.setattr(medians, "LAYER", write(layer, TIMES, remark=", memory kept"))
    monkeypatch.setattr(tables, "GPU", tmp_path / "gpu.csv")
    assert "| forward | 64 | 2.0 ms | 2.0 x |  |  |  |  |\n" in tables.TABLES["cpu-layer-faults"]()
    page = "before\n<!-- table: cpu-layer -->\nold\n<!-- end -->\nafter\n<!-- table: gpu -->\n<!-- end -->\n"
    filled = tables.fill(page)
    assert "| forward | 64 | 1.0 ms | 4.0 x |  |  |  |  |\n" in filled
    assert "| experts: forward |  |  |  |  |  |  |  |  |\n" in filled
    assert "bash benchmarks/gpu.sh OUT_DIR" in filled
    assert filled.startswith("before\n<!-- table: cpu-layer -->\n|")
    assert "\n<!-- end -->\nafter\n" in filled
    assert tables.fill(filled) == filled


def test_a_block_stands_beside_its_peers(tmp_path, monkeypatch):
    figures = {("rbm", "forward seconds"): 1e-3, ("eager", "forward seconds"): 4e-3, ("rbm", "saved bytes"): 2e6}
    figures["torch.nn.Linear, k I", "forward seconds"] = 9e-4
    monkeypatch.setattr(tables, "CPU", write(tmp_path / "cpu.csv", figures, "ffn", Shape(CORA)))
    page = tables.fill("<!-- table: cpu-ffn -->\n<!-- end -->\n")
    assert "| forward | 1.0 ms |  | 0.90 x |  |  | 4.0 x |\n" in page
    assert "| saved for backward | 2 MB |  |  |  |  |  |\n" in page


def test_graphs_are_compared_with_graphs(tmp_path, monkeypatch):
    times = {
        ("rbm", "forward seconds"): 3e-4,
        ("rbm", "forward graph seconds"): 1e-4,
        ("dense", "forward seconds"): 6e-4,
        ("dense", "forward graph seconds"): 5e-4,
        ("split", "forward seconds"): 9e-4,  # waits for the device: cannot be captured
    }
    path = write(tmp_path / "gpu.csv", times, "expert_matmul", REFERENCE, "bfloat16")
    monkeypatch.setattr(tables, "GPU", path)
    page = tables.fill("<!-- table: gpu -->\n<!-- end -->\n")
    assert "| experts: forward | 0.10 ms |  |  | 3.0 x |  |  |  | 5.0 x |\n" in page
    assert "Nothing has been measured" not in page

    told = summary.lines(path, ["libraries: built here", "cut off: layer"], {"layer": "passed"}, (12, 0))
    assert len(told) == 10
    assert "  expert_matmul forward: 0.10 ms; split 3 x, dense 5 x" in told
    assert told[2] == "correctness: passed: layer (12 tests passed, 0 failed)"
    assert told[8] == "not complete: cut off: layer"


def test_a_summary_of_nothing_has_ten_lines_too(tmp_path):
    told = summary.lines(tmp_path / "missing.csv", ["libraries: not built, out of time"])
    assert len(told) == 10
    assert told[8] == "not complete: libraries: not built, out of time"
    assert told[0] == "no device; nothing measured"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (8.96e-6, "9.0 µs"),
        (1.24e-5, "12 µs"),
        (1.4e-4, "0.14 ms"),
        (0.0998, "0.10 s"),
        (0.31, "0.31 s"),
        (9.04, "9.0 s"),
        (123.4, "123 s"),
    ],
)
def test_seconds_as_one_would_say_them(seconds, said):
    assert tables.human(seconds) == said
