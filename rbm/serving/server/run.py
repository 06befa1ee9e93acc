"""The server as a process: its socket, its signals, and how it stops."""

import asyncio
import contextlib
import errno
import math
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette

from rbm.serving.server.app import Service
from rbm.serving.server.connections import connection_class, watch
from rbm.utils.arguments import check_at_least

# Connections that the system queues until they are accepted; it may queue fewer (net.core.somaxconn).
_BACKLOG = 1024
_HIGHEST_PORT = 2**16 - 1
# Open files in addition to connections: libraries, the socket, a run folder that is being read.
_OTHER_FILES = 100


def run_forever(app: Starlette, host: str, port: int, tell: Callable[[str], object]) -> None:
    """See :func:`rbm.serving.server.serve`."""
    service: Service = app.state.service
    _allow_files(2 * service.limits.connections + _OTHER_FILES)
    server = make_server(app)
    with contextlib.closing(listen(host, port)) as listener, _signals_stop(server):
        asyncio.run(_serve_and_reload(server, listener, service, tell))


def make_server(app: Starlette) -> uvicorn.Server:
    """The server, with the limits of the application; ``server.should_exit = True`` stops it."""
    service: Service = app.state.service
    limits = service.limits
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=connection_class(limits, service.metrics),
            ws="none",
            lifespan="on",
            backlog=_BACKLOG,
            timeout_keep_alive=math.ceil(limits.timeout),
            timeout_graceful_shutdown=math.ceil(limits.grace),
            server_header=False,
            proxy_headers=False,
            access_log=False,
            log_config=None,
            log_level="error",  # with one warning per bad request, a client could fill the disk
        )
    )


async def run_server(server: uvicorn.Server, listener: socket.socket) -> None:
    """Serve until the server is told to exit."""
    limits = server.config.app.state.service.limits
    watching = asyncio.create_task(watch(server.server_state.connections, limits.timeout))
    try:
        await server.serve(sockets=[listener])
    finally:
        watching.cancel()


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Raises:
        OSError: the address is in use, is not a valid one, or does not belong to this machine; the message names it.
        TypeError, ValueError: ``port`` is not a whole number from 0 to 65535.
    """
    if check_at_least("port", port, 0) > _HIGHEST_PORT:  # the system would listen on its remainder
        raise ValueError(f"port is {port}, expected at most {_HIGHEST_PORT}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )[0]
        # The protocol is given explicitly: otherwise asyncio leaves Nagle's algorithm on, which delays bodies by 40 ms.
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener
    except (OSError, UnicodeError) as error:  # the latter for a host that is too long for a name
        number = getattr(error, "errno", None) or 0
        reason = os.strerror(number) if number > 0 else getattr(error, "strerror", error)
        other = "--port" if number in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise OSError(f"host {host!r}, port {port}: cannot listen there ({reason}); name another by {other}") from error


async def _serve_and_reload(
    server: uvicorn.Server, listener: socket.socket, service: Service, tell: Callable[[str], object]
) -> None:
    async def reload() -> None:
        try:
            tell(await service.reload())
        except Exception as error:  # a damaged folder may raise anything and must not stop the server
            tell(f"not reloaded, the former student goes on answering: {error}")

    tasks = set()  # the event loop holds only weak references to tasks

    def on_hangup() -> None:
        task = asyncio.get_running_loop().create_task(reload())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, on_hangup)
    tell(_first_line(service, listener))  # from here on, all signals are handled
    await run_server(server, listener)


@contextlib.contextmanager
def _signals_stop(server: uvicorn.Server) -> Iterator[None]:
    """Let signals stop the server before it handles them itself, and after it has stopped and raises them again.

    Their default handlers would end the process at these times with an exit status other than 0.
    """

    def stop(*_: object) -> None:
        server.should_exit = True

    former = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _allow_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        if hard != resource.RLIM_INFINITY and hard < count:
            raise ValueError(
                f"connections: so many need {count} open files, and the system allows this process {hard}; allow fewer"
                " connections, or raise the limit (ulimit -Hn)"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def _first_line(service: Service, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    served, limits = service.served, service.limits
    widths = "" if served.encodings is None else f" ({served.features} features, then {served.beside})"
    return (
        f"{served.name} at http://{f'[{host}]' if ':' in host else host}:{port}/predict: rows of {served.in_channels}"
        f" numbers{widths}, {served.num_classes} classes; at most {limits.body_bytes:,} bytes and {limits.rows:,} rows"
        f" per request, {limits.queue_rows:,} rows waiting, {limits.connections:,} connections,"
        f" {limits.timeout:g} s to send or receive"
    )
