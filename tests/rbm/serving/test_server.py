"""``rbm serve``: answers are the student's, for concurrent clients too; a bad request gets one sentence in JSON."""

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import rbm
from rbm.config import Config
from rbm.datasets.encodings import transfer
from rbm.serving.server import Limits, make_app, serve
from rbm.training.run_folder import RunFolder, SavedStudent, load_encodings, save_students

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from http_server import Client, hold_forwards, make_run, npy, running, wait_until

F, D, C, NODES = 24, 4, 5, 30
THREADS, REQUESTS = 8, 40


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "plain", F, C)


@pytest.fixture(scope="module")
def student(run):
    return rbm.load(run)


@pytest.fixture(scope="module")
def client(run):
    limits = Limits(body_bytes=2**18, rows=100, queue_rows=2000, timeout=60.0)  # between two tests on a busy machine
    with running(make_app(run, limits=limits)) as client:
        yield client


@pytest.fixture(scope="module")
def encoded(tmp_path_factory):
    """A run with encodings, and a client of its server."""
    run = make_run(tmp_path_factory.mktemp("runs") / "encoded", F, C, encodings=torch.randn(NODES, D))
    with running(make_app(run, limits=Limits(timeout=60.0))) as client:
        yield run, client


def check(answer, student, x):
    """Compare classes and probabilities with those of the rows alone, up to rounding in another order of sums."""
    with torch.inference_mode():
        expected = torch.cat([student(row[None]) for row in x]).softmax(-1)
    got = torch.tensor(answer["probabilities"])
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)
    assert answer["classes"] == got.argmax(-1).tolist()


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 100])
def test_answers_are_the_students(client, student, rows):
    x = torch.randn(rows, F)
    status, answer = client.ask({"x": x.tolist()})
    assert status == 200
    check(answer, student, x)


@pytest.mark.parametrize(
    "body",
    [
        lambda x: npy(x.numpy()),
        lambda x: npy(x.double().numpy()),
        lambda x: npy(np.asfortranarray(x.numpy())),
        lambda x: npy(x.numpy().astype(">f4")),
        lambda x: json.dumps({"indices": [list(range(F))] * 7, "values": x.tolist()}),
        lambda x: json.dumps(
            {"indices": [list(range(F))[::-1]] * 7, "values": [list(reversed(row)) for row in x.tolist()]}
        ),
    ],
    ids=["npy", "float64 npy", "npy by columns", "big-endian npy", "sparse", "sparse in another order"],
)
def test_every_form_of_rows_gets_the_same_answer(client, student, body):
    x = torch.randn(7, F)
    status, answer = client.ask(body(x))
    assert status == 200, answer
    assert answer == client.ask({"x": x.tolist()})[1]


def test_zeros_need_not_be_sent(client, student):
    x = torch.zeros(3, F)
    x[0, 5], x[2, 23], x[2, 0] = 1.5, -2, 1
    status, answer = client.ask({"indices": [[5], [], [23, 0]], "values": [[1.5], [], [-2, 1]]})
    assert status == 200, answer
    check(answer, student, x)


def test_no_rows_get_no_answers(client):
    for body in ({"x": []}, {"indices": [], "values": []}, npy(np.zeros((0, F), np.float32))):
        assert client.ask(body) == (200, {"classes": [], "probabilities": []})


def test_eight_clients_get_the_answers_of_one(client, student):
    rows = [torch.randn(1 + i % 17, F) for i in range(REQUESTS)]

    def ask_all(first):
        own = Client(client.port)
        found = {
            turn: own.ask({"x": rows[turn].tolist()}) for turn in ((first + i) % REQUESTS for i in range(REQUESTS))
        }
        own.connection.close()
        return found

    with ThreadPoolExecutor(THREADS) as pool:
        for found in pool.map(ask_all, range(0, 5 * THREADS, 5)):
            for turn, (status, answer) in found.items():
                assert status == 200
                check(answer, student, rows[turn])


def test_requests_that_come_together_share_a_forward(run):
    """While the first forward is held, requests queue up; the next forwards answer them, 15 rows at a time."""
    app = make_app(run, limits=Limits(rows=15))
    service = app.state.service
    gate, sizes = hold_forwards(service.served)
    with running(app) as client, ThreadPoolExecutor(8) as pool:
        x = torch.randn(8, 3, F)
        answers = [pool.submit(Client(client.port).ask, {"x": x[0].tolist()})]
        wait_until(lambda: sizes)
        answers += [pool.submit(Client(client.port).ask, {"x": rows.tolist()}) for rows in x[1:]]
        wait_until(lambda: service.batcher.waiting_rows == 21)
        gate.set()
        for rows, answer in zip(x, answers, strict=True):
            status, content = answer.result()
            assert status == 200
            check(content, rbm.load(run), rows)
        _, text = client.get("/metrics")
    assert sizes == [3, 15, 6]
    assert 'rbm_batch_rows_bucket{le="4"} 1\n' in text
    assert 'rbm_batch_rows_bucket{le="16"} 3\n' in text
    assert "rbm_batch_rows_sum 24" in text
    assert "rbm_rows_total 24\n" in text
    assert "rbm_queue_rows 0\n" in text


