"""The comparison of servers: both answer its requests, and the page shows the stored rows."""

import csv
import os
from pathlib import Path

import pytest

from benchmarks import serving_http

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
ROOT = Path(serving_http.__file__).resolve().parent


def test_both_servers_answer(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT.parent)
    serving_http.write_run(tmp_path / "run")
    for name, command in serving_http.SERVERS.items():
        with serving_http.started(command, tmp_path / "run") as (port, process):
            assert process != os.getpid()
            for body in ("json", "npy")[: 2 if name == "rbm serve" else 1]:
                content = serving_http.request(body, 2)
                found = serving_http.measure(port, process, content, clients=2, seconds=0.2)
                assert found["requests"] >= 2
                assert 0 < found["p50_ms"] <= found["p99_ms"]


def test_the_page_shows_the_rows_that_are_kept():
    with (ROOT / "results" / "serving_http.csv").open() as file:
        rows = list(csv.DictReader(file))
    page = (ROOT.parent / "docs" / "serving.md").read_text()
    assert serving_http.markdown(rows) in page
    assert all(row["processor"] in page for row in rows)
