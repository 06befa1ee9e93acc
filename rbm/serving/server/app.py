"""The routes of the server, and the service behind them."""

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import numpy as np
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import nn

from rbm.serving.server.batching import Batcher
from rbm.serving.server.limits import Limits
from rbm.serving.server.metrics import Metrics
from rbm.serving.server.requests import RefusedError, decode
from rbm.serving.server.student import open_student

_PATHS = "POST /predict, GET /info, GET /health, GET /metrics"
# Bodies below this are parsed in the event loop, in a millisecond or less: waking another thread would take longer.
_SMALL_BODY = 2**16
# Seconds for which the rest of a refused body is read and discarded. If the connection were closed while a client still
# sends, it would never see the reason.
_LINGER = 2.0


class Service:
    """The served student, its queue of requests, and its counters.

    Attributes:
        source: a run folder or a student.
        method: the method of the student in the run folder; None for the student that the run keeps.
        quantize: ``int8``, or None for float32.
        served: the current student.
        held_bytes: bytes of the bodies of requests that are not answered yet.
    """

    def __init__(
        self,
        source: nn.Module | Path | str,
        limits: Limits,
        threads: int,
        method: str | None = None,
        quantize: str | None = None,
    ) -> None:
        self.source, self.method, self.quantize, self.limits = source, method, quantize, limits
        self.served = open_student(source, method, quantize)
        self.metrics, self.held_bytes = Metrics(), 0
        self._threads = threads
        self._renew()

    def _renew(self) -> None:
        """A queue and threads that were never used, since neither threads nor locks outlive their event loop."""
        self.batcher = Batcher(self.limits, self.metrics, self._threads)
        self._reading, self._decoder = asyncio.Lock(), ThreadPoolExecutor(1, thread_name_prefix="rbm-decode")

    async def predict(self, body: bytearray) -> tuple[np.ndarray, np.ndarray]:
        """Classes ``[B]`` and probabilities ``[B, C]`` of a request's rows; RefusedError if they cannot be computed."""
        served = self.served
        if len(body) < _SMALL_BODY:
            rows = decode(body, served, self.limits)
        else:
            # One at a time: rows of Python numbers take several times the memory of the text.
            loop = asyncio.get_running_loop()
            rows = await loop.run_in_executor(self._decoder, decode, body, served, self.limits)
        probabilities = await self.batcher.answer(served, rows)
        if not np.isfinite(probabilities).all():
            raise RefusedError(400, "the rows hold numbers so large that the student's answer is not finite")
        self.metrics.rows += len(rows)
        return probabilities.argmax(axis=1), probabilities

    async def reload(self) -> str:
        """Reload the run folder, and use its student for all requests from now on.

        Returns:
            One sentence on what was done.

        Raises:
            Exception: any error of reading the folder, or ValueError if clients could not send the same rows as before.
                The previous student stays in use.
        """
        async with self._reading:
            try:
                if isinstance(self.source, nn.Module):
                    raise ValueError("the student was given as an object, so there is no run folder to reload")
                loop = asyncio.get_running_loop()
                other = await loop.run_in_executor(None, open_student, self.source, self.method, self.quantize)
                self.served.check_successor(other)
            except Exception:
                self.metrics.reloads["failed"] += 1
                raise
            self.served = other
            self.metrics.reloads["done"] += 1
            return f"{self.source} was reloaded: {other.in_channels} numbers per row, {other.num_classes} classes"

    def close(self) -> None:
        """Stop the threads. Others take their place, so that the application can be started again."""
        self.batcher.close()
        self._decoder.shutdown(wait=False, cancel_futures=True)
        self._renew()


class Refusal(Response):
    """A response that closes the connection after the client has sent the rest of its request."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI interface)."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with anyio.move_on_after(_LINGER):
            await _drop_rest(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drop_rest(receive: Receive) -> None:
    while (await receive()).get("more_body", False):
        pass


def refusal(error: RefusedError, *, close: bool) -> Response:
    """The response to a refused request; ``close`` if its body was not read."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    headers |= {"Connection": "close"} if close else {}
    return (Refusal if close else Response)(error_body(str(error)), error.status, headers, "application/json")


