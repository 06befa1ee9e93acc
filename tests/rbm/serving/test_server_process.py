"""``rbm serve`` as a process: signals stop it or reload its student, and no request is lost."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import rbm

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from http_server import Client, answer_of, make_run, strict_json, wait_until

F, C, CLIENTS = 12, 4, 6
ROWS = [[0.25 * i for i in range(F)], [1.0] * F]


def probabilities(folder):
    with torch.inference_mode():
        return rbm.load(folder)(torch.tensor(ROWS)).softmax(-1)


@contextlib.contextmanager
def served(folder, *options):
    """A process that serves a run folder, a client of it, and a function that returns the lines it has printed."""
    log = folder.parent / "log"
    with log.open("w") as file:
        command = [sys.executable, "-m", "rbm", "serve", str(folder), "--port", "0", *options]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "COLUMNS": "80"})
    try:
        wait_until(lambda: log.read_text().endswith("\n") or process.poll() is not None, seconds=60)
        found = re.fullmatch(
            r"run at http://127\.0\.0\.1:(\d+)/predict: rows of 12 numbers, 4 classes; .*\n", log.read_text()
        )
        assert found, log.read_text()
        yield process, Client(int(found[1])), lambda: log.read_text().splitlines()
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def folder(tmp_path):
    return make_run(tmp_path / "run", F, C)


def test_sigterm_lets_everyone_finish(folder):
    """Clients that send continuously are told to stop, and a request whose body was half sent is answered."""
    with served(folder) as (process, client, lines), ThreadPoolExecutor(CLIENTS) as pool:
        begun = threading.Semaphore(0)

        def ask_until_told(_):
            own, answered = client.fresh(), 0
            while own.ask({"x": ROWS})[0] == 200:
                answered += 1
                begun.release()
                if own.headers["Connection"] == "close":
                    return answered
            return 0

        asking = [pool.submit(ask_until_told, i) for i in range(CLIENTS)]
        body = b'{"x": [[0.5' + b", 1" * (F - 1) + b"]]}"
        half = client.raw()
        half.sendall(b"POST /predict HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:20])
        silent = client.raw()
        for _ in range(5 * CLIENTS):
            assert begun.acquire(timeout=20)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: not accepts(client), seconds=10)
        half.sendall(body[20:])
        status, answer = answer_of(half)
        assert (status, len(strict_json(answer)["classes"])) == (200, 1)
        assert sum(ended.result(timeout=20) for ended in asking) >= 5 * CLIENTS
        assert all(ended.result() > 0 for ended in asking)
        assert answer_of(silent) == (0, b"")
        assert process.wait(20) == 0
        assert len(lines()) == 1, lines()
        half.close()
        silent.close()


def accepts(client):
    with contextlib.suppress(OSError), client.raw():
        return True
    return False


def test_sighup_gives_a_new_student_and_loses_no_request(folder):
    with served(folder) as (process, client, lines), ThreadPoolExecutor(CLIENTS) as pool:
        stop, statuses = threading.Event(), [set() for _ in range(CLIENTS)]
        students = [probabilities(folder)]

        def ask_until_stopped(turn):
            own, seen = client.fresh(), []
            while not stop.is_set():
                status, answer = own.ask({"x": ROWS})
                statuses[turn].add(status)
                seen.append(which(answer["probabilities"], students))
            return seen

        def hang_up(said):
            before = len(lines())
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: len(lines()) > before, seconds=30)
            assert said in lines()[-1]

        def now():
            return which(client.fresh().ask({"x": ROWS})[1]["probabilities"], students)

        asking = [pool.submit(ask_until_stopped, i) for i in range(CLIENTS)]
        try:
            wait_until(lambda: all(statuses))
            make_run(folder, F, C, seed=1)
            students.append(probabilities(folder))
            assert now() == 0, "not before it is told"
            hang_up("was reloaded: 12 numbers per row, 4 classes")
            assert now() == 1
            (folder / "rbm.safetensors").write_bytes(b"no safetensors")
            hang_up("not reloaded, the former student goes on answering: ")
            assert "rbm.safetensors is not a readable safetensors file" in lines()[-1]
            assert now() == 1
            make_run(folder, F + 1, C, seed=2)
            hang_up("takes 13 features and 0 encodings, expected 12 and 0")
            assert now() == 1
            text = client.get("/metrics")[1]
            assert 'rbm_reloads_total{result="done"} 1\n' in text
            assert 'rbm_reloads_total{result="failed"} 2\n' in text
        finally:
            stop.set()
        assert statuses == [{200}] * CLIENTS
        for seen in asking:
            # The old student, then the new one, and never the old one again.
            assert seen.result() == sorted(seen.result())
            assert set(seen.result()) == {0, 1}
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def which(answer, students):
    """The index of the student that gave these probabilities for all rows of a request."""
    (found,) = [i for i, expected in enumerate(students) if torch.allclose(torch.tensor(answer), expected, atol=1e-5)]
    return found
