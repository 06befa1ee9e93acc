"""A suggestion for a misspelt name, as the end of an error message."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], *, path: str = "", cutoff: float = 0.6) -> str:
    """``"; did you mean 'rbm'?"`` for the known name that is most like ``name``, with ``path`` before it; empty if
    none is as similar as ``cutoff`` (0 to 1, as for :func:`difflib.get_close_matches`).
    """
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {path + close[0]!r}?" if close else ""
