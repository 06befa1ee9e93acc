"""Answers per second and latency of one row at a time, for one, two and eight threads of a process.

    python -m benchmarks.serving_threads --out benchmarks/results/serving_threads.csv

A student of 831-256-10 with random weights answers one row after another, as called by the threads of a custom server:
each under ``torch.inference_mode()``, each time a different row, without batching across threads. PyTorch may use all
cores; the operators decide whether an answer wakes a second thread. The cases take turns, round after round. If other
jobs share the cores, ``stolen`` shows it: the share of the cores' time that was neither idle nor used by this process.
"""

import os
import threading
import time
from pathlib import Path

import numpy as np
import torch

import rbm
from benchmarks.measure.rounds import MACHINE, medians, options, table, take_turns

SHAPE = (831, 256, 10)
COLUMNS = (
    *(*MACHINE, "stolen", "student", "threads", "round"),
    *("answers", "answers_per_second", "p50_us", "p99_us", "cpu_us"),
)
THREADS = (1, 2, 8)
STUDENTS = {"rbm": rbm.RbMStudent, "mlp": rbm.MLPStudent}
CASES = [{"student": student, "threads": threads} for student in STUDENTS for threads in THREADS]
TITLES = ("student", "threads", "answers a second", "of one thread's", "p50", "p99", "p99 / p50", "processor time")


def measure(student: torch.nn.Module, threads: int, seconds: float) -> dict[str, float]:
    """Measure one round: all threads start together and stop after the given seconds."""
    rows = torch.randn(256, 1, SHAPE[0], generator=torch.Generator().manual_seed(0)).unbind(0)
    latencies: list[list[float]] = [[] for _ in range(threads)]
    begin, end = threading.Barrier(threads + 1), threading.Event()

    def ask(times: list[float]) -> None:
        with torch.inference_mode():
            student(rows[0])
            begin.wait()
            count, clock = 0, time.perf_counter
            while not end.is_set():
                started = clock()
                student(rows[count % 256])
                times.append(clock() - started)
                count += 1

    workers = [threading.Thread(target=ask, args=(times,)) for times in latencies]
    for worker in workers:
        worker.start()
    begin.wait()
    started, worked, busy = time.perf_counter(), time.process_time(), _busy_seconds()
    time.sleep(seconds)
    end.set()
    took, worked, busy = time.perf_counter() - started, time.process_time() - worked, _busy_seconds() - busy
    for worker in workers:
        worker.join()
    times = np.concatenate(latencies) * 1e6
    p50, p99 = np.percentile(times, (50, 99))
    return {
        "stolen": round(max(0.0, busy - worked) / (took * os.cpu_count()), 3),
        "answers": len(times),
        "answers_per_second": round(len(times) / took, 1),
        "p50_us": round(p50, 1),
        "p99_us": round(p99, 1),
        "cpu_us": round(worked / len(times) * 1e6, 1),
    }


def _busy_seconds() -> float:
    """CPU time that all processes of the machine have used so far, on all cores."""
    user, nice, system, *_ = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def markdown(records: list[dict]) -> str:
    """Medians over the rounds, as a table."""
    rows, rate_of_one = [], 1.0
    for case in CASES:
        rate, p50, p99, used = medians(records, case, ("answers_per_second", "p50_us", "p99_us", "cpu_us"))
        rate_of_one = rate if case["threads"] == THREADS[0] else rate_of_one
        times = (f"{p50:.0f} µs", f"{p99:,.0f} µs", f"{p99 / p50:.1f}", f"{used:.0f} µs")
        rows.append((*case.values(), f"{rate:,.0f}", f"{rate / rate_of_one:.2f}", *times))
    return table(TITLES, rows, left=TITLES[:1])


def main() -> None:
    arguments = options(__doc__, rounds=7, seconds=1.0)
    torch.manual_seed(0)
    students = {name: kind(*SHAPE).eval() for name, kind in STUDENTS.items()}

    def of(case: dict) -> dict[str, float]:
        return measure(students[case["student"]], case["threads"], arguments.seconds)

    print(markdown(take_turns(arguments.rounds, CASES, of, arguments.out, COLUMNS)))


if __name__ == "__main__":
    main()
