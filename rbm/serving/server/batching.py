"""Batching: requests that arrive during a forward are answered together by the next forward.

There is no waiting time to fill a batch: if the worker is idle, a request is answered at once. Batches therefore grow
only with the load.
"""

import asyncio
import threading
from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rbm.serving.server.limits import Limits
from rbm.serving.server.metrics import Metrics
from rbm.serving.server.requests import RefusedError
from rbm.serving.server.student import ServedStudent


class _Question(NamedTuple):
    served: ServedStudent
    rows: Tensor
    answer: asyncio.Future
    loop: asyncio.AbstractEventLoop


class Batcher:
    """A queue of rows, and the thread that runs the student.

    Args:
        limits: ``rows`` per forward, and ``queue_rows`` that may wait.
        metrics: counts forwards.
        threads: threads per forward.

    Attributes:
        waiting_rows: rows in the queue.
        grace: seconds that :meth:`close` waits for the current forward; 0 once a server has given up on requests.
    """

    def __init__(self, limits: Limits, metrics: Metrics, threads: int) -> None:
        self.limits, self.metrics = limits, metrics
        self.waiting_rows, self.grace = 0, limits.grace
        self._queue: deque[_Question] = deque()
        self._changed, self._closed = threading.Condition(), False
        # A daemon: a forward that hangs must not keep the process alive.
        self._worker = threading.Thread(target=self._work, args=(threads,), name="rbm-forward", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the worker thread is running."""
        return self._worker.is_alive() and not self._closed

    def start(self) -> None:
        """Start the worker thread."""
        self._worker.start()

    def close(self) -> None:
        """Finish the current forward, drop the waiting requests, and end the thread."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify()
        self._worker.join(min(self.grace, threading.TIMEOUT_MAX))

    async def answer(self, served: ServedStudent, rows: Tensor) -> np.ndarray:
        """Probabilities ``[B, C]`` of ``rows [B, in_channels]``.

        Raises:
            RefusedError: 503, the queue is full, or the thread does not run and nothing would be answered.
        """
        loop = asyncio.get_running_loop()
        question = _Question(served, rows, loop.create_future(), loop)
        with self._changed:
            if not self.alive:
                message = "no forward pass can run: the thread for them has not started, or has ended"
                raise RefusedError(503, message, retry_after=1)
            if self.waiting_rows + len(rows) > self.limits.queue_rows:
                raise RefusedError(503, f"{self.waiting_rows} rows are waiting already; try again", retry_after=1)
            self.waiting_rows += len(rows)
            self._queue.append(question)
            self._changed.notify()
        return await question.answer

    def _take(self) -> list[_Question]:
        """Take the questions for the next forward, in order and for one student; none if closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            taken, rows = [], 0
            while self._queue:
                question = self._queue[0]
                # A request is answered by the student it was decoded for: its rows may hold encodings of that graph.
                fits = not taken or question.served is taken[0].served
                if not fits or (taken and rows + len(question.rows) > self.limits.rows):
                    break
                taken.append(self._queue.popleft())
                rows += len(question.rows)
            self.waiting_rows -= rows
            return taken

    def _work(self, threads: int) -> None:
        torch.set_num_threads(threads)
        while taken := self._take():
            try:
                rows = taken[0].rows if len(taken) == 1 else torch.cat([question.rows for question in taken])
                result = taken[0].served.probabilities(rows).numpy()
            except Exception as error:  # whatever this forward raises, the next one may succeed
                result = error
            try:
                taken[0].loop.call_soon_threadsafe(self._deliver, taken, result)
            except RuntimeError:  # the loop was closed: the server is gone
                return

    def _deliver(self, taken: list[_Question], result: np.ndarray | Exception) -> None:
        self.metrics.batch_rows.observe(sum(len(question.rows) for question in taken))
        start = 0
        for question in taken:
            stop = start + len(question.rows)
            if question.answer.done():  # cancelled
                pass
            elif isinstance(result, Exception):
                question.answer.set_exception(result)
            else:
                question.answer.set_result(result[start:stop])
            start = stop
