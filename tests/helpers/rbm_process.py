"""``rbm`` in a process of its own, forked in a tenth of a second from one that has imported the package.

A new Python process spends seven seconds of processor time on imports. First use of the package and the behaviour of
processes themselves are tested with ``python -m rbm`` in ``test_cli.py`` and ``test_interruptions.py``.
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
    """A context whose processes have imported the package; with ``method``, it can replace ``get_context``."""
    forkserver.set_forkserver_preload(_PRELOADED)
    # The server does not inherit sys.path.
    with interruptible(), mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


class RbmProcess:
    """``rbm`` with these arguments, in the folder ``cwd`` and a new session.

    ``largest_file``: writes beyond this number of bytes fail as on a full disk.

    Attributes:
        pid: the process id.
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
        """As in ``subprocess``: negative for signals."""
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to this process only."""
        os.kill(self.pid, number)

    def finish(self, timeout: float = 300) -> tuple[str, str]:
        """Wait for the end, and return standard output and standard error.

        Raises:
            AssertionError: it has not ended in time; it is then killed.
        """
        self._process.join(timeout)
        if self.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
            raise AssertionError(f"rbm did not end within {timeout} seconds")
        return tuple(path.read_text() for path in self._files)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C reach processes started inside; processes in a shell's background inherit an ignored SIGINT."""
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
