"""A real server on a free port, in a thread of the test's process; clients, run folders and bodies for it."""

import asyncio
import contextlib
import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rbm
from rbm.config import Config
from rbm.serving.server.run import listen, make_server, run_server
from rbm.training.run_folder import RunFolder, SavedStudent, save_students


class Client:
    """One connection, opened when it is first used and kept.

    Args:
        port: port of the server on this machine.
        timeout: in seconds.
    """

    def __init__(self, port: int, timeout: float = 20.0) -> None:
        self.port, self.timeout = port, timeout
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)

    def ask(self, body: Any, path: str = "/predict", **headers: str) -> tuple[int, Any]:
        """Status and JSON of the response to a POST; a body that is neither bytes nor str is sent as JSON."""
        content = body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body)
        self.connection.request("POST", path, content, headers)
        return self._answer()

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON, or text, of the response to a GET."""
        self.connection.request("GET", path)
        return self._answer()

    def _answer(self) -> tuple[int, Any]:
        answer = self.connection.getresponse()
        self.headers = answer.headers
        content = answer.read()
        if answer.headers["Content-Type"] == "application/json":
            return answer.status, strict_json(content)
        return answer.status, content.decode()

    def fresh(self) -> "Client":
        """A client with a new connection."""
        return Client(self.port, self.timeout)

    def raw(self) -> socket.socket:
        """A new raw connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=self.timeout)

    def send(self, *parts: bytes) -> tuple[int, bytes]:
        """Status and body of the response to these bytes; status 0 if there is none."""
        with self.raw() as connection:
            for part in parts:
                connection.sendall(part)
            return answer_of(connection)


def answer_of(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body of the next response; status 0 if the server closes the connection without one."""
    answer = http.client.HTTPResponse(connection)
    try:
        answer.begin()
        return answer.status, answer.read()
    except (http.client.BadStatusLine, ConnectionResetError):
        return 0, b""


def strict_json(content: bytes) -> Any:
    """Parse standard JSON, without NaN and Infinity."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(content, parse_constant=refuse)


@contextlib.contextmanager
def running(app) -> Iterator[Client]:
    """Serve an application and yield a client; fails if the server does not stop."""
    server, listener = make_server(app), listen("127.0.0.1", 0)
    thread = threading.Thread(target=lambda: asyncio.run(run_server(server, listener)), daemon=True)
    thread.start()
    client = Client(listener.getsockname()[1])
    try:
        yield client
    finally:
        client.connection.close()
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not stop"


def hold_forwards(served) -> tuple[threading.Event, list[int]]:
    """Hold back the forwards of a served student; returns an event that releases them, and the rows of those begun."""
    gate, sizes = threading.Event(), []

    def hold(_, rows):
        sizes.append(len(rows[0]))
        gate.wait(20)

    served.module.register_forward_pre_hook(hold)
    return gate, sizes


def wait_until(condition, seconds: float = 10.0) -> None:
    """Wait until a condition holds; fails if it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.01)


def make_run(
    folder: Path, features: int, classes: int, *, seed: int = 0, encodings: torch.Tensor | None = None
) -> Path:
    """Make a run folder with a student of random weights, replacing an existing one."""
    torch.manual_seed(seed)
    run = RunFolder(folder, Config(), overwrite=True)
    student = rbm.RbMStudent(features + (0 if encodings is None else encodings.shape[1]), 16, classes)
    run.save_phase("rbm", student, {})
    if encodings is not None:
        run.save_tensors("encodings", {"encodings": encodings})
    save_students(folder, "rbm", {"rbm": SavedStudent(student, None if encodings is None else "encodings")})
    return folder


def npy(array: np.ndarray, **options: Any) -> bytes:
    """The bytes that ``numpy.save`` writes."""
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()
