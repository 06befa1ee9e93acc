"""The queue of ``rbm serve`` and its thread, the student, and the counters, without HTTP or with a single request."""

import asyncio
import time

import pytest
import torch

import rbm
from rbm.serving.server import Limits, make_app
from rbm.serving.server.student import open_student

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from http_server import hold_forwards, make_run, running, wait_until

from rbm.serving.server import app as server_app
from rbm.serving.server.batching import Batcher
from rbm.serving.server.metrics import Histogram, Metrics
from rbm.serving.server.requests import RefusedError

F = 8


@pytest.fixture
def served():
    return open_student(rbm.RbMStudent(F, 8, 3))


async def refused(batcher, served):
    """The error of a request that must not wait."""
    with pytest.raises(RefusedError, match="no forward pass can run") as error:
        await asyncio.wait_for(batcher.answer(served, torch.zeros(1, F)), 5)
    assert (error.value.status, error.value.retry_after) == (503, 1)


def test_without_its_thread_requests_are_refused_and_do_not_wait(served):
    """A server that does not run the application's lifespan does not start the thread."""
    batcher = Batcher(Limits(), Metrics(), 1)
    assert not batcher.alive
    asyncio.run(refused(batcher, served))
    assert batcher.waiting_rows == 0


def test_a_closed_queue_is_not_alive_though_its_last_forward_still_runs(served):
    batcher = Batcher(Limits(grace=0.1), Metrics(), 1)
    gate, sizes = hold_forwards(served)

    async def close_while_one_runs():
        batcher.start()
        assert batcher.alive
        running = asyncio.create_task(batcher.answer(served, torch.zeros(2, F)))
        await asyncio.to_thread(wait_until, lambda: sizes)
        waiting = asyncio.create_task(batcher.answer(served, torch.zeros(1, F)))
        await asyncio.sleep(0)
        batcher.close()
        assert batcher._worker.is_alive()
        assert not batcher.alive
        await refused(batcher, served)
        gate.set()
        assert (await asyncio.wait_for(running, 5)).shape == (2, 3)
        waiting.cancel()

    asyncio.run(close_while_one_runs())
    batcher._worker.join(5)
    assert not batcher._worker.is_alive(), "it ends without another request"
    assert sizes == [2], "what waits is dropped"


def test_a_grace_beyond_what_a_thread_can_wait_is_no_error(served):
    batcher = Batcher(Limits(grace=1e300), Metrics(), 1)
    batcher.start()
    batcher.close()
    assert not batcher._worker.is_alive()


def test_a_request_that_is_cancelled_costs_the_others_of_its_batch_nothing(served):
    batcher = Batcher(Limits(rows=4), Metrics(), 1)
    gate, sizes = hold_forwards(served)

    async def cancel_one_of_two():
        batcher.start()
        first = asyncio.create_task(batcher.answer(served, torch.zeros(1, F)))
        await asyncio.to_thread(wait_until, lambda: sizes)
        one, other = (asyncio.create_task(batcher.answer(served, torch.zeros(2, F))) for _ in range(2))
        await asyncio.sleep(0)
        assert batcher.waiting_rows == 4
        one.cancel()
        await asyncio.sleep(0)
        gate.set()
        assert (await asyncio.wait_for(first, 5)).shape == (1, 3)
        assert (await asyncio.wait_for(other, 5)).shape == (2, 3)
        larger = batcher.answer(served, torch.zeros(9, F))  # more than a forward takes, alone
        assert (await asyncio.wait_for(larger, 5)).shape == (9, 3)

    asyncio.run(cancel_one_of_two())
    batcher.close()
    assert sizes == [1, 4, 9]
    assert batcher.waiting_rows == 0


