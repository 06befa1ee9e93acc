"""Files: endings, text, JSON and YAML, atomic writing, and the optional packages that some formats need."""

import csv
import errno
import io
import itertools
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

_MOST_DESCRIPTION = 2**22
_MOST_VALUES = 2**16


def check_ending(what: str, path: Path | str, endings: Iterable[str]) -> Path:
    """The path, if it ends as one of ``endings``; else ValueError, which calls the file ``what``."""
    path = Path(path)
    if path.suffix not in endings:
        raise ValueError(f"{what} {path} ends in {path.suffix!r}, expected one of {', '.join(endings)}")
    return path


def with_home(what: str, path: Path | str) -> Path:
    """``path`` with a leading ``~`` or ``~user`` written out; a ValueError where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(
            f"{what} is {path}, but no such user is known here; expected the folder, written out"
        ) from None


def read_text(path: Path | str, what: str = "", *, most: int | None = None) -> str:
    """The text of a file in UTF-8.

    Args:
        path: the file.
        what: what messages call it, before its path.
        most: bytes that it may have.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not UTF-8, or more bytes.
    """
    path, name = Path(path), f"{what} {path}".strip()
    if not path.is_file():
        raise FileNotFoundError(f"{name} does not exist")
    if most is not None and path.stat().st_size > most:
        raise ValueError(f"{name} has {path.stat().st_size:,} bytes, expected at most {most:,}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not text in UTF-8: {error}") from error


def read_json(path: Path | str, what: str = "") -> dict[str, Any]:
    """The object that a JSON file describes; FileNotFoundError or ValueError, which call the file ``what``."""
    name = f"{what} {path}".strip()
    try:
        content = json.loads(read_text(path, what, most=_MOST_DESCRIPTION))
    except RecursionError as error:
        raise ValueError(f"{name} is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name} holds {type(content).__name__}, expected names and values")
    return content


def read_yaml(what: str, path: Path | str) -> Any:
    """What a YAML file says; FileNotFoundError or ValueError, which call the file ``what``."""
    text = read_text(path, what, most=_MOST_DESCRIPTION)
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise ValueError(f"{what} {path} is not valid YAML: {error}") from error


def parse_yaml(text: str) -> Any:
    """What YAML says; ValueError where it is not valid, nested too deeply, or grows by its aliases."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count_nodes(node, {})
        return loader.construct_document(node)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except Exception as error:  # a text that is no number after the tag "!!int" may raise nearly anything
        raise ValueError(str(error)) from error


def _count_nodes(node: yaml.Node, known: dict[int, int]) -> int:
    """Values in a node where every alias is written out: a few lines of aliases may stand for billions."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = 0  # its count is under way
        parts = itertools.chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_count_nodes(part, known) for part in parts)
    if known[id(node)] == 0:
        raise ValueError("an alias stands for what holds it")
    if known[id(node)] > _MOST_VALUES:
        raise ValueError(f"it stands for more than {_MOST_VALUES:,} values")
    return known[id(node)]


def first_line(error: Exception) -> str:
    """What an error of another package says, in one line: without a stack of C++ frames, advice, and colours."""
    lines = re.sub(r"\x1b\[[\d;]*m", "", str(error)).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def optional(package: str, extra: str, what: str, otherwise: str = "") -> ModuleType:
    """A package that is not installed with this one; ModuleNotFoundError says what needs it, and how to get it."""
    try:
        return import_module(package)
    except ImportError as error:
        hint = f", {otherwise}" if otherwise else ""
        raise ModuleNotFoundError(
            f"{what} needs {package}, which is not installed: pip install 'rbm-kernels[{extra}]'{hint}"
        ) from error


def write_atomically(path: Path, write: Callable[[Path], object], size: int | None = None) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then rename it: a kill leaves the old file or the new one.

    The temporary file has an unpredictable name, such as ``.name-x1y2z3.partial``. A failure leaves none; its message
    tells the ``size`` in bytes, if that is known.

    Raises:
        IsADirectoryError: ``path`` is a folder; before ``write`` is called.
        OSError: as :func:`disk_errors` tells it.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, expected the name of a file to write")
    partial = path.with_name(f".{path.name}-{secrets.token_hex(8)}.partial")
    with disk_errors(path, size):
        partial.touch(exist_ok=False)
        try:
            write(partial)
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
            if path.exists():
                os.chmod(partial, path.stat().st_mode)
            os.replace(partial, path)
        except BaseException:
            with suppress(OSError):  # what went wrong first counts
                partial.unlink(missing_ok=True)
            raise


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Write a file whose content is in memory, atomically. Libraries that write by themselves may abort the process
    where the disk is full: what they make is taken into memory first, and written here.
    """
    write_atomically(path, lambda partial: partial.write_bytes(content), len(content))


def write_text(path: Path, text: str) -> None:
    """Write a file of text (UTF-8), atomically."""
    write_bytes(path, text.encode())


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], columns: Iterable[str] | None = None) -> None:
    """Write rows under a header, atomically; the columns are those of the first row where none are given."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, rows[0] if columns is None else columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def append_csv(path: Path, rows: Sequence[Mapping[str, Any]], columns: Iterable[str] | None = None) -> None:
    """Add rows to the end of a file, or begin one with a header; the columns are those of the first row where none are
    given. A row that was written stays, whatever happens to the process.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk_errors(path), open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, rows[0] if columns is None else columns, lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path, *, missing_ok: bool = False) -> list[dict[str, str]]:
    """The rows of a file under their header; with ``missing_ok`` none where there is no file."""
    if missing_ok and not path.exists():
        return []
    return list(csv.DictReader(io.StringIO(read_text(path), newline="")))


DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


@contextmanager
def disk_errors(path: Path, size: int | None = None) -> Iterator[None]:
    """Inside, a disk that is full, damaged or read-only is an OSError whose sentence names ``path`` and its ``size``
    in bytes, if that is known, and what is free there.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS or error.strerror is None:  # reported already
            raise
        wanted = "" if size is None else f" {size:,} bytes are to be written;"
        told = type(error)(f"{path} could not be written: {error.strerror};{wanted} {_free(path.parent)}")
        told.errno = error.errno  # and no strerror: then its text is the sentence alone
        raise told from error


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free:,} bytes are free in {folder}"
    except OSError:
        return f"{folder} cannot be read either"


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
    write_text(path, as_json(content))
