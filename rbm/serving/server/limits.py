"""Limits on what clients may request from the server."""

from dataclasses import dataclass

from rbm.utils.arguments import check_positive, check_sizes


@dataclass(frozen=True)
class Limits:
    """Limits of the server. A request beyond one gets status 413 if it is too large, or 503 if it may be retried.

    Attributes:
        body_bytes: maximum bytes of a request body.
        rows: maximum rows per request and per forward.
        queue_rows: maximum rows that wait for a forward, over all requests.
        connections: maximum open connections. Twice as many are accepted, and those beyond the limit get status 503.
        timeout: seconds for the headers of a request, for its body, for a connection between two requests, and for a
            client that does not read the response.
        grace: seconds to finish open requests when the server stops.

    Raises:
        TypeError: a limit is not a number, or one of the first four is not a whole number.
        ValueError: a limit is not above zero, or ``queue_rows`` is below ``rows``.
    """

    body_bytes: int = 8 * 2**20
    rows: int = 4096
    queue_rows: int = 16384
    connections: int = 512
    timeout: float = 10.0
    grace: float = 10.0

    def __post_init__(self) -> None:
        check_sizes(**{name: getattr(self, name) for name in ("body_bytes", "rows", "queue_rows", "connections")})
        for name in ("timeout", "grace"):
            check_positive(name, getattr(self, name))
        if self.queue_rows < self.rows:
            raise ValueError(
                f"queue_rows is {self.queue_rows}, expected at least the {self.rows} rows that one request may have;"
                " raise it (--max-queue), or lower rows (--max-rows)"
            )

    @property
    def held_bytes(self) -> int:
        """Maximum bytes of the bodies of all requests that are not answered yet."""
        return 8 * self.body_bytes

    @property
    def row_bytes(self) -> int:
        """Maximum bytes of one request's rows as float32; JSON that spells out each number never reaches it."""
        return 4 * self.body_bytes
