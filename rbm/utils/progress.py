"""Progress on the terminal: one bar a phase, with the current loss and accuracies; or one for many runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Bar:
    """The bar of one phase."""

    def __init__(self, rich: RichProgress, title: str, total: int) -> None:
        self._rich = rich
        self._task = rich.add_task(title, total=total, status="")

    def update(self, epochs: int, status: str) -> None:
        """So many epochs are done; ``status`` is shown behind them."""
        self._rich.update(self._task, completed=epochs, status=status)

    def finish(self) -> None:
        """The phase is over: its epochs so far are all its epochs."""
        done = self._rich.tasks[self._task].completed
        self._rich.update(self._task, total=done)


class Progress:
    """Where a run reports to. ``Progress(None)`` is silent."""

    def __init__(self, console: Console | None) -> None:
        self._console = console or Console(quiet=True)

    def say(self, text: str) -> None:
        """Print one line above the bars."""
        self._console.print(text, highlight=False)

    @contextmanager
    def phase(self, phase: str, total: int) -> Iterator[Bar]:
        """A bar for a training phase of at most ``total`` epochs; where it stops early, the bar ends there."""
        columns = (
            TextColumn("[bold]{task.description:<10}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
        )
        with RichProgress(*columns, console=self._console) as rich:
            bar = Bar(rich, phase, total)
            yield bar
            bar.finish()

    @contextmanager
    def count(self, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """A bar for ``total`` things (None: not known yet), and a function that says how many more are done."""
        columns = (
            TextColumn("[bold]{task.description:<10}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with RichProgress(*columns, console=self._console) as rich:
            task = rich.add_task(what, total=total)
            yield lambda more: rich.advance(task, more)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Something that has no epochs, while it lasts."""
        with self._console.status(name):
            yield


@contextmanager
def count_runs(console: Console | None) -> Iterator[RichProgress]:
    """One line for many runs: how many are done, how long it took and will take, and the field ``what``."""
    columns = (
        *(TextColumn("[bold]{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn()),
        *(TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=False)),
        TextColumn("{task.fields[what]}"),
    )
    with RichProgress(*columns, console=console or Console(quiet=True), speed_estimate_period=3600) as bar:
        yield bar
