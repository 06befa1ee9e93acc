"""Errors of commands: a user's mistake, a full disk or an interruption becomes one sentence and an exit status."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import typer

from rbm.cli.options import status
from rbm.utils.files import DISK_ERRORS, with_home

THE_SAME = "the same command"
_FAILED = 2  # the exit status
EXPECTED = (ValueError, TypeError, OSError, FloatingPointError, ModuleNotFoundError)
C = TypeVar("C", bound=Callable)


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM: a command ends as by Ctrl-C, so that locks, bars and unfinished files are cleared away."""


def one_sentence(command: C) -> C:
    """Turn an error that a user can mend into one sentence and an exit status, in place of a traceback."""

    @wraps(command)
    def run(*arguments, **options):
        before = signal.signal(signal.SIGTERM, _terminate)
        try:
            _check_empty(options)
            return command(*arguments, **{name: _written_out(name, value) for name, value in options.items()})
        except EXPECTED as error:
            if not getattr(error, "told_by_first", False):  # one of several processes prints it for all
                _say(str(error), getattr(error, "advice", ""))
            raise typer.Exit(_FAILED) from error
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            _say("out of memory; a smaller graph, batch or student, or a machine with more of it, helps")
            raise typer.Exit(_FAILED) from error
        except KeyboardInterrupt as error:
            name = "terminated" if isinstance(error, Terminated) else "interrupted"
            _say(name, getattr(error, "advice", "no file was left half-written"))
            raise typer.Exit(128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)) from error
        finally:
            signal.signal(signal.SIGTERM, before)

    return run


@contextmanager
def goes_on_by(how: str) -> Iterator[None]:
    """Inside, an interruption and a failure of the disk say how the work is continued."""
    try:
        yield
    except KeyboardInterrupt as error:
        error.advice = f"what is done so far is kept; continue by {how}"
        raise
    except OSError as error:
        if error.errno in DISK_ERRORS:
            error.advice = f"what is done so far is kept; when that is mended, continue by {how}"
        raise


def _check_empty(options: dict[str, Any]) -> None:
    """An empty text is most often a variable of a shell that was not set."""
    for name, value in options.items():
        if value == "":
            raise ValueError(f"--{name.strip('_').replace('_', '-')} is empty; give it a value, or leave it out")


def _written_out(name: str, value: Any) -> Any:
    """A path, or several, with a leading ``~`` written out: shells leave it in what is quoted, and after ``=``."""
    if isinstance(value, list):
        return [_written_out(name, each) for each in value]
    return with_home(name, value) if isinstance(value, Path) else value


def _terminate(*_) -> None:
    raise Terminated


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return "DefaultCPUAllocator" in str(error)  # PyTorch has no class of its own for it on the CPU


def _say(text: str, advice: str = "") -> None:
    status.print("[bold red]Error:[/]", end=" ")
    status.print(f"{text}; {advice}" if advice else text, markup=False, highlight=False, soft_wrap=True)
