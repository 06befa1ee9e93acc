"""The server's metrics, in the text format of Prometheus."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class Histogram:
    """Counts of the values at or below each of several ascending bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str) -> Iterator[str]:
        """The lines of this histogram."""
        below = 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            below += count
            yield f'{name}_bucket{{le="{bound}"}} {below}'
        yield f"{name}_sum {self.sum}"
        yield f"{name}_count {below}"


class Metrics:
    """The server's metrics, updated only in the thread of the event loop.

    Attributes:
        requests: responses by status, including those to invalid HTTP.
        reloads: reloads by result, ``done`` or ``failed``.
        rows: number of rows that got predictions.
        connections: open connections; always 0 under another server than :func:`rbm.serving.server.serve`.
        seconds: seconds from the headers of a request to ``/predict`` to its response.
        batch_rows: rows per forward.
    """

    def __init__(self) -> None:
        self.requests: Counter[int] = Counter()
        self.reloads: Counter[str] = Counter()
        self.rows, self.connections = 0, 0
        self.seconds, self.batch_rows = Histogram(_SECONDS), Histogram(_ROWS)

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """All metrics as text; ``gauges`` has a description and the current value for each name."""
        return "".join(f"{line}\n" for line in self._lines(gauges))

    def _lines(self, gauges: Mapping[str, tuple[str, float]]) -> Iterator[str]:
        yield from _head("rbm_requests_total", "counter", "Responses by HTTP status.")
        yield from (f'rbm_requests_total{{status="{status}"}} {n}' for status, n in sorted(self.requests.items()))
        yield from _head("rbm_reloads_total", "counter", "Attempts to reload the run folder.")
        yield from (f'rbm_reloads_total{{result="{result}"}} {self.reloads[result]}' for result in ("done", "failed"))
        yield from _head("rbm_rows_total", "counter", "Rows that got predictions.")
        yield f"rbm_rows_total {self.rows}"
        yield from _head(
            "rbm_request_seconds", "histogram", "Seconds from the headers of a request to /predict to its response."
        )
        yield from self.seconds.lines("rbm_request_seconds")
        yield from _head("rbm_batch_rows", "histogram", "Rows per forward.")
        yield from self.batch_rows.lines("rbm_batch_rows")
        for name, (description, value) in gauges.items():
            yield from _head(name, "gauge", description)
            yield f"{name} {value}"


def _head(name: str, kind: str, description: str) -> Iterator[str]:
    yield f"# HELP {name} {description}"
    yield f"# TYPE {name} {kind}"
