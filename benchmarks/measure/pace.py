"""The budget of a run: the time that is used and left, and the share that a comparison may take."""

import math
import time

# A comparison may take so many times ``--seconds``, and a smoke run, which takes one round anyway, whatever it takes.
COMPARISONS, SMOKE = 12, 0.5
# Behind so far, as a share of what was planned, nothing is compiled; a comparison gets no less than this share.
TOO_LATE, LEAST = 0.4, 0.1


class Pace:
    """A budget over tests of known weights: shares shrink where earlier tests took more than theirs."""

    def __init__(self, budget: float, weights: list[float], clock=time.perf_counter) -> None:
        """``budget`` in seconds, infinite for none; a weight for every test, in the order in which they run."""
        self._budget, self._weights, self._clock = budget, weights, clock
        self._begin, self._done = clock(), 0

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._begin

    @property
    def place(self) -> str:
        """Such as 3/72: the test that runs, of how many."""
        return f"{self._done + 1}/{len(self._weights)}"

    @property
    def left(self) -> float:
        """Seconds that the tests to come will take at the pace of those that were: none known before the first."""
        done, all_ = sum(self._weights[: self._done]), sum(self._weights)
        return self.elapsed * (all_ - done) / done if done else math.nan

    @property
    def share(self) -> float:
        """What the tests to come can have of what was planned for them: 1 where the run is in time."""
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
        """Whether there is time for what takes seconds of each shape."""
        return self.share > TOO_LATE

    def limit(self, seconds: float) -> float:
        """Seconds that one comparison may take, of which ``seconds`` are wanted."""
        return math.inf if seconds < SMOKE else COMPARISONS * seconds * self.share

    def next(self) -> None:
        """One test is over."""
        self._done += 1


def minutes(seconds: float) -> str:
    """Such as 4:05."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}" if math.isfinite(seconds) else "?:??"
