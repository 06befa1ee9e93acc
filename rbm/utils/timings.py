"""Seconds of the phases of a run, as stored in ``timings.json``."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


class Timings(dict[str, dict[str, float | bool]]):
    """Phase -> its figures, ``seconds`` first; ``cached`` is true if these are the time of reading a former result.

    Phases do not overlap: a phase measured inside another one is not part of the outer one. ``evaluation_seconds`` are
    part of a phase's ``seconds`` (see :func:`part_of_phase`). ``total`` is the time since this object was made.
    """

    def __init__(self) -> None:
        super().__init__()
        self._began = time.perf_counter()

    @contextmanager
    def measured(self, phase: str) -> Iterator[None]:
        """Add the time inside to the seconds of ``phase``, except for that of phases measured inside."""
        outer, own, started = _measured.get(), _Measurement(self, phase), time.perf_counter()
        token = _measured.set(own)
        try:
            yield
        finally:
            _measured.reset(token)
            took = time.perf_counter() - started
            self.add(phase, "seconds", took - own.inside)
            if outer is not None and outer.timings is self:
                outer.inside += took

    def add(self, phase: str, name: str, seconds: float) -> None:
        """Add seconds to a figure of a phase."""
        figures = self.setdefault(phase, {"seconds": 0.0})
        figures[name] = round(figures.get(name, 0.0) + seconds, 6)  # limits the digits of sums of many short epochs

    def end(self) -> None:
        """Set ``total`` to the seconds since the beginning."""
        self["total"] = {"seconds": round(time.perf_counter() - self._began, 3)}


@dataclass
class _Measurement:
    """A phase that is being measured, and the seconds of other phases inside it."""

    timings: Timings
    phase: str
    inside: float = 0.0


_measured: ContextVar[_Measurement | None] = ContextVar("measured", default=None)


@contextmanager
def part_of_phase(name: str) -> Iterator[None]:
    """Add the time inside to the figure ``<name>_seconds`` of the phase that is being measured, if there is one."""
    measurement = _measured.get()
    if measurement is None:
        yield
        return
    started = time.perf_counter()
    yield
    measurement.timings.add(measurement.phase, f"{name}_seconds", time.perf_counter() - started)


def time_sentence(timings: dict[str, dict[str, float | bool]]) -> str:
    """One sentence on where the time of a run went, from :class:`Timings` or the content of ``timings.json``."""
    whole = timings["total"]["seconds"]
    seconds = {phase: figures["seconds"] for phase, figures in timings.items() if phase != "total"}
    parts = [f"{phase} {took:.1f}" for phase, took in seconds.items()]
    parts.append(f"other {max(0.0, whole - sum(seconds.values())):.1f}")
    evaluation = sum(figures.get("evaluation_seconds", 0.0) for figures in timings.values())
    return f"Time: {whole:.1f} s ({', '.join(parts)}); {evaluation:.1f} s of it evaluated models after their epochs."
