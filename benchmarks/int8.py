"""Students with 8-bit weights compared with the same students in float32: time per answer, and bytes.

    python -m benchmarks.int8 --out benchmarks/results/int8.csv

An RbM and an MLP student of each shape, with random weights, answer batches of several sizes on one thread. In each
round, the two variants of a case alternate call by call, and the row contains their medians. Times are CPU time of the
thread: waiting for a core on a shared machine is not counted. ``arithmetic`` is the instruction set that multiplies
8-bit numbers on this processor.
"""

import itertools
import time

import numpy as np
import torch

import rbm
from benchmarks.measure.device import threads
from benchmarks.measure.harness import vector_bytes
from benchmarks.measure.rounds import MACHINE, medians, options, table, take_turns
from rbm.nn.int8 import quantized

SHAPES = ((831, 256, 10), (1703, 128, 7), (256, 256, 256))
ROWS = (1, 8, 64, 1024)
STUDENTS = {"rbm": rbm.RbMStudent, "mlp": rbm.MLPStudent}
CASES = [
    {"student": student, "shape": "-".join(map(str, shape)), "rows": rows}
    for shape, student, rows in itertools.product(SHAPES, STUDENTS, ROWS)
]
COLUMNS = (
    *(*MACHINE, "arithmetic", "student", "shape", "rows", "round"),
    *("calls", "float32_us", "int8_us", "float32_bytes", "int8_bytes"),
)
TITLES = ("student", "shape", "rows", "float32", "int8", "int8 / float32", "bytes, float32", "bytes, int8")


def arithmetic() -> str:
    """The instruction set with which librbm_cpu multiplies 8-bit numbers on this processor."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        has_vnni = "avx512_vnni" in file.read()
    return {64: "AVX-512 VNNI" if has_vnni else "AVX2", 32: "AVX2"}.get(vector_bytes(), "plain")


@torch.inference_mode()
def measure(students: dict[str, torch.nn.Module], rows: int, seconds: float) -> dict[str, float]:
    """Median times of ``float32`` and ``int8``, which alternate; each call gets different rows."""
    width = students["float32"].in_channels
    batches = torch.randn(16, rows, width, generator=torch.Generator().manual_seed(0)).unbind(0)
    times: dict[str, list[float]] = {name: [] for name in students}
    end, count, clock = time.perf_counter() + seconds, 0, time.thread_time
    while count < 20 or time.perf_counter() < end:
        batch = batches[count % len(batches)]
        for name, student in students.items():
            started = clock()
            student(batch)
            times[name].append(clock() - started)
        count += 1
    found = {f"{name}_us": round(float(np.median(own[2:])) * 1e6, 2) for name, own in times.items()}
    return {"calls": count, **found, **{f"{name}_bytes": held(student) for name, student in students.items()}}


def held(student: torch.nn.Module) -> int:
    """Size of a student's ``state_dict`` in bytes."""
    return sum(tensor.nbytes for tensor in student.state_dict().values())


def markdown(records: list[dict]) -> str:
    """Medians over the rounds, as a table."""
    rows = []
    for case in CASES:
        one, eight, wide, narrow = medians(records, case, ("float32_us", "int8_us", "float32_bytes", "int8_bytes"))
        times = (f"{one:,.0f} µs", f"{eight:,.0f} µs", f"{eight / one:.2f}")
        rows.append((*case.values(), *times, f"{wide:,.0f}", f"{narrow:,.0f}"))
    return table(TITLES, rows, left=TITLES[:2])


def main() -> None:
    arguments = options(__doc__, rounds=5, seconds=0.5)
    torch.manual_seed(0)
    pairs = {}
    for shape, (name, kind) in itertools.product(SHAPES, STUDENTS.items()):
        trained = kind(*shape).eval()
        pairs[name, "-".join(map(str, shape))] = {"float32": trained, "int8": quantized(trained)}

    def of(case: dict) -> dict[str, object]:
        found = measure(pairs[case["student"], case["shape"]], case["rows"], arguments.seconds)
        return {"arithmetic": arithmetic(), **found}

    with threads(1):
        print(markdown(take_turns(arguments.rounds, CASES, of, arguments.out, COLUMNS)))


if __name__ == "__main__":
    main()
