"""The time budget of a run: elapsed and remaining time, and the share for each comparison."""

import math
import time

# Maximum time of a comparison, in multiples of ``--seconds``. A smoke run, which takes one round, has no such limit.
COMPARISONS, SMOKE = 12, 0.5
# Below the first share of the planned time nothing is compiled. A comparison gets at least the second share.
TOO_LATE, LEAST = 0.4, 0.1


class Pace:
    """A budget for tests with given weights: shares shrink if earlier tests took more than theirs."""

    def __init__(self, budget: float, weights: list[float], clock=time.perf_counter) -> None:
        """``budget`` in seconds, infinite for none; one weight per test, in the order in which they run."""
        self._budget, self._weights, self._clock = budget, weights, clock
        self._begin, self._done = clock(), 0

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._begin

    @property
    def place(self) -> str:
        """Number of the current test and of all tests, such as 3/72."""
        return f"{self._done + 1}/{len(self._weights)}"

    @property
    def left(self) -> float:
        """Estimated seconds of the remaining tests at the current pace; unknown before the first test ends."""
        done, all_ = sum(self._weights[: self._done]), sum(self._weights)
        return self.elapsed * (all_ - done) / done if done else math.nan

    @property
    def share(self) -> float:
        """The share of their planned time that remaining tests can have: 1 if the run is on schedule."""
        if self._budget == math.inf:
            return 1.0
        planned = self._budget * sum(self._weights[self._done :]) / sum(self._weights)
        return min(1.0, max(LEAST, (self._budget - self.elapsed) / planned)) if planned else LEAST

    @property
    def is_over(self) -> bool:
        """Whether the budget is spent."""
        return self.elapsed > self._budget

    @property
    def may_compile(self) -> bool:
        """Whether there is time for compilation, which takes seconds per shape."""
        return self.share > TOO_LATE

    def limit(self, seconds: float) -> float:
        """Maximum seconds of a comparison that should take ``seconds``."""
        return math.inf if seconds < SMOKE else COMPARISONS * seconds * self.share

    def next(self) -> None:
        """Count a finished test."""
        self._done += 1


def minutes(seconds: float) -> str:
    """Format seconds such as 4:05."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}" if math.isfinite(seconds) else "?:??"
