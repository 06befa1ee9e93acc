"""Limits on connections: uvicorn's protocol with bounds on the number of connections and on waiting times.

uvicorn limits the time between two requests. It limits neither headers that arrive byte by byte nor clients that do not
read the response.
"""

import asyncio
import fcntl
import sys
import termios

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rbm.serving.server.app import error_body, refusal
from rbm.serving.server.limits import Limits
from rbm.serving.server.metrics import Metrics
from rbm.serving.server.requests import RefusedError

# Seconds for which an idle connection stays open when the server stops, since a request may be on its way.
_LAST_REQUESTS = 0.2
_CHUNKS = 4096  # of a body
_CLOSE = (b"connection", b"close")


class Parser(h11.Connection):
    """h11 with a limit on the number of chunks of a body, which h11 accepts at any size.

    A chunk costs some 20 microseconds whatever its size: a few megabytes in chunks of one byte would block the server
    for a minute.
    """

    chunks = 0

    def next_event(self) -> object:
        """Same as in h11, but RemoteProtocolError if there are too many chunks."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.chunks = 0
        elif isinstance(event, h11.Data) and event.chunk_end:
            self.chunks += 1
            if self.chunks > _CHUNKS:
                raise h11.RemoteProtocolError("too many chunks")
        return event


class Connection(H11Protocol):
    """A connection of the server; :func:`connection_class` sets ``limits`` and ``metrics``."""

    limits: Limits
    metrics: Metrics

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.conn = Parser(h11.SERVER)

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Accept the connection, unless there are too many."""
        super().connection_made(transport)
        self.metrics.connections += 1
        self._silent_since = self._taken_at = self.loop.time()
        self._unsent = 0
        if len(self.connections) > 2 * self.limits.connections:
            transport.abort()
        elif len(self.connections) > self.limits.connections:
            self.app = self._say_full

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self.metrics.connections -= 1
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._silent_since = self.loop.time()
        super().on_response_complete()

    def check(self) -> None:
        """Close a connection that has been silent for too long."""
        now, unsent = self.loop.time(), self.transport.get_write_buffer_size()
        left = unsent + self._queued() if unsent else 0
        if left != self._unsent:
            self._unsent, self._taken_at = left, now
        if unsent:
            if now - self._taken_at > self.limits.timeout:
                self.transport.abort()  # close() would wait for the client
        elif self._is_idle() and now - self._silent_since > self.limits.timeout:
            if self.conn.trailing_data[0]:
                self._refuse(408, f"the head of the request was not complete after {self.limits.timeout:g} seconds")
            else:
                self.transport.close()

    def shutdown(self) -> None:
        """Stop after a request that is being answered or on its way; its response says that it is the last."""
        if _CLOSE not in self.server_state.default_headers:
            self.server_state.default_headers.append(_CLOSE)
        if self._is_idle():
            self.loop.call_later(_LAST_REQUESTS, super().shutdown)
        else:
            self.cycle.default_headers = self.server_state.default_headers
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Respond to data that is not valid HTTP."""
        if self.conn.chunks > _CHUNKS:
            msg = f"its body comes in more than {_CHUNKS} chunks, send larger ones"
        self._refuse(400, f"the request is not valid HTTP: {msg}")

    def _queued(self) -> int:
        """Bytes that the system holds for the client, or 0 where it does not tell.

        It takes more only when a third of its buffer, which may have megabytes, is free: a slow client needs longer.
        """
        try:
            size = fcntl.ioctl(self.transport.get_extra_info("socket"), termios.TIOCOUTQ, bytes(4))
        except (OSError, ValueError):
            return 0
        return int.from_bytes(size, sys.byteorder)

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _refuse(self, status: int, message: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # a response has already begun
            self.transport.abort()
            return
        if self.cycle is not None:
            self.cycle.disconnected = True  # it must not send a response as well
        self.metrics.requests[status] += 1
        body = error_body(message)
        # A response to HEAD has no body. Before a whole head has come, ``scope`` is that of an earlier request.
        bodiless = self.conn.our_state is h11.SEND_RESPONSE and self.scope["method"] == "HEAD"
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        for event in (
            h11.Response(status_code=status, headers=list(headers.items())),
            h11.Data(data=b"" if bodiless else body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    async def _say_full(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.metrics.requests[503] += 1
        message = f"{self.limits.connections} connections are open already; try again"
        await refusal(RefusedError(503, message, retry_after=1), close=True)(scope, receive, send)


def connection_class(limits: Limits, metrics: Metrics) -> type[Connection]:
    """The connection class for uvicorn, with these limits and metrics."""
    return type("Connection", (Connection,), {"limits": limits, "metrics": metrics})


async def watch(connections: set[Connection], timeout: float) -> None:
    """Check all connections periodically."""
    while True:
        await asyncio.sleep(timeout / 10)
        for connection in list(connections):
            connection.check()
