"""Limits on what clients may ask of the server."""

from dataclasses import dataclass

from rbm.utils.arguments import check_positive, check_sizes


@dataclass(frozen=True)
class Limits:
    """Each limit ends in an answer: 413 for a request that is too large, 503 for one that must come again later.

    Attributes:
        body_bytes: of one request's body.
        rows: of one request, and of one forward.
        queue_rows: rows that wait for a forward, of all requests together.
        connections: open at once. Twice as many are accepted, and the later half gets status 503.
        timeout: seconds for the head of a request, for its body, for a connection between two requests, and for a
            client that takes nothing of its answer.
        grace: seconds for what is in flight when the server is to stop.

    Raises:
        TypeError: one that is no number; of the first four, one that is no whole number.
        ValueError: one that is not above zero, or a queue that is shorter than a request may be.
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
                f"queue_rows is {self.queue_rows}, expected at least the {self.rows} rows that one request may have"
            )

    @property
    def held_bytes(self) -> int:
        """Of the bodies of all requests that are not answered yet."""
        return 8 * self.body_bytes

    @property
    def row_bytes(self) -> int:
        """Of one request's rows as float32; JSON that spells each number never comes near."""
        return 4 * self.body_bytes
