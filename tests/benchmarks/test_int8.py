"""8-bit weights compared with float32: both are timed, and the page shows the stored rows and accuracies."""

import csv
from pathlib import Path

from scripts import load_script

import rbm
from benchmarks import int8
from rbm.nn.int8 import quantized

ROOT = Path(int8.__file__).resolve().parent.parent


def rows(path: str) -> list[dict]:
    with (ROOT / path).open(newline="") as file:
        return list(csv.DictReader(file))


def test_both_are_timed():
    trained = rbm.MLPStudent(40, 30, 3).eval()
    found = int8.measure({"float32": trained, "int8": quantized(trained)}, rows=2, seconds=0.0)
    assert found["calls"] == 20
    assert found["float32_us"] > 0 < found["int8_us"]
    assert found["float32_bytes"] == 4 * (40 * 30 + 30 + 30 * 3 + 3)
    assert found["int8_bytes"] == 64 * (2 * (3 + 10) + 3 + 8)
    assert {*found, "arithmetic", "student"} <= {*int8.COLUMNS}
    assert int8.arithmetic() in ("AVX-512 VNNI", "AVX2", "plain")


def test_the_page_shows_the_rows_that_are_kept():
    page = (ROOT / "docs" / "serving.md").read_text()
    times = rows("benchmarks/results/int8.csv")
    assert int8.markdown(times) in page
    assert all(row["processor"] in page and row["arithmetic"] in page for row in times)
    assert load_script("experiments/int8.py").markdown(rows("results/int8.csv")) in page
