"""Files: endings, YAML, atomic writing, and the optional packages that some formats need."""

import json
import os
from collections.abc import Callable, Iterable
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


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then rename it: a kill leaves the old file or the new one.

    A failure of ``write`` leaves no temporary file.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        write(partial)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON, atomically."""
    text = json.dumps(content, indent=2) + "\n"
    write_atomically(path, lambda partial: partial.write_text(text))
