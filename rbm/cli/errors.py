"""Errors of commands: a mistake, a full disk or an interruption is reported in one sentence with an exit status."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import typer

from rbm.cli.options import status
from rbm.utils.console import print_line
from rbm.utils.files import DISK_ERRORS, as_path

SAME_COMMAND = "the same command"
_FAILED = 2  # the exit status
EXPECTED = (ValueError, TypeError, OSError, FloatingPointError, ModuleNotFoundError)
C = TypeVar("C", bound=Callable)


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM, so that a command ends as with Ctrl-C and cleans up locks, bars and unfinished files."""


def one_sentence(command: C) -> C:
    """Report an error that the user can fix as one sentence and an exit status instead of a traceback."""

    @wraps(command)
    def run(*arguments, **options):
        before = signal.signal(signal.SIGTERM, _terminate)
        try:
            _check_empty(options)
            return command(*arguments, **{name: _written_out(name, value) for name, value in options.items()})
        except EXPECTED as error:
            if not getattr(error, "reported_by_rank0", False):  # one of several processes prints it for all
                _say(_message(error), getattr(error, "advice", ""))
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
def advise_resuming(command: Callable[[], str] = lambda: SAME_COMMAND) -> Iterator[None]:
    """Add how to continue the work to the message of an interruption or disk failure inside the block: by ``command``,
    which is asked only then.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        error.advice = f"what is done so far is kept; continue by {command()}"
        raise
    except OSError as error:
        if error.errno in DISK_ERRORS:
            error.advice = f"what is done so far is kept; when that is mended, continue by {command()}"
        raise


def _check_empty(options: dict[str, Any]) -> None:
    """Reject empty strings, which usually come from an unset shell variable."""
    for name, value in options.items():
        if value == "":
            raise ValueError(f"--{name.strip('_').replace('_', '-')} is empty; give it a value, or leave it out")


def _written_out(name: str, value: Any) -> Any:
    """Expand a leading ``~`` in a path or a list of paths: shells do not do so inside quotes or after ``=``."""
    if isinstance(value, list):
        return [_written_out(name, item) for item in value]
    return as_path(name, value) if isinstance(value, Path) else value


def _terminate(*_) -> None:
    raise Terminated


def _message(error: BaseException) -> str:
    """The message of an error. Python's own on a file without permission begins with a number and gives no remedy."""
    if isinstance(error, PermissionError) and error.strerror is not None and error.filename is not None:
        return f"no permission for {error.filename}; allow it, or name another"
    return str(error)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return "DefaultCPUAllocator" in str(error)  # on the CPU, PyTorch raises a plain RuntimeError


def _say(text: str, advice: str = "") -> None:
    status.print("[bold red]Error:[/]", end=" ")
    print_line(status, f"{text}; {advice}" if advice else text)
