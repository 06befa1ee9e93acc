"""Worker processes for parallel runs."""

import os
import threading
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from typing import Any

import torch

from rbm.utils.plugins import load_plugin, loaded_plugins


def worker_pool(jobs: int) -> Executor:
    """A pool of ``jobs`` worker processes that load the plugins and share the cores; one job runs in this process.

    The workers end when this process is killed.
    """
    if jobs == 1:
        return _Here()
    # Forked children of a process with threads may hang, so workers are spawned.
    threads = max(1, (os.cpu_count() or 1) // jobs)
    start = {"initializer": _start_worker, "initargs": (loaded_plugins(), threads)}
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), **start)


class _Here(Executor):
    """Does what is submitted at once; what it raises comes out of ``submit``."""

    def submit(self, do, /, *arguments: Any, **named: Any) -> Future:
        future: Future = Future()
        future.set_result(do(*arguments, **named))
        return future


def _start_worker(plugins: tuple[str, ...], threads: int) -> None:
    """Know the plugins, and end when the process that one works for is killed, instead of waiting for ever."""
    torch.set_num_threads(threads)
    for plugin in plugins:
        load_plugin(plugin)

    def wait() -> None:
        parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