def test_a_request_is_answered_by_the_student_that_its_rows_were_made_for(tmp_path):
    """Encodings of one graph are useless to another graph's student, so a reload must not affect queued requests."""
    folder, runs = tmp_path / "run", []
    x = torch.randn(2, 1, F)
    make_run(folder, F, C, encodings=torch.randn(NODES, D))
    app = make_app(folder)
    service = app.state.service
    gate, sizes = hold_forwards(service.served)
    with running(app) as client, ThreadPoolExecutor(3) as pool:
        ask = [{"x": rows.tolist(), "neighbors": [[3]]} for rows in x]
        answers = [pool.submit(client.fresh().ask, ask[0])]
        wait_until(lambda: sizes)
        answers.append(pool.submit(client.fresh().ask, ask[1]))
        wait_until(lambda: service.batcher.waiting_rows == 1)
        runs.append((rbm.load(folder), load_encodings(folder)[[3]]))
        make_run(folder, F, C, seed=1, encodings=torch.randn(NODES, D))
        runs.append((rbm.load(folder), load_encodings(folder)[[3]]))
        asyncio.run(service.reload())
        answers.append(pool.submit(client.fresh().ask, ask[1]))
        wait_until(lambda: service.batcher.waiting_rows == 2)
        gate.set()
        for i, rows, (student, own) in ((0, x[0], runs[0]), (1, x[1], runs[0]), (2, x[1], runs[1])):
            status, answer = answers[i].result()
            assert status == 200
            check(answer, student, torch.cat([rows, own], dim=1))


def test_a_forward_that_fails_is_told_and_the_next_one_answered(run):
    app, failures = make_app(run), [RuntimeError("on purpose")]

    def fail_once(*_):
        if failures:
            raise failures.pop()

    app.state.service.served.module.register_forward_pre_hook(fail_once)
    with running(app) as client:
        assert client.ask({"x": [[0.5] * F]}) == (500, {"error": "the server failed; its log says why"})
        assert client.ask({"x": [[0.5] * F]})[0] == 200
        assert 'rbm_requests_total{status="500"} 1\n' in client.get("/metrics")[1]


def test_encodings_come_with_the_row_or_from_its_neighbors(encoded):
    run, client = encoded
    student = rbm.load(run)
    known = load_encodings(run)
    x = torch.randn(3, F)
    neighbors = [[3, 17, 3], [], [NODES - 1]]
    edges = torch.tensor([[3, 17, 3, NODES - 1], [NODES, NODES, NODES, NODES + 2]])
    own = transfer(known, torch.arange(NODES), edges, NODES + 3)[NODES:]
    rows = torch.cat([x, own], dim=1)
    by_row = client.ask({"x": rows.tolist()})
    assert by_row[0] == 200
    check(by_row[1], student, rows)
    assert client.ask({"x": x.tolist(), "neighbors": neighbors}) == by_row
    sparse = {"indices": [list(range(F))] * 3, "values": x.tolist(), "neighbors": neighbors}
    assert client.ask(sparse) == by_row


def test_info_says_what_a_row_is(client, encoded):
    status, info = client.get("/info")
    assert status == 200
    expected = {"name": "plain", "student": "RbMStudent", "in_channels": F, "num_classes": C, "rows": f"{F} features"}
    assert expected.items() <= info.items()
    assert info["limits"] == {"body_bytes": 2**18, "rows": 100, "timeout_seconds": 60.0}
    info = encoded[1].get("/info")[1]
    assert (info["features"], info["encodings"], info["in_channels"]) == (F, D, F + D)


