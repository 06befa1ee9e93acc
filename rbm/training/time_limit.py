"""Limits of time for trainings. A training that cannot end within its limit is stopped after its first epochs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_clock = time.monotonic


class OutOfTimeError(TimeoutError):
    """A training cannot end within its :func:`time_limit`.

    Attributes:
        needed: seconds that everything inside the limit needs at least.
    """

    def __init__(self, phase: str, needed: float, seconds: float) -> None:
        self.needed = needed
        super().__init__(
            f"phase {phase!r} was cut short: {needed:.1f} s are needed at least, and the limit is {seconds:.1f} s"
        )


class TimeLimit:
    """The time that a block has, and how it was spent.

    Args:
        seconds: the limit.
        repeated: whether the same work follows once more after the block, except for what is reused. It then has to fit
            into the limit twice.

    Attributes:
        reused: seconds so far of work whose result is reused, such as encodings in a cache.
    """

    def __init__(self, seconds: float = float("inf"), *, repeated: bool = False) -> None:
        self.seconds, self.repeated, self.reused = seconds, repeated, 0.0
        self._began, self._checked = _clock(), 0.0

    def passed(self) -> float:
        """Seconds since the block began."""
        return _clock() - self._began

    def check(self, phase: str, remaining: float = 0.0, *, reused: bool = False) -> None:
        """Raise :class:`OutOfTimeError` if a phase that needs ``remaining`` further seconds exceeds the limit.

        With ``reused``, the time since the last check and the remaining time count as work whose result is reused.
        """
        passed = self.passed()
        if reused:
            self.reused += passed - self._checked
        self._checked = passed
        needed = passed + remaining
        if self.repeated:
            needed += needed - self.reused - (remaining if reused else 0.0)
        if needed > self.seconds:
            raise OutOfTimeError(phase, needed, self.seconds)


_limit: ContextVar[TimeLimit | None] = ContextVar("limit", default=None)


@contextmanager
def time_limit(seconds: float, *, repeated: bool = False) -> Iterator[TimeLimit]:
    """Trainings inside the block raise :class:`OutOfTimeError` after the first epoch that shows that they cannot end in
    time. The arguments are those of :class:`TimeLimit`.
    """
    limit = TimeLimit(seconds, repeated=repeated)
    token = _limit.set(limit)
    try:
        yield limit
    finally:
        _limit.reset(token)


def current_limit() -> TimeLimit:
    """The innermost :func:`time_limit`, or one without an end."""
    return _limit.get() or TimeLimit()
