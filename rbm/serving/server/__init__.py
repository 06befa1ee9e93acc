"""Serve a finished student over HTTP: ``rbm serve RUN``, or :func:`make_app` inside a server of your own.

``requests`` parses bodies into rows, ``batching`` runs the rows of several requests in one forward, ``app`` has the
routes, ``connections`` limits the sockets, and ``run`` starts and stops the server. Starlette and uvicorn are imported
only when needed; they come with the extra ``serve``.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from rbm.serving.server.limits import Limits
from rbm.utils.arguments import check_sizes
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
    """An ASGI application that serves a student's predictions.

    Limits on connections and on slow request headers are enforced by the server that :func:`serve` sets up, all others
    by the application.

    Args:
        student: a run folder, or a student of this package on the CPU, which is put into eval mode.
        method: the method of the student in a run folder; by default the student that the run keeps.
        quantize: ``int8`` for 8-bit weights, as in :func:`rbm.load`.
        limits: limits on what clients may request.
        threads: threads per forward.

    Returns:
        The application. ``app.state.service.reload()`` reloads the run folder.

    Raises:
        FileNotFoundError, ValueError: no finished run, no student of ``method`` in it, a student that does not work, or
            no thread.
        TypeError: ``limits`` is something else than :class:`Limits`.
        ModuleNotFoundError: Starlette is not installed.
    """
    check_sizes(threads=threads)
    if not isinstance(limits, Limits | None):
        raise TypeError(f"limits is {limits!r}, expected Limits(...) of rbm.serving.server, or None")
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
    """Serve the student of a run folder until SIGTERM or SIGINT; SIGHUP reloads the folder.

    Args:
        run: folder of a finished run.
        method: the method of the student; by default the student that the run keeps.
        quantize: ``int8`` for 8-bit weights, as in :func:`rbm.load`.
        host: address to listen on.
        port: port to listen on; 0 picks a free one, which the first line names.
        threads: threads per forward.
        limits: limits on what clients may request.
        tell: receives a line when the server listens, and one for each reload.

    Raises:
        FileNotFoundError, ValueError: no finished run, no student of ``method``, limits that the system does not allow,
            or a port beyond 65535.
        OSError: the address is in use, is not a valid one, or does not belong to this machine.
        ModuleNotFoundError: Starlette or uvicorn is not installed.
    """
    for package in ("starlette", "uvicorn"):
        optional(package, "serve", "rbm serve")
    from rbm.serving.server.run import run_forever

    app = make_app(run, method=method, quantize=quantize, limits=limits, threads=threads)
    run_forever(app, host, port, tell)