def test_any_student_of_a_run_by_its_method(tmp_path, command):
    folder, known = make_run(tmp_path / "run", F, C, encodings=torch.randn(NODES, D)), torch.randn(2, F)
    students = {"rbm": SavedStudent(rbm.load(folder), "encodings"), "glnn": SavedStudent(rbm.MLPStudent(F, 8, C), None)}
    RunFolder(folder, Config(), resume=True).save_phase("glnn", students["glnn"].student, {})
    save_students(folder, "rbm", students)
    app = make_app(folder, method="glnn")
    with running(app) as client:
        for _ in range(2):
            status, answer = client.ask({"x": known.tolist()})
            assert status == 200
            check(answer, students["glnn"].student.eval(), known)
            info = client.get("/info")[1]
            assert (info["method"], info["student"], info["encodings"]) == ("glnn", "MLPStudent", 0)
            asyncio.run(app.state.service.reload())  # keeps the method
    with running(make_app(folder)) as client:
        assert client.get("/info")[1]["method"] == "rbm"
    status, _, error = command("serve", folder, "--method", "gnn")
    assert (status, "method is 'gnn', but" in error) == (2, True)
    with pytest.raises(ValueError, match="method is 'glnn', but the student was given as an object; leave it out"):
        make_app(students["glnn"].student, method="glnn")


def test_metrics_are_prometheus_text(client):
    client.ask({"x": [[0.0] * F] * 2})
    client.ask("no json")
    status, text = client.get("/metrics")
    assert status == 200
    assert client.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    samples = {}
    for line in text.splitlines():
        if line.startswith("#"):
            assert re.fullmatch(r"# (HELP rbm_\w+ .+\.|TYPE rbm_\w+ (counter|gauge|histogram))", line)
            continue
        name, value = re.fullmatch(r'(rbm_\w+(?:\{\w+="[^"]+"\})?) (\S+)', line).groups()
        assert name not in samples
        samples[name] = float(value)
    assert samples['rbm_requests_total{status="200"}'] >= 1
    assert samples['rbm_requests_total{status="400"}'] >= 1
    assert samples["rbm_rows_total"] >= 2
    assert samples['rbm_request_seconds_bucket{le="+Inf"}'] == samples["rbm_request_seconds_count"] >= 2


def test_times_are_counted_below_the_path_of_a_proxy(run):
    app = make_app(run)

    async def below(scope, *rest):  # as by uvicorn --root-path /models
        if scope["type"] == "http":
            scope |= {"root_path": "/models", "path": f"/models{scope['path']}"}
        await app(scope, *rest)

    below.state = app.state
    with running(below) as client:
        client.ask({"x": []})
        client.get("/info")
        assert "rbm_request_seconds_count 1\n" in client.get("/metrics")[1]


def test_other_paths_and_methods_are_told(client):
    for path in ("/nowhere", "/info/"):
        status, answer = client.get(path)
        assert (status, f"GET {path} is not served" in answer["error"]) == (404, True), "also no redirect"
    status, answer = client.get("/predict")
    assert status == 405
    assert "GET /predict is not served, expected one of POST /predict" in answer["error"]


def test_without_starlette_one_sentence(monkeypatch, run, command):
    monkeypatch.setitem(__import__("sys").modules, "starlette", None)
    status, _, error = command("serve", run)
    assert status == 2
    assert error == "Error: rbm serve needs starlette, which is not installed: pip install 'rbm-kernels[serve]'"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-rows", "0"], "rows is 0, expected at least 1"),
        (["--timeout", "nan"], "timeout is nan, expected a positive number"),
        (["--max-queue", "5"], "queue_rows is 5, expected at least the 4096 rows"),
        (["--max-rows", "20000"], "may have; raise it (--max-queue), or lower rows (--max-rows)"),
        (["--max-connections", "100000000"], "connections: so many need 200000100 open files"),
        (["--host", "no such host"], "host 'no such host', port 8000: cannot listen there"),
        (["--host", "no such host"], "name another by --host"),
        (["--host", "a" * 80], "port 8000: cannot listen there"),
    ],
)
def test_bad_options_are_told(run, command, options, said):
    status, _, error = command("serve", run, *options)
    assert status == 2
    assert said in error


@pytest.mark.parametrize("port", [70000, -1])
def test_a_port_that_does_not_exist_is_told(run, port):
    """The system would listen on 70000 - 65536 = 4464."""
    with pytest.raises(ValueError, match=f"port is {port}, expected at"):
        serve(run, port=port, tell=lambda line: pytest.fail(line))


def test_threads_are_checked():
    with pytest.raises(ValueError, match="threads is 0, expected at least 1"):
        make_app(rbm.MLPStudent(F, 8, C), threads=0)


def test_limits_are_whole_numbers_where_they_count():
    with pytest.raises(TypeError, match=r"rows is 1\.5, expected a whole number"):
        Limits(rows=1.5)


def test_an_address_in_use_is_told(client, run, command):
    status, _, error = command("serve", run, "--port", client.port)
    assert status == 2
    assert f"port {client.port}: cannot listen there (Address already in use); name another by --port" in error
