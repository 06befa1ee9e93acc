"""Seconds of the phases of a run, as ``timings.json`` has them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timings(dict[str, dict[str, float | bool]]):
    """Phase -> its figures, ``seconds`` first; ``cached`` is true where these are of reading a former result."""

    @contextmanager
    def measured(self, phase: str) -> Iterator[None]:
        """Add the time inside to the seconds of ``phase``."""
        started = time.perf_counter()
        yield
        before = self.get(phase, {}).get("seconds", 0.0)
        self[phase] = {"seconds": round(before + time.perf_counter() - started, 3)}
