"""Worker processes for parallel runs."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from typing import Any

import torch

from rbm.utils.plugins import load_plugin, loaded_plugins

MOST_JOBS = 1024


@contextmanager
def worker_pool(jobs: int) -> Iterator[Executor]:
    """A pool of ``jobs`` worker processes that load the plugins and share the cores; one job runs in this process.

    The workers end when this process is killed or interrupted, and when the block fails.

    Raises:
        ValueError: more jobs than :data:`MOST_JOBS`.
        ChildProcessError: a worker was killed or exited.
    """
    if jobs > MOST_JOBS:
        raise ValueError(f"jobs is {jobs:,}, expected at most {MOST_JOBS}")
    if jobs == 1:
        yield _InProcessExecutor()
        return
    # Workers are spawned, because forked children of a process with threads may hang.
    threads = max(1, (os.cpu_count() or 1) // jobs)
    start = {"initializer": _start_worker, "initargs": (loaded_plugins(), threads)}
    others = active_children()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), **start) as pool:
        try:
            yield pool
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in active_children():
                if worker not in others:
                    worker.terminate()
            if isinstance(error, BrokenProcessPool):
                raise ChildProcessError(
                    "a worker process ended before its work, perhaps for lack of memory; what was finished is kept:"
                    " go on with the same command, and with fewer --jobs"
                ) from error
            raise


class _InProcessExecutor(Executor):
    """An executor that runs a call immediately in this process; errors are raised by ``submit``."""

    def submit(self, do, /, *arguments: Any, **named: Any) -> Future:
        future: Future = Future()
        future.set_result(do(*arguments, **named))
        return future


def _start_worker(plugins: tuple[str, ...], threads: int) -> None:
    """Load the plugins, and make the worker end when its parent process is killed, instead of waiting forever.

    Ctrl-C reaches all processes of a terminal; workers ignore it, and the parent ends them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    for plugin in plugins:
        load_plugin(plugin)

    def wait() -> None:
        parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
