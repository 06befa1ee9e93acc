"""``rbm`` in a process of its own, forked in a tenth of a second from one that has imported the package.

A process that Python starts spends seven seconds of processor time on imports. First uses of the package, and all that
concerns processes themselves, are tested by ``python -m rbm``: ``test_cli.py``, ``test_interruptions.py``.
"""

import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

_PRELOADED = [__name__, "rbm.cli", "rbm.distillation.distill", "rbm.serving.latency", "torch_geometric"]


def forking(method: str = "forkserver") -> multiprocessing.context.BaseContext:
    """A context whose processes have imported the package; ``method`` is there to stand for ``get_context``."""
    forkserver.set_forkserver_preload(_PRELOADED)
    # It does not take over this one's path.
    with interruptible(), mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


class RbmProcess:
    """``rbm`` with these arguments, in the folder ``cwd``, in a session of its own.

    ``largest_file``: a write beyond so many bytes fails, as one to a full disk does.

    Attributes:
        pid: of the process.
    """

    def __init__(self, *arguments: object, cwd: Path, largest_file: int | None = None):
        self._files = [cwd / f".{name}.{time.monotonic_ns()}" for name in ("out", "err")]
        files = [str(path) for path in self._files]
        command = (str(cwd), [str(argument) for argument in arguments], files, largest_file)
        self._process = forking().Process(target=_run, args=command)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """As of ``subprocess``: a signal's number is negative."""
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """To this process alone."""
        os.kill(self.pid, number)

    def finish(self, timeout: float = 300) -> tuple[str, str]:
        """Wait for its end: what it wrote to standard output and to standard error.

        Raises:
            AssertionError: it has not ended by then. It is killed.
        """
        self._process.join(timeout)
        if self.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
            raise AssertionError(f"rbm did not end within {timeout} seconds")
        return tuple(path.read_text() for path in self._files)


@contextmanager
def interruptible() -> Iterator[None]:
    """Around a process's start: Ctrl-C reaches it. What a shell runs in the background inherits that it does not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _run(cwd: str, arguments: list[str], files: list[str], largest_file: int | None) -> None:
    os.setsid()
    if largest_file is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    os.chdir(cwd)
    for number, path in enumerate(files, start=1):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), number)
    sys.argv[:] = ["rbm", *arguments]
    from rbm.cli import main

    main()
