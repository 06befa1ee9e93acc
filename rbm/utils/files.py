"""Files: endings, YAML, atomic writing, and the optional packages that some formats need."""

import json
import os
import secrets
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

    The temporary file has an unpredictable name, such as ``.name-x1y2z3.partial``. A failure leaves none.

    Raises:
        IsADirectoryError: ``path`` is a folder; before ``write`` is called.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, expected the name of a file to write")
    partial = path.with_name(f".{path.name}-{secrets.token_hex(8)}.partial")
    partial.touch(exist_ok=False)
    try:
        write(partial)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        if path.exists():
            os.chmod(partial, path.stat().st_mode)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def same_file(first: Path | str, second: Path | str) -> bool:
    """Whether two paths lead to one file, be it by links; a file that does not exist is the same as its own path."""
    first, second = Path(first), Path(second)
    if first.exists() and second.exists():
        return first.samefile(second)
    return first.resolve() == second.resolve()


def as_json(content: Any) -> str:
    """Indented JSON, as all files of this package have it."""
    return json.dumps(content, indent=2) + "\n"


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON, atomically."""
    text = as_json(content)
    write_atomically(path, lambda partial: partial.write_text(text))
