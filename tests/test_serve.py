"""Many threads, one student: the serving example, and the copy that a layer makes at its first answer."""

import copy
import http.client
import importlib.util
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rbm import RbMStudent

THREADS, REQUESTS = 8, 40
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "serve.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("serve", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def port(example):
    server = example.make_server(RbMStudent(24, 16, 5).eval(), port=0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def ask(connection: http.client.HTTPConnection, content: bytes) -> tuple[int, bytes]:
    connection.request("POST", "/", content)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_eight_threads_get_the_answers_of_one(port, record_property):
    questions = [json.dumps({"x": torch.randn(1 + i % 17, 24).tolist()}).encode() for i in range(REQUESTS)]

    def client(first: int) -> dict[int, tuple[int, bytes]]:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        turns = [(first + i) % REQUESTS for i in range(REQUESTS)]
        found = {turn: ask(connection, questions[turn]) for turn in turns}
        connection.close()
        return found

    with ThreadPoolExecutor(THREADS) as pool:
        started = time.perf_counter()
        together = list(pool.map(client, range(0, 5 * THREADS, 5)))
        rate = THREADS * REQUESTS / (time.perf_counter() - started)
    started = time.perf_counter()
    alone = client(0)
    rate_alone = REQUESTS / (time.perf_counter() - started)
    record_property("requests_per_second", {THREADS: round(rate), 1: round(rate_alone)})
    print(f"requests per second: {rate:.0f} from {THREADS} threads, {rate_alone:.0f} from one")
    assert all(status == 200 for status, _ in alone.values())
    assert len(json.loads(alone[16][1])["classes"]) == 17
    for answers in together:
        assert answers == alone, "to the bit: JSON shows every digit of a float"
    # Hundreds are usual. With one answer at a time, each waiting for a delayed packet, it would be 25.
    assert rate > 50


def test_a_bad_request_is_told_and_the_next_one_answered(port):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for content in (b"no json", b"{}", b'{"x": [[1, 2]]}', b'{"x": [["a"]]}', b'{"x": [[1], [1, 2]]}'):
        status, answer = ask(connection, content)
        assert status == 400, content
        assert "expected rows of 24 numbers under 'x'" in json.loads(answer)["error"]
    assert ask(connection, json.dumps({"x": [[0.5] * 24]}).encode())[0] == 200


def test_first_calls_of_eight_threads_at_once():
    """The experts are folded at the first answer: by whoever comes first, or by all, and never by halves."""
    student, x = RbMStudent(64, 128, 10).eval(), torch.randn(9, 64)
    with torch.inference_mode():
        expected = student(x)
    for _ in range(25):
        fresh, barrier = copy.deepcopy(student), threading.Barrier(THREADS)

        def first_call(_, fresh=fresh, barrier=barrier):
            with torch.inference_mode():
                barrier.wait()
                return [fresh(x) for _ in range(3)]

        with ThreadPoolExecutor(THREADS) as pool:
            for answers in pool.map(first_call, range(THREADS)):
                assert all(torch.equal(answer, expected) for answer in answers)
