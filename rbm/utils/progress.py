"""Progress on the terminal: one bar per phase with the current loss and accuracies, or one bar for several runs.

If standard error is not a terminal, for example a log file, lines are written instead of bars.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.text import Text

from rbm.utils.console import print_line

# Seconds between two lines of one phase.
LOG_SECONDS = 10.0


class Bar:
    """The bar of one phase."""

    def __init__(self, rich: RichProgress, title: str, total: int | None) -> None:
        self._rich = rich
        self._task = rich.add_task(title, total=total, status="")

    def update(self, done: int, status: str = "") -> None:
        """Set the progress to ``done``; ``status`` is shown after the bar."""
        self._rich.update(self._task, completed=done, status=status)

    def finish(self, status: str = "") -> None:
        """End the phase: the current progress becomes the total."""
        self._rich.update(self._task, total=self._rich.tasks[self._task].completed, status=status)


class Lines(Bar):
    """Progress as lines of text: one every ten seconds, and one at the end."""

    def __init__(self, console: Console, title: str, total: int | None) -> None:
        self._console, self._title, self._total = console, title, total
        self._done, self._began = 0, time.monotonic()
        self._written = self._began

    def update(self, done: int, status: str = "") -> None:
        self._done = done
        if time.monotonic() - self._written >= LOG_SECONDS:
            self._write(self._total, status)

    def finish(self, status: str = "") -> None:
        self._write(self._done, status)

    def _write(self, total: int | None, status: str) -> None:
        self._written = time.monotonic()
        count = f"{self._done}" if total is None else f"{self._done}/{total}"
        parts = (self._title, count, status, f"{self._written - self._began:.1f} s")
        print_line(self._console, "  ".join(filter(None, parts)))


class _TimeColumn(ProgressColumn):
    """The remaining time, or the elapsed time if finished."""

    def __init__(self) -> None:
        super().__init__()
        self._remaining = TimeRemainingColumn()

    def render(self, task: Task) -> Text:
        if task.finished:
            return Text(f"{task.finished_time or 0.0:.1f} s", style="progress.elapsed")
        return self._remaining.render(task)


class _LeftColumn(TimeRemainingColumn):
    """The remaining time, or nothing if finished."""

    def render(self, task: Task) -> Text:
        return Text("") if task.finished else Text("left ") + super().render(task)


def _text(form: str, style: str = "none") -> TextColumn:
    """A column of text as it is: names of variants and files may have brackets."""
    return TextColumn(form, style=style, markup=False)


def console_for(given: Console | Literal["auto"] | None) -> Console | None:
    """The console itself, or for ``"auto"`` one on standard error if it is a terminal or a notebook, else None.

    Raises:
        TypeError: ``given`` is none of these.
    """
    if given is None or isinstance(given, Console):
        return given
    if not isinstance(given, str) or given != "auto":
        raise TypeError(f'console is {given!r}, expected a rich.console.Console, "auto", or None to show nothing')
    console = Console(stderr=True)
    return console if _is_watched(console) else None


class Progress:
    """Reports the progress of a run. ``Progress(None)`` is silent; see :func:`console_for`.

    Attributes:
        warn: whether the run also logs warnings about what it trains on.
    """

    def __init__(self, console: Console | Literal["auto"] | None, *, warn: bool = False) -> None:
        self._console, self.warn = console_for(console) or Console(quiet=True), warn

    def say(self, text: str) -> None:
        """Print one line above the bars."""
        print_line(self._console, text)

    @contextmanager
    def phase(self, phase: str, total: int) -> Iterator[Bar]:
        """A bar for a training phase of at most ``total`` epochs; ``finish`` ends it early."""
        columns = (
            *(_text("{task.description:<10}", "bold"), BarColumn(bar_width=12), MofNCompleteColumn()),
            *(_text("{task.fields[status]}"), _TimeColumn()),
        )
        with _bar(self._console, phase, total, columns) as bar:
            yield bar

    @contextmanager
    def count(self, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """A bar for ``total`` items (None: unknown); yields a function to add the number of items done."""
        done = 0

        def advance(more: int) -> None:
            nonlocal done
            done += more
            bar.update(done)

        columns = (_text("{task.description:<10}", "bold"), BarColumn(bar_width=24), MofNCompleteColumn())
        with _bar(self._console, what, total, (*columns, _TimeColumn())) as bar:
            yield advance
            bar.finish()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Show a step without epochs while it runs."""
        if not _is_watched(self._console):
            self.say(name)
            yield
            return
        with self._console.status(Text(name)):
            yield


@contextmanager
def count_runs(console: Console | Literal["auto"] | None, what: str, total: int) -> Iterator[Bar]:
    """One bar for several runs: how many are done, elapsed and remaining time, and the last run."""
    columns = (
        *(_text("{task.description}", "bold"), BarColumn(bar_width=24), MofNCompleteColumn()),
        *(TimeElapsedColumn(), _LeftColumn()),
        _text("{task.fields[status]}"),
    )
    console = console_for(console) or Console(quiet=True)
    with _bar(console, what, total, columns, _RunLines, speed_estimate_period=3600) as bar:
        yield bar


class _RunLines(Lines):
    """A line for each finished run."""

    def update(self, done: int, status: str = "") -> None:
        if done > self._done:
            self._done = done
            self._write(self._total, status)


@contextmanager
def _bar(
    console: Console,
    title: str,
    total: int | None,
    columns: tuple[ProgressColumn, ...],
    lines: type[Lines] = Lines,
    **options: float,
) -> Iterator[Bar]:
    """A bar with these columns, or ``lines`` if nobody watches the console."""
    if not _is_watched(console):
        yield lines(console, title, total)
        return
    with RichProgress(*columns, console=console, **options) as rich:
        yield Bar(rich, title, total)


def _is_watched(console: Console) -> bool:
    return console.is_terminal or console.is_jupyter
