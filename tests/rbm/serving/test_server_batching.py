"""The queue of ``rbm serve`` and its thread: what is refused when no forward can run."""

import asyncio

import pytest
import torch

import rbm
from rbm.serving.server import Limits
from rbm.serving.server.student import open_student

pytest.importorskip("starlette")
from http_server import hold_forwards, wait_until

from rbm.serving.server.batching import Batcher
from rbm.serving.server.metrics import Metrics
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
        batcher.close()
        assert batcher._worker.is_alive()
        assert not batcher.alive
        await refused(batcher, served)
        gate.set()
        assert (await asyncio.wait_for(running, 5)).shape == (2, 3)

    asyncio.run(close_while_one_runs())
    batcher._worker.join(5)
    assert not batcher._worker.is_alive(), "it ends without another request"