async def predict(request: Request) -> Response:
    """``POST /predict``."""
    service: Service = request.app.state.service
    body = bytearray()
    try:
        try:
            with anyio.fail_after(service.limits.timeout):
                await _read(request, body, service)
        except TimeoutError:
            message = f"the body was not complete after {service.limits.timeout:g} seconds"
            return refusal(RefusedError(408, message), close=True)
        except RefusedError as error:
            return refusal(error, close=True)
        except ClientDisconnect:
            return Response(status_code=400)  # the client has disconnected
        try:
            classes, probabilities = await service.predict(body)
        except RefusedError as error:
            return refusal(error, close=False)
    except asyncio.CancelledError:  # the server stops and no longer waits
        service.batcher.grace = 0.0
        return Response(error_body("the server is stopping"), 503, {"Retry-After": "1"}, "application/json")
    finally:
        service.held_bytes -= len(body)
    return _json({"classes": classes.tolist(), "probabilities": probabilities.tolist()})


async def _read(request: Request, body: bytearray, service: Service) -> None:
    """Fill ``body``; it never exceeds its limit, whatever length the request declares."""
    limits, declared = service.limits, request.headers.get("content-length", "0")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise RefusedError(415, "the body is compressed, expected JSON or .npy as it is")
    if not (declared.isascii() and declared.isdigit()):
        raise RefusedError(400, "Content-Length is not a number of bytes")
    too_long = RefusedError(413, f"the body is too long, expected at most {limits.body_bytes:,} bytes; split it")
    if len(declared) > 20 or int(declared) > limits.body_bytes:
        raise too_long
    async for chunk in request.stream():
        if len(body) + len(chunk) > limits.body_bytes:
            raise too_long
        if service.held_bytes + len(chunk) > limits.held_bytes:
            raise RefusedError(503, "the server is holding too many request bodies; try again", retry_after=1)
        body += chunk
        service.held_bytes += len(chunk)


async def info(request: Request) -> Response:
    """``GET /info``."""
    service: Service = request.app.state.service
    limits = service.limits
    shown = {"body_bytes": limits.body_bytes, "rows": limits.rows, "timeout_seconds": limits.timeout}
    return _json({**service.served.info(), "limits": shown})


async def health(request: Request) -> Response:
    """``GET /health``."""
    alive = request.app.state.service.batcher.alive
    return _json({"status": "ready" if alive else "stopped"}, 200 if alive else 503)


async def metrics(request: Request) -> Response:
    """``GET /metrics``."""
    service: Service = request.app.state.service
    gauges = {
        "rbm_queue_rows": ("Rows that wait for a forward.", service.batcher.waiting_rows),
        "rbm_connections": ("Open connections.", service.metrics.connections),
        "rbm_held_bytes": ("Bodies of requests that are not answered yet.", service.held_bytes),
    }
    return Response(service.metrics.text(gauges), media_type="text/plain; version=0.0.4")


class Counted:
    """Middleware that counts responses by status, and the time of predictions."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on (ASGI interface)."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = time.perf_counter()

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.requests[message["status"]] += 1
                if scope.get("endpoint") is predict:  # the path may have a prefix (uvicorn --root-path)
                    self.metrics.seconds.observe(time.perf_counter() - start)
            await send(message)

        try:
            await self.app(scope, receive, counting)
        except Exception:
            self.metrics.requests[500] += 1  # the outer middleware sends this response
            raise


def build(
    source: nn.Module | Path | str,
    limits: Limits,
    threads: int,
    method: str | None = None,
    quantize: str | None = None,
) -> Starlette:
    """See :func:`rbm.serving.server.make_app`."""
    service = Service(source, limits, threads, method, quantize)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.batcher.start()
        yield
        service.close()

    app = Starlette(
        routes=[
            Route("/predict", predict, methods=["POST"]),
            Route("/info", info),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        middleware=[Middleware(Counted, metrics=service.metrics)],
        exception_handlers={HTTPException: _no_such_path, Exception: _failed},
        lifespan=lifespan,
    )
    app.state.service = service
    # A redirect from /predict/ would have no JSON body, and would lead from https to http behind a proxy.
    app.router.redirect_slashes = False
    return app


async def _no_such_path(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path[:200]} is not served, expected one of {_PATHS}"
    return Response(error_body(message), error.status_code, error.headers, "application/json")


async def _failed(_: Request, error: Exception) -> Response:
    headers = {"Connection": "close"}  # as uvicorn does after a failure
    return Response(error_body("the server failed; its log says why"), 500, headers, "application/json")


def _json(content: dict, status: int = 200) -> Response:
    return Response(to_json(content), status, media_type="application/json")


def error_body(message: str) -> bytes:
    """The JSON body of a response that reports an error."""
    return to_json({"error": message})
