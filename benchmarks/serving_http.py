"""Requests per second and latency of ``rbm serve`` compared with the standard library's server, on this machine.

    python -m benchmarks.serving_http --out benchmarks/results/serving_http.csv

A student of 831-256-10 with random weights answers requests of 1 and of 64 rows, from 1 client and from 8. Each client
has its own connection and sends the next request as soon as it gets an answer. Servers and clients are three processes;
the servers take turns, round after round. On a shared machine, the server's own CPU time per request is more meaningful
than the elapsed time. ``npy`` sends the same rows as a ``.npy`` body, which the standard library's server, written as
in the example of former versions, does not read.
"""

import io
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch

import rbm
from benchmarks.measure.rounds import MACHINE, medians, options, table, take_turns
from rbm.config import Config
from rbm.training.run_folder import RunFolder, SavedStudent, save_students

COLUMNS = (
    *(*MACHINE, "server", "body", "rows", "clients", "round"),
    *("requests", "requests_per_second", "p50_ms", "p99_ms", "server_cpu_ms"),
)
SERVERS = {
    "rbm serve": ["-m", "rbm", "serve", "--port", "0"],
    "standard library": ["-m", "benchmarks.peers.http_threads"],
}
CASES = [
    {"server": server, "body": body, "rows": rows, "clients": clients}
    for rows in (1, 64)
    for clients in (1, 8)
    for server, body in (("rbm serve", "json"), ("standard library", "json"), ("rbm serve", "npy"))
]
TITLES = ("rows", "clients", "server, body", "requests a second", "p50", "p99", "server's processor time")
SHAPE = (831, 256, 10)


def write_run(folder: Path) -> None:
    """Write a run folder with an untrained student."""
    torch.manual_seed(0)
    run, student = RunFolder(folder, Config()), rbm.RbMStudent(*SHAPE)
    run.save_phase("rbm", student, {})
    save_students(folder, "rbm", {"rbm": SavedStudent(student, None)})


@contextmanager
def started(arguments: list[str], run: Path) -> Iterator[tuple[int, int]]:
    """Start a server process; yield its port and process id."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    process = subprocess.Popen(
        [sys.executable, *arguments, str(run)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        yield int(re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())[1]), process.pid
    finally:
        process.terminate()
        process.wait()


def request(body: str, rows: int) -> bytes:
    """The bytes of a whole request."""
    x = torch.randn(rows, SHAPE[0], generator=torch.Generator().manual_seed(rows))
    if body == "json":
        content = json.dumps({"x": x.tolist()}).encode()
    else:
        file = io.BytesIO()
        np.save(file, x.numpy())
        content = file.getvalue()
    return b"POST /predict HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content)


def client(port: int, content: bytes, until: float) -> list[float]:
    """Send requests one after another; return the seconds of each answer."""
    times = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while (begun := time.perf_counter()) < until:
            connection.sendall(content)
            answer = b""
            while not (head := re.match(rb"(?is)HTTP/1.1 200 .*?content-length: (\d+).*?\r\n\r\n", answer)):
                answer += _received(connection)
            missing = head.end() + int(head[1]) - len(answer)
            while missing > 0:
                missing -= len(_received(connection))
            times.append(time.perf_counter() - begun)
    return times


def _received(connection: socket.socket) -> bytes:
    piece = connection.recv(2**18)
    if not piece:
        raise ConnectionError("the server closed the connection")
    return piece


def processor_seconds(process: int) -> float:
    """CPU time that a process has used so far, in all its threads."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(port: int, process: int, content: bytes, clients: int, seconds: float) -> dict[str, float]:
    """Measure one round."""
    client(port, content, time.perf_counter() + seconds / 10)
    used, start = processor_seconds(process), time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        futures = [pool.submit(client, port, content, start + seconds) for _ in range(clients)]
        times = [latency for future in futures for latency in future.result()]
    took, used = time.perf_counter() - start, processor_seconds(process) - used
    p50, p99 = np.percentile(times, (50, 99)) * 1e3
    rate = round(len(times) / took, 1)
    times_ms = {"p50_ms": round(p50, 3), "p99_ms": round(p99, 3), "server_cpu_ms": round(used / len(times) * 1e3, 3)}
    return {"requests": len(times), "requests_per_second": rate, **times_ms}


def markdown(records: list[dict]) -> str:
    """Medians over the rounds, as a table."""
    rows = []
    for case in CASES:
        rate, *times = medians(records, case, ("requests_per_second", "p50_ms", "p99_ms", "server_cpu_ms"))
        server = f"{case['server']}, {case['body']}"
        rows.append((case["rows"], case["clients"], server, f"{rate:,.0f}", *(f"{ms:.2f} ms" for ms in times)))
    return table(TITLES, rows, left=TITLES[2:3])


def main() -> None:
    arguments = options(__doc__, rounds=7, seconds=1.5)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        write_run(Path(folder) / "run")
        found_at = {
            name: stack.enter_context(started(command, Path(folder) / "run")) for name, command in SERVERS.items()
        }

        def of(case: dict) -> dict[str, float]:
            content = request(case["body"], case["rows"])
            return measure(*found_at[case["server"]], content, case["clients"], arguments.seconds)

        print(markdown(take_turns(arguments.rounds, CASES, of, arguments.out, COLUMNS)))


if __name__ == "__main__":
    main()
