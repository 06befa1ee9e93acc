"""What everything that reads or writes files says in the same words: their endings, and packages that some need."""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType


def check_ending(what: str, path: Path | str, endings: Iterable[str]) -> Path:
    """The path, if it ends as one of ``endings``; else ValueError, which calls the file ``what``."""
    path = Path(path)
    if path.suffix not in endings:
        raise ValueError(f"{what} {path} ends in {path.suffix!r}, expected one of {', '.join(endings)}")
    return path


def optional(package: str, extra: str, what: str, otherwise: str = "") -> ModuleType:
    """A package that is not installed with this one; ModuleNotFoundError says what needs it, and how to get it."""
    try:
        return import_module(package)
    except ImportError as error:
        hint = f", {otherwise}" if otherwise else ""
        raise ModuleNotFoundError(
            f"{what} needs {package}, which is not installed: pip install 'rbm-kernels[{extra}]'{hint}"
        ) from error
