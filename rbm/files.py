"""What everything that reads or writes files says in the same words: their endings, YAML, packages that some need."""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml


def check_ending(what: str, path: Path | str, endings: Iterable[str]) -> Path:
    """The path, if it ends as one of ``endings``; else ValueError, which calls the file ``what``."""
    path = Path(path)
    if path.suffix not in endings:
        raise ValueError(f"{what} {path} ends in {path.suffix!r}, expected one of {', '.join(endings)}")
    return path


def read_yaml(what: str, path: Path | str) -> Any:
    """What a YAML file says; FileNotFoundError or ValueError, which call the file ``what``."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{what} {path} does not exist")
    try:
        return yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{what} {path} is not valid YAML: {error}") from error


def optional(package: str, extra: str, what: str, otherwise: str = "") -> ModuleType:
    """A package that is not installed with this one; ModuleNotFoundError says what needs it, and how to get it."""
    try:
        return import_module(package)
    except ImportError as error:
        hint = f", {otherwise}" if otherwise else ""
        raise ModuleNotFoundError(
            f"{what} needs {package}, which is not installed: pip install 'rbm-kernels[{extra}]'{hint}"
        ) from error
