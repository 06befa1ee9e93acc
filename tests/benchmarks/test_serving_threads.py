"""Threads that answer one row each: the benchmark runs, and its table agrees with its rows."""

import pytest

from benchmarks import serving_threads


def test_threads_answer():
    student = serving_threads.STUDENTS["rbm"](*serving_threads.SHAPE).eval()
    found = serving_threads.measure(student, threads=2, seconds=0.05)
    assert found["answers"] >= 2
    assert 0 < found["p50_us"] <= found["p99_us"]
    assert found["answers_per_second"] == pytest.approx(found["answers"] / 0.05, rel=0.9)
    assert found.keys() <= set(serving_threads.COLUMNS)


def test_table():
    records = [
        dict(
            zip(
                ("student", "threads", "answers_per_second", "p50_us", "p99_us", "cpu_us"),
                (student, threads, 100 * threads, 10, 25 * threads, 10),
                strict=True,
            )
        )
        for student in serving_threads.STUDENTS
        for threads in serving_threads.THREADS
    ]
    lines = serving_threads.markdown(records).splitlines()
    assert lines[2] == "| rbm | 1 | 100 | 1.00 | 10 µs | 25 µs | 2.5 | 10 µs |"
    assert lines[4] == "| rbm | 8 | 800 | 8.00 | 10 µs | 200 µs | 20.0 | 10 µs |"
