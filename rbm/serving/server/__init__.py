"""A finished student behind HTTP: ``rbm serve RUN``, or :func:`make_app` inside a server of your own.

``requests`` turns bodies into rows, ``batching`` answers the rows of several requests by one forward, ``app`` holds the
paths, ``connections`` guards the sockets, and ``run`` starts and stops the whole. Starlette and uvicorn are imported
when they are needed: they come with the extra ``serve``.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from rbm.serving.server.limits import Limits
from rbm.utils.files import optional

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ["Limits", "make_app", "serve"]


def make_app(
    student: nn.Module | Path | str,
    *,
    method: str | None = None,
    quantize: str | None = None,
    limits: Limits | None = None,
    threads: int = 1,
) -> "Starlette":
    """An ASGI application that answers for a student.

    Limits on connections and on slow heads of requests are the server's, which :func:`serve` sets up; all others are
    the application's own.

    Args:
        student: a run folder, or a student of this package on the CPU, which is put into eval mode.
        method: whose student of a run folder; by default the one that it keeps.
        quantize: ``int8`` for weights of 8 bits, as in :func:`rbm.load`.
        limits: what one client may ask for.
        threads: threads of a forward.

    Returns:
        The application. ``app.state.service.reload()`` reads the run folder anew.

    Raises:
        FileNotFoundError, ValueError: no finished run, no student of ``method`` in it, or one that does not answer.
        ModuleNotFoundError: Starlette is not installed.
    """
    optional("starlette", "serve", "rbm serve")
    from rbm.serving.server.app import build

    return build(student, limits or Limits(), threads, method, quantize)


def serve(
    run: Path | str,
    *,
    method: str | None = None,
    quantize: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    threads: int = 1,
    limits: Limits | None = None,
    tell: Callable[[str], object] = print,
) -> None:
    """Serve the student of a run folder until SIGTERM or SIGINT; SIGHUP reads the folder anew.

    Args:
        run: folder of a finished run.
        method: whose student; by default the one that the run keeps.
        quantize: ``int8`` for weights of 8 bits, as in :func:`rbm.load`.
        host: address to listen at.
        port: port to listen at; 0 takes a free one, which the first line names.
        threads: threads of a forward.
        limits: what one client may ask for.
        tell: receives a line when the server listens, and one for each reload.

    Raises:
        FileNotFoundError, ValueError: no finished run, no student of ``method``, or limits that the system does not
            grant.
        OSError: the address is in use, or not of this machine.
        ModuleNotFoundError: Starlette or uvicorn is not installed.
    """
    for package in ("starlette", "uvicorn"):
        optional(package, "serve", "rbm serve")
    from rbm.serving.server.run import run_forever

    app = make_app(run, method=method, quantize=quantize, limits=limits, threads=threads)
    run_forever(app, host, port, tell)
