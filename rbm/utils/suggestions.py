"""A suggestion for a misspelt name, as the end of an error message."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'rbm'?"`` for the known name that is most like ``name``; empty if none is similar."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
