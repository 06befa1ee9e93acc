"""``rbm serve`` and clients at its limits that do nothing wrong, and clients that leave."""

import contextlib
import json
import socket
import time

import pytest

import rbm
from rbm.serving.server import Limits, make_app

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from http_server import answer_of, running, wait_until

F = 8
GOOD = json.dumps({"x": [[0.5] * F]}).encode()
HEAD = b"POST /predict HTTP/1.1\r\nHost: here\r\n"


@pytest.fixture(scope="module")
def app():
    return make_app(rbm.RbMStudent(F, 8, 3), limits=Limits(body_bytes=4096, timeout=1.0))


@pytest.fixture(scope="module")
def client(app):
    with running(app) as client:
        yield client


def test_a_body_of_the_largest_size_is_answered(client):
    body = GOOD.ljust(4096)
    assert client.fresh().ask(body)[0] == 200
    half = b"800\r\n%s\r\n"
    chunks = half % body[:2048] + half % body[2048:] + b"0\r\n\r\n"
    assert client.send(HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n", chunks)[0] == 200


def test_chunks_are_counted_for_each_request():
    """Twice 3000 chunks on one connection; 4096 are allowed in one body."""
    request = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 3000
    end = b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD), GOOD)
    with running(make_app(rbm.RbMStudent(F, 8, 3))) as client, client.raw() as connection:
        for _ in range(2):
            connection.sendall(request + end)
            assert answer_of(connection)[0] == 200


def test_a_connection_in_use_stays_open(client):
    """The timeout of a second begins anew with each response."""
    own = client.fresh()
    own.connection.connect()
    opened = own.connection.sock
    for _ in range(4):
        assert own.ask(GOOD)[0] == 200
        time.sleep(0.5)
    assert own.connection.sock is opened
    own.connection.close()


@pytest.mark.parametrize("path", ["/predict", "/nowhere"])
def test_a_client_that_leaves_in_the_middle_of_its_body(app, client, caplog, path):
    with client.raw() as connection:
        connection.sendall(b"POST %s HTTP/1.1\r\nHost: here\r\nContent-Length: 100\r\n\r\n{" % path.encode())
        if path == "/predict":
            wait_until(lambda: app.state.service.held_bytes == 1)
    assert client.fresh().ask(GOOD)[0] == 200
    wait_until(lambda: app.state.service.held_bytes == 0)
    assert not caplog.records, "the log would grow with each such client"


def test_a_client_that_reads_slowly_gets_its_whole_answer():
    """It takes longer than the timeout of a second, and never stops for so long."""
    body = json.dumps({"x": [[0.5]] * 1000}).encode()
    with running(make_app(rbm.MLPStudent(1, 2, 200), limits=Limits(timeout=1.0))) as client:
        with contextlib.closing(socket.socket()) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
            connection.settimeout(10)
            connection.connect(("127.0.0.1", client.port))
            connection.sendall(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            content = b""
            while piece := connection.recv(2**18):
                content += piece
                time.sleep(0.1 if len(content) < 2**20 else 0)
        head, _, answer = content.partition(b"\r\n\r\n")
        assert b"content-length: %d\r\n" % len(answer) in head.lower() + b"\r\n"
