"""``rbm serve`` and clients that send too much, too slowly, or all at once: other clients are still answered."""

import asyncio
import contextlib
import json
import re
import select
import socket
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import rbm
from rbm.serving.server import Limits, make_app

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from http_server import answer_of, hold_forwards, running, strict_json, wait_until

F = 8
GOOD = json.dumps({"x": [[0.5] * F]}).encode()
HEAD = b"POST /predict HTTP/1.1\r\nHost: here\r\n"


def app_with(**limits):
    return make_app(rbm.RbMStudent(F, 8, 3), limits=Limits(**limits))


@pytest.fixture(scope="module")
def client():
    """A server with low limits and a timeout of a second."""
    with running(app_with(body_bytes=4096, rows=50, queue_rows=50, timeout=1.0)) as client:
        yield client


def told(status_and_body):
    """Status and message of a JSON response."""
    status, body = status_and_body
    return status, strict_json(body)["error"]


@pytest.mark.parametrize(
    ("length", "status", "said"),
    [
        (b"-1", 400, "not valid HTTP"),
        (b"1e30", 400, "not valid HTTP"),
        (b"1" + b"0" * 30, 400, "not valid HTTP"),
        (b"0x10", 400, "not valid HTTP"),
        (b"5, 6", 400, "not valid HTTP"),
        (b"nothing", 400, "not valid HTTP"),
        (b"20000000000", 413, "at most 4,096 bytes"),
        (b"4097", 413, "at most 4,096 bytes"),
    ],
)
def test_content_length_is_checked_before_the_body(client, length, status, said):
    got, message = told(client.send(HEAD + b"Content-Length: " + length + b"\r\n\r\n"))
    assert (got, said in message) == (status, True), message
    assert client.fresh().ask(GOOD)[0] == 200


def test_lines_that_are_no_http_are_told(client):
    for head in (
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\r\n\r\n",
        HEAD + b"no colon\r\n\r\n",
        b"GET / HTTP/one\r\n\r\n",
    ):
        status, message = told(client.send(head))
        assert (status, "not valid HTTP" in message) == (400, True)


