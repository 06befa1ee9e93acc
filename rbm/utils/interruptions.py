"""Ctrl-C while a command is still importing, which takes seconds: one sentence instead of a traceback.

``rbm`` imports this first, so it must import nothing that takes time. From then on, :mod:`rbm.cli.errors` reports an
interruption.
"""

import itertools
import os
import sys
from types import TracebackType

_IN_ONE_SENTENCE = "Error: interrupted; no file was left half-written"


def _quieten_command() -> None:
    """Set the hook for uncaught exceptions if this process is the command ``rbm`` or ``python -m rbm``."""
    started = os.path.basename(sys.argv[0]) if sys.argv else ""
    if started in ("rbm", "rbm.exe") or (started == "-m" and _follows(sys.orig_argv, "-m", "rbm")):
        sys.excepthook = _report


def _follows(arguments: list[str], first: str, second: str) -> bool:
    return (first, second) in itertools.pairwise(arguments)


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print(_IN_ONE_SENTENCE, file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


_quieten_command()