def test_a_batch_holds_rows_of_one_student_up_to_the_limit_in_their_order(served):
    other, batcher = open_student(rbm.RbMStudent(F, 8, 5)), Batcher(Limits(rows=4, queue_rows=9), Metrics(), 1)
    gate, sizes = hold_forwards(served)
    x = torch.randn(7, F)

    async def ask():
        batcher.start()
        first = asyncio.create_task(batcher.answer(served, x[:1]))
        await asyncio.to_thread(wait_until, lambda: sizes)
        parts = [(served, x[:2]), (served, x[2:3]), (served, x[3:5]), (other, x[5:6]), (served, x[6:7])]
        waiting = [asyncio.create_task(batcher.answer(*part)) for part in parts]
        await asyncio.sleep(0)
        with pytest.raises(RefusedError, match="7 rows are waiting already"):
            await asyncio.wait_for(batcher.answer(served, x[:3]), 5)
        gate.set()
        for (student, rows), answer in zip(parts, await asyncio.wait_for(asyncio.gather(*waiting), 5), strict=True):
            torch.testing.assert_close(torch.from_numpy(answer), student.probabilities(rows))
        await first

    asyncio.run(ask())
    batcher.close()
    assert sizes[:4] == [1, 3, 2, 1]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_forward_has_its_threads(threads):
    app, found = make_app(rbm.RbMStudent(F, 8, 3), threads=threads), []
    app.state.service.served.module.register_forward_pre_hook(lambda *_: found.append(torch.get_num_threads()))
    with running(app) as client:
        assert client.ask({"x": [[0.5] * F]})[0] == 200
    assert found == [threads]


def test_health_of_a_server_whose_thread_has_ended():
    app = make_app(rbm.RbMStudent(F, 8, 3))
    with running(app) as client:
        assert client.get("/health") == (200, {"status": "ready"})
        app.state.service.batcher.close()
        assert client.get("/health") == (503, {"status": "stopped"})
        status, answer = client.ask({"x": [[0.5] * F]})
        assert (status, "no forward pass can run" in answer["error"]) == (503, True)


def test_an_application_can_be_started_again(tmp_path):
    app = make_app(make_run(tmp_path / "run", F, 3))
    for requests in (1, 2):
        with running(app) as client:
            assert client.get("/health")[0] == 200
            assert client.ask({"x": [[0.5] * F]})[0] == 200
            assert client.ask({"x": [[0.123456] * F] * 1_500})[0] == 200, "a body that another thread parses"
            assert asyncio.run(app.state.service.reload()).endswith("3 classes")
        assert not app.state.service.batcher.alive
        assert app.state.service.metrics.rows == 1_501 * requests


def test_a_reload_keeps_8_bits_and_two_reloads_do_not_overlap(tmp_path, monkeypatch):
    service = make_app(make_run(tmp_path / "run", F, 3), quantize="int8").state.service
    weights, active, most = service.served.module.state_dict().keys(), [], []

    def opened(*arguments):
        active.append(arguments)
        most.append(len(active))
        time.sleep(0.1)
        active.pop()
        return open_student(*arguments)

    monkeypatch.setattr(server_app, "open_student", opened)

    async def reload_twice():
        await asyncio.gather(service.reload(), service.reload())

    asyncio.run(reload_twice())
    assert service.served.module.state_dict().keys() == weights
    assert most == [1, 1], "the one that is asked for last is the one that stays"


def test_a_student_is_put_into_eval_mode_and_gets_rows_in_its_dtype():
    student = rbm.MLPStudent(F, 8, 3).double().train()
    served, x = open_student(student), torch.randn(5, F)
    assert not student.training
    found = served.probabilities(x)
    assert found.dtype == torch.float32
    with torch.inference_mode():
        torch.testing.assert_close(found, student(x.double()).softmax(-1).float())


def test_a_student_of_nan_is_refused():
    student = rbm.MLPStudent(F, 8, 3)
    torch.nn.init.constant_(next(student.parameters()), float("nan"))
    with pytest.raises(ValueError, match="a row of zeros gets probabilities that are not finite; train it anew"):
        open_student(student)


def test_rows_of_one_width_in_other_parts_are_refused(tmp_path):
    """Eight features and four encodings, then seven and five: clients that send neighbors send other rows."""
    first, second = (
        open_student(make_run(tmp_path / f"{width}", 12 - width, 3, encodings=torch.randn(30, width)))
        for width in (4, 5)
    )
    first.check_successor(first)
    with pytest.raises(ValueError, match="takes 7 features and 5 encodings, expected 8 and 4"):
        first.check_successor(second)


def test_a_bucket_holds_its_bound():
    histogram = Histogram((1, 4))
    for value in (1, 4, 5):
        histogram.observe(value)
    assert list(histogram.lines("n")) == [
        *('n_bucket{le="1"} 1', 'n_bucket{le="4"} 2', 'n_bucket{le="+Inf"} 3'),
        *("n_sum 10.0", "n_count 3"),
    ]