@pytest.mark.parametrize("body", [b"-5\r\n", b"1\r\n \r\n" * 4200], ids=["no chunk", "too many chunks"])
def test_head_with_a_bad_body_gets_a_head(client, caplog, body):
    with client.raw() as connection:
        connection.sendall(b"HEAD /predict HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
        content = b""
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(65536):
                content += piece
    assert re.fullmatch(rb"HTTP/1.1 400 .*connection: close\r\n\r\n", content, re.S), "no body"
    assert client.fresh().ask(GOOD)[0] == 200
    assert not caplog.records, "the log would grow with each such request"


def test_two_lengths_are_refused(client):
    status, message = told(client.send(HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc"))
    assert (status, "not valid HTTP" in message) == (400, True)


def test_a_head_without_end_is_refused(client):
    """At 16 KiB, whatever follows; a client that still sends may find the connection closed before it reads."""
    with client.raw() as connection:
        with contextlib.suppress(ConnectionError):
            for i in range(100):
                connection.sendall(b"X-%d: %s\r\n" % (i, b"y" * 1000) if i else HEAD)
        assert answer_of(connection)[0] in (0, 400), "408 would come from the limit on time"
    assert client.fresh().ask(GOOD)[0] == 200


@pytest.mark.parametrize("length", [5000, 98_000_000])
def test_a_long_body_is_dropped_and_its_client_told(client, length):
    """The client sends the whole body before it reads the response, as most clients do."""
    client = client.fresh()
    status, answer = client.ask(b"[" * length)
    assert (status, "at most 4,096 bytes" in answer["error"]) == (413, True)
    assert client.headers["Connection"] == "close"
    assert client.ask(GOOD)[0] == 200


def test_a_long_body_without_a_length_is_dropped_and_its_client_told(client):
    chunk = b"1000\r\n" + b"[" * 4096 + b"\r\n"
    status, message = told(client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 50, b"0\r\n\r\n"))
    assert (status, "at most 4,096 bytes" in message) == (413, True)


def test_a_chunk_of_no_size_is_refused(client):
    status, message = told(client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"-5\r\n[]\r\n"))
    assert (status, "not valid HTTP" in message) == (400, True)
    assert client.fresh().ask(GOOD)[0] == 200


def test_a_body_in_small_chunks_is_answered(client):
    parts = [b"3\r\n" + GOOD[i : i + 3] + b"\r\n" for i in range(0, len(GOOD) // 3 * 3, 3)]
    rest = GOOD[len(GOOD) // 3 * 3 :]
    end = (b"%x\r\n%s\r\n" % (len(rest), rest) if rest else b"") + b"0\r\n\r\n"
    head = HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    assert client.send(head, *parts, end)[0] == 200


def test_a_body_in_too_many_chunks_is_refused():
    """Two megabytes in chunks of one byte would keep the parser busy for seconds while other clients wait."""
    chunks = b"1\r\n \r\n"
    head = HEAD + b"Transfer-Encoding: chunked\r\n"
    with running(app_with(timeout=60.0)) as client, ThreadPoolExecutor(4) as pool:
        end = b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD), GOOD)
        assert client.send(head + b"Connection: close\r\n\r\n", chunks * 4095 + end)[0] == 200
        status, message = told(client.send(head + b"\r\n", chunks * 4097))
        assert (status, "more than 4096 chunks" in message) == (400, True)

        def send(_):
            with contextlib.suppress(ConnectionError):
                client.send(head + b"\r\n", chunks * 2**21)

        sent = [pool.submit(send, i) for i in range(4)]
        started = time.monotonic()
        assert client.ask(GOOD)[0] == 200
        assert time.monotonic() - started < 5
        for one in sent:
            one.result(timeout=20)


def test_a_client_that_asks_first_is_told_before_it_sends(client):
    """``Expect: 100-continue``: continue for a short body, 413 at once for a long one."""
    with client.raw() as connection:
        connection.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(GOOD))
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(GOOD)
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
    with client.raw() as connection:
        connection.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: 99999999\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_compressed_body_is_told(client):
    status, answer = client.fresh().ask(GOOD, **{"Content-Encoding": "gzip"})
    assert (status, "compressed" in answer["error"]) == (415, True)
    assert client.fresh().ask(GOOD, **{"Content-Encoding": "Identity"})[0] == 200, "names of codings have no case"


def test_slow_heads_bodies_and_idle_connections_are_cut(client):
    """Each client sends a byte now and then, which must not restart its timeout."""
    kept = client.fresh()
    assert kept.ask(GOOD)[0] == 200
    slow = {
        "head": (client.raw(), HEAD),
        "body": (client.raw(), HEAD + b"Content-Length: 4000\r\n\r\n{"),
        "silent": (client.raw(), b""),
        "idle after an answer": (kept.connection.sock, b""),
        "slow head after an answer": (client.raw(), HEAD + b"Content-Length: %d\r\n\r\n" % len(GOOD) + GOOD + HEAD),
    }
    started = time.monotonic()
    for connection, begin in slow.values():
        connection.sendall(begin)
    found = dict.fromkeys(slow, b"")
    open_ones = {connection: name for name, (connection, _) in slow.items()}
    while open_ones and time.monotonic() < started + 10:
        for connection in select.select(list(open_ones), [], [], 0.1)[0]:
            try:
                piece = connection.recv(65536)
            except ConnectionResetError:
                piece = b""
            found[open_ones[connection]] += piece
            if not piece:
                del open_ones[connection]
        for connection, name in open_ones.items():
            if "head" in name or name == "body":
                with contextlib.suppress(OSError):
                    connection.sendall(b"a" if "body" in name else b"a: b\r\n")
    took = time.monotonic() - started
    assert not open_ones, f"still open: {open_ones.values()}"
    assert 0.9 < took < 6
    assert re.match(rb"HTTP/1.1 408 .*the head of the request was not complete after 1 seconds", found["head"], re.S)
    assert re.match(rb"HTTP/1.1 408 .*the body was not complete after 1 seconds", found["body"], re.S)
    assert re.match(rb"HTTP/1.1 200 .*HTTP/1.1 408 ", found["slow head after an answer"], re.S)
    assert found["silent"] == found["idle after an answer"] == b""
    for connection, _ in slow.values():
        connection.close()


def test_200_slow_clients_do_not_keep_others_waiting():
    with running(app_with(timeout=3.0)) as client:
        slow = [client.raw() for _ in range(200)]
        for i, connection in enumerate(slow):
            connection.sendall(HEAD if i % 2 else HEAD + b"Content-Length: 4000\r\n\r\n{")
        times = []
        for _ in range(30):
            started = time.monotonic()
            assert client.fresh().ask(GOOD)[0] == 200
            times.append(time.monotonic() - started)
        assert statistics.median(times) < 0.25
        with ThreadPoolExecutor(20) as pool:
            statuses = [status for status, _ in pool.map(answer_of, slow)]
        assert statuses == [408] * 200, "all were cut"
        assert client.ask(GOOD)[0] == 200
        for connection in slow:
            connection.close()


def test_200_connections_at_once_are_all_answered():
    with running(app_with()) as client:
        barrier = threading.Barrier(200)

        def ask(_):
            own = client.fresh()
            barrier.wait()
            status, answer = own.ask(GOOD)
            own.connection.close()
            return status, answer["classes"]

        with ThreadPoolExecutor(200) as pool:
            answers = list(pool.map(ask, range(200)))
        assert answers == [(200, answers[0][1])] * 200


def test_too_many_connections_hear_503_and_more_hear_nothing():
    with running(app_with(connections=4)) as client:
        first = [client.raw() for _ in range(4)]
        wait_until(lambda: client_full(client))
        first[3].sendall(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
        assert answer_of(first[3])[0] == 200, "the fourth of four"
        late = client.fresh()
        status, answer = late.ask(GOOD)
        assert (status, "4 connections are open already" in answer["error"]) == (503, True)
        assert late.headers["Retry-After"] == "1"
        more = [client.raw() for _ in range(8)]
        wait_until(lambda: any(select.select(more, [], [], 0)[0]))
        assert answer_of(select.select(more, [], [], 0)[0][0]) == (0, b"")
        for connection in (*first, *more):
            connection.close()
        wait_until(lambda: client.fresh().ask(GOOD)[0] == 200)


def client_full(client):
    return client.fresh().ask(GOOD)[0] == 503


def test_a_full_queue_says_503_and_when_to_come_again():
    app = app_with(rows=10, queue_rows=10)
    gate, sizes = hold_forwards(app.state.service.served)
    body = {"x": [[0.5] * F] * 10}
    with running(app) as client, ThreadPoolExecutor(2) as pool:
        running_one = pool.submit(client.fresh().ask, body)
        wait_until(lambda: sizes)
        waiting = pool.submit(client.fresh().ask, body)
        wait_until(lambda: app.state.service.batcher.waiting_rows == 10)
        status, answer = client.ask(GOOD)
        assert (status, answer["error"]) == (503, "10 rows are waiting already; try again")
        assert client.headers["Retry-After"] == "1"
        # Requests without rows do not wait.
        assert client.get("/health") == (200, {"status": "ready"})
        assert "rbm_queue_rows 10\n" in client.get("/metrics")[1]
        gate.set()
        assert running_one.result()[0] == waiting.result()[0] == 200
        assert client.ask(GOOD)[0] == 200


def test_bodies_of_all_clients_together_are_bounded():
    """The bodies of slow clients are held up to a limit; beyond it, they get 503."""
    app = app_with(body_bytes=2**16, timeout=20.0)
    with running(app) as client:
        slow = [client.raw() for _ in range(9)]
        for connection in slow[:8]:
            connection.sendall(HEAD + b"Content-Length: 65536\r\n\r\n" + b" " * 65000)
        wait_until(lambda: app.state.service.held_bytes == 8 * 65000)
        slow[8].sendall(HEAD + b"Content-Length: 65536\r\n\r\n" + b" " * 65536)
        status, message = told(answer_of(slow[8]))
        assert (status, "too many request bodies" in message) == (503, True)
        assert client.ask(GOOD)[0] == 200
        for connection in slow:
            connection.close()
        wait_until(lambda: app.state.service.held_bytes == 0)


def test_a_client_that_takes_nothing_of_its_answers_is_cut():
    app = make_app(rbm.MLPStudent(1, 2, 200), limits=Limits(timeout=1.0))
    body = json.dumps({"x": [[0.5]] * 1000}).encode()
    with running(app) as client:
        connection = client.raw()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall((HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body) * 4)
        wait_until(lambda: app.state.service.metrics.rows >= 1000)
        wait_until(lambda: app.state.service.metrics.connections == 0, seconds=6)
        connection.close()
        assert client.ask({"x": [[0.5]]})[0] == 200
        assert "rbm_connections 1\n" in client.get("/metrics")[1]


def test_answers_wait_for_no_packet():
    """Forty requests on one connection; with Nagle's algorithm, each would take 40 ms or more."""
    with running(app_with()) as client:
        times = []
        for _ in range(40):
            started = time.perf_counter()
            client.ask(GOOD)
            times.append(time.perf_counter() - started)
    assert statistics.median(times) < 0.03


def test_requests_in_a_row_without_waiting_are_answered_in_order(client):
    bodies = [json.dumps({"x": [[float(i)] * F] * (i + 1)}).encode() for i in range(5)]
    heads = [HEAD + b"Content-Length: %d\r\n" % len(body) for body in bodies]
    heads[-1] += b"Connection: close\r\n"
    with client.raw() as connection:
        connection.sendall(b"".join(head + b"\r\n" + body for head, body in zip(heads, bodies, strict=True)))
        content = b""
        while piece := connection.recv(65536):
            content += piece
    sizes = [len(json.loads(found)["classes"]) for found in re.findall(rb"\r\n\r\n(\{.*?\]\]\})", content)]
    assert sizes == [1, 2, 3, 4, 5]


def test_a_reload_of_a_student_that_has_no_folder_is_told():
    app = app_with()
    with pytest.raises(ValueError, match="there is no run folder to reload"):
        asyncio.run(app.state.service.reload())


def test_a_client_that_never_ends_its_body_does_not_keep_a_server_from_stopping():
    with contextlib.closing(socket.socket()) as connection:
        with running(app_with(grace=1.0, timeout=60.0)) as client:
            connection.connect(("127.0.0.1", client.port))
            connection.sendall(HEAD + b"Content-Length: 4000\r\n\r\n{")
            assert client.ask(GOOD)[0] == 200
            started = time.monotonic()
        assert 0.9 < time.monotonic() - started < 10
        connection.settimeout(10)
        status, message = told(answer_of(connection))
        assert (status, message) == (503, "the server is stopping")


def test_a_forward_that_hangs_keeps_a_server_for_its_grace_and_not_for_twice_that():
    app = app_with(grace=3.0)
    gate, sizes = hold_forwards(app.state.service.served)
    with ThreadPoolExecutor(1) as pool:
        with running(app) as client:
            answer = pool.submit(client.fresh().ask, GOOD)
            wait_until(lambda: sizes)
            started = time.monotonic()
        assert 2.9 < time.monotonic() - started < 5.5
        gate.set()
        assert answer.result()[0] == 503
