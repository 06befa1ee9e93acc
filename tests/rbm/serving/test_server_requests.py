"""``rbm serve`` and invalid bodies: one sentence in JSON, and the next request is answered."""

import json
import random
import re

import numpy as np
import pytest
import torch

import rbm
from rbm.serving.server import Limits, make_app, requests

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from http_server import make_run, npy, running

F, D, C, NODES = 24, 4, 5, 30


@pytest.fixture(scope="module")
def client():
    torch.manual_seed(0)
    with running(make_app(rbm.RbMStudent(F, 16, C), limits=Limits(body_bytes=2**18, rows=100, timeout=60.0))) as client:
        yield client


@pytest.fixture(scope="module")
def encoded(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("runs") / "encoded", F, C, encodings=torch.randn(NODES, D))
    with running(make_app(run, limits=Limits(timeout=60.0))) as client:
        yield client


ZEROS = [0.0] * F
BAD = {
    "no JSON": (b"no json", "the body is neither JSON"),
    "empty": (b"", "the body is neither JSON"),
    "cut short": (b'{"x": [[1, 2', "the body is neither JSON"),
    "no UTF-8": (b'{"x": "\xff"}', "the body is neither JSON"),
    "nested deeply": (b'{"x": ' + b"[" * 250, "recursion limit exceeded"),
    "objects nested deeply": (b'{"x":' * 250, "recursion limit exceeded"),
    "an integer of 5,000 digits": (b'{"x": [[' + b"9" * 5000 + b"]]}", "number out of range"),
    "NaN": (json.dumps({"x": [[float("nan"), *ZEROS[1:]]]}).encode(), "which has no NaN and no Infinity"),
    "Infinity": (json.dumps({"x": [[float("inf"), *ZEROS[1:]]]}).encode(), "which has no NaN and no Infinity"),
    "-Infinity": (json.dumps({"x": [[-float("inf"), *ZEROS[1:]]]}).encode(), "which has no NaN and no Infinity"),
    "1e39": ({"x": [ZEROS, [1e39, *ZEROS[1:]]]}, "row 1 holds NaN, infinity or a number beyond 3.4e38"),
    "1e400": (b'{"x": [[1e400' + b", 0" * (F - 1) + b"]]}", "row 0 holds NaN, infinity or a number beyond"),
    "10**400": ({"x": [[10**400, *ZEROS[1:]]]}, "a whole number beyond 3.4e38"),
    "3e38 everywhere": ({"x": [[3e38] * F]}, "so large that the student's answer is not finite"),
    "a list": ([ZEROS], "the body holds a list"),
    "null": (b"null", "the body holds null"),
    "no x": ({}, "the body holds nothing"),
    "another key": ({"x": [ZEROS], "y": 1}, "the body holds 'x', 'y'"),
    "x is a number": ({"x": 1}, "'x' is a whole number, expected a list"),
    "a row alone": ({"x": ZEROS}, "row 0 of 'x' is a number, expected a list"),
    "too short": ({"x": [[1, 2]]}, f"row 0 of 'x' holds 2 numbers, expected {F}"),
    "too long": ({"x": [[0] * (F + 1)]}, f"row 0 of 'x' holds {F + 1} numbers, expected {F}"),
    "ragged": ({"x": [ZEROS, [1]]}, f"row 1 of 'x' holds 1 numbers, expected {F}"),
    "strings": ({"x": [["a"] * F]}, "row 0 of 'x' holds a string, expected numbers"),
    "numbers as strings": ({"x": [["1.5"] * F]}, "row 0 of 'x' holds a string, expected numbers"),
    "booleans": ({"x": [[True, *ZEROS[1:]]]}, "row 0 of 'x' holds a boolean, expected numbers"),
    "nulls": ({"x": [[None, *ZEROS[1:]]]}, "row 0 of 'x' holds null, expected numbers"),
    "lists in rows": ({"x": [[[1]] * F]}, "row 0 of 'x' holds a list, expected numbers"),
    "neighbors": ({"x": [ZEROS], "neighbors": [[1]]}, "leave it out"),
    "a column beyond": ({"indices": [[F]], "values": [[1]]}, f"names {F}, expected 0 to {F - 1}"),
    "a column of -1": ({"indices": [[-1]], "values": [[1]]}, f"names -1, expected 0 to {F - 1}"),
    "a column of 10**30": ({"indices": [[10**30]], "values": [[1]]}, f"expected 0 to {F - 1}"),
    "half a column": ({"indices": [[0.5]], "values": [[1]]}, "holds a number, expected whole numbers"),
    "a column twice": ({"indices": [[1, 1]], "values": [[1, 2]]}, "a column of a row twice"),
    "a value in quotes": ({"indices": [[0]], "values": [["1"]]}, "row 0 of 'values' holds a string, expected numbers"),
    "fewer values": ({"indices": [[0, 1]], "values": [[1]]}, "row 0 of 'values' holds 1 numbers, expected 2"),
    "fewer rows of values": ({"indices": [[0], [1]], "values": [[1]]}, "'values' holds 1 rows, expected 2"),
    "npy of NaN": (npy(np.full((1, F), np.nan, np.float32)), "row 0 holds NaN"),
    "npy of 1e39": (npy(np.full((2, F), 1e39)), "row 0 holds NaN, infinity or a number beyond 3.4e38"),
    "npy of another width": (
        npy(np.zeros((2, F + 1), np.float32)),
        rf"shape \[2, {F + 1}\], expected numbers \[B, {F}",
    ),
    "npy of one dimension": (npy(np.zeros(F, np.float32)), rf"expected numbers \[B, {F}"),
    "npy of True rows": (
        npy(np.zeros((1, F), np.float32)).replace(b"(1, 24), }   ", b"(True, 24), }"),
        rf"shape \[True, {F}\], expected numbers \[B, {F}",
    ),
    "npy of strings": (npy(np.full((1, F), "a")), rf"expected numbers \[B, {F}"),
    "npy of objects": (npy(np.full((1, F), None), allow_pickle=True), rf"expected numbers \[B, {F}"),
    "npy cut short": (npy(np.zeros((2, F), np.float32))[:-1], "which does not match its header"),
    "npy with more": (npy(np.zeros((2, F), np.float32)) + b"\0", "193 bytes of numbers, which does not match"),
    "npy that claims 10 TB": (
        npy(np.zeros((2, F), np.float32)).replace(b"(2, 24), }" + b" " * 13, b"(99999999999, 24), }   "),
        "which does not match its header",
    ),
    "npy with a header nested deeply": (
        b"\x93NUMPY\x01\x00" + (9000).to_bytes(2, "little") + b"(" * 9000,
        "whose header cannot be read",
    ),
    "npy of version 9": (b"\x93NUMPY\x09\x00\x02\x00{}", "whose header cannot be read"),
    "npy without a header": (b"\x93NUMPY", "whose header cannot be read"),
    "npy with code for a header": (
        b"\x93NUMPY\x01\x00\x20\x00" + b"__import__('os').system('true')\n",
        "whose header cannot be read",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_told_and_the_next_one_answered(client, name):
    body, said = BAD[name]
    status, answer = client.ask(body)
    assert status == 400, answer
    assert set(answer) == {"error"}
    assert re.search(said, answer["error"]), answer
    assert client.ask({"x": [ZEROS]})[0] == 200


def test_more_rows_than_a_request_may_have(client):
    for body in ({"x": [ZEROS] * 101}, {"indices": [[]] * 101, "values": [[]] * 101}, npy(np.zeros((101, F)))):
        status, answer = client.ask(body)
        assert status == 413
        assert "got 101 rows of 24 numbers, expected at most 100" in answer["error"]


@pytest.mark.parametrize(
    "body",
    [b'{"x": ' + b"[" * 100_000, b'{"x":' * 40_000, b'{"x": [' + b"[]," * 80_000 + b"[]]}", b"[" + b"{}," * 80_000],
    ids=["lists nested deeply", "objects nested deeply", "many lists", "many objects"],
)
def test_lists_are_counted_before_they_are_made(client, monkeypatch, body):
    monkeypatch.setattr(requests, "from_json", None)
    status, answer = client.ask(body)
    assert (status, answer["error"]) == (413, "the body has lists for more than 100 rows, the most of one request")


def test_as_many_rows_as_a_request_may_have(client, encoded):
    """In the form with the most lists."""
    assert client.ask({"indices": [[0]] * 100, "values": [[1]] * 100})[0] == 200
    rows = Limits().rows
    status, answer = encoded.ask({"indices": [[0]] * rows, "values": [[1]] * rows, "neighbors": [[1]] * rows})
    assert (status, len(answer["classes"])) == (200, rows)


def test_few_bytes_do_not_name_gigabytes_of_zeros():
    """Empty rows for a wide student have three bytes each, and would become dense rows of 400 KB."""
    with running(make_app(rbm.MLPStudent(100_000, 4, 2), limits=Limits(body_bytes=2**20))) as client:
        status, answer = client.ask({"indices": [[]] * 4000, "values": [[]] * 4000})
        assert status == 413
        assert "expected at most 10 in one request" in answer["error"]
        assert client.ask({"indices": [[7]] * 10, "values": [[1]] * 10})[0] == 200


def test_bodies_at_random_get_200_or_400(client):
    """Pieces of valid bodies in any order with changed bytes: always JSON, and the server survives."""
    random.seed(0)
    good = json.dumps({"x": [[0.5] * F, [1] * F]}).encode()
    pieces = [
        *(b'{"x": ', b"[[", b"]]", b"}", b"[", b"]", b", ", b"1", b"-1e308", b"NaN", b"null", b'"x"', b"\x00", b"\xff"),
        *(
            b'"indices": ',
            b'"values": ',
            b'"neighbors": ',
            b"true",
            b'"\\ud800"',
            b"{}",
            b":",
            b"1" * 400,
            good,
            b"\x93NUMPY",
        ),
    ]
    statuses = set()
    for turn in range(200):
        if turn % 2:
            body = bytearray(good if turn % 4 == 1 else npy(np.ones((2, F), np.float32)))
            for _ in range(random.randint(1, 4)):
                body[random.randrange(len(body))] = random.randrange(256)
        else:
            body = b"".join(random.choices(pieces, k=random.randint(0, 12)))
        status, answer = client.ask(bytes(body))
        assert status in (200, 400), (body, answer)
        assert set(answer) == ({"error"} if status == 400 else {"classes", "probabilities"})
        statuses.add(status)
    assert statuses == {200, 400}
    assert client.get("/health") == (200, {"status": "ready"})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            {"x": [ZEROS]},
            f"expected {F + D}: {F} features and {D} encodings; or the {F} features alone with 'neighbors'",
        ),
        ({"x": [[0.0] * (F + D)], "neighbors": [[1]]}, f"holds {F + D} numbers, expected {F} features"),
        (
            {"x": [ZEROS], "neighbors": [[NODES]]},
            f"names {NODES}, expected 0 to {NODES - 1}, the training graph's nodes",
        ),
        ({"x": [ZEROS], "neighbors": [[-1]]}, f"names -1, expected 0 to {NODES - 1}"),
        ({"x": [ZEROS], "neighbors": [[1], [2]]}, "'neighbors' holds 2 lists, expected 1"),
        ({"x": [ZEROS, ZEROS], "neighbors": [[1]]}, "'neighbors' holds 1 lists, expected 2"),
        ({"x": [ZEROS], "neighbors": [1]}, "row 0 of 'neighbors' is a whole number, expected a list"),
        ({"x": [ZEROS], "neighbors": [[True]]}, "holds a boolean, expected whole numbers"),
        ({"x": [ZEROS], "neighbors": None}, "'neighbors' is null, expected a list"),
    ],
)
def test_bad_neighbors_are_told(encoded, body, said):
    status, answer = encoded.ask(body)
    assert status == 400
    assert said in answer["error"]
