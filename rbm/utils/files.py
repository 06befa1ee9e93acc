"""Files: endings, text, JSON and YAML, atomic writing, and optional packages that some formats need."""

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
    """:func:`as_path` of the path, if it has one of ``endings``; ValueError, which calls the file ``what``, if not."""
    path = as_path(what, path)
    if path.suffix not in endings:
        raise ValueError(f"{what} {path} ends in {path.suffix!r}, expected one of {', '.join(endings)}")
    return path


def as_path(what: str, path: Path | str) -> Path:
    """``path`` as a Path, with a leading ``~`` or ``~user`` expanded, as a shell does it.

    Raises:
        TypeError: it is no path; the message calls it ``what``.
        ValueError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except TypeError:
        raise TypeError(f"{what} is {path!r}, expected a path, as str or pathlib.Path") from None
    except RuntimeError:
        raise ValueError(f"{what} is {path}, but no such user is known here; expected the path, written out") from None


def check_utf8(what: str, path: Path | str) -> None:
    """Raise ValueError unless a path or a name is UTF-8, as the files that name it and safetensors need."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} is {str(path)!a}, which is not UTF-8; rename it") from None


def absolute(what: str, path: Path | str) -> str:
    """The absolute form of a path, without ``~`` and ``..``; errors as in :func:`as_path`."""
    return os.path.abspath(as_path(what, path))


def read_text(path: Path | str, what: str = "", *, most: int | None = None) -> str:
    """Read a UTF-8 text file.

    Args:
        path: the file.
        what: what messages call it, before its path.
        most: maximum size in bytes.

    Raises:
        FileNotFoundError: the file does not exist.
        IsADirectoryError: it is a folder.
        ValueError: it is a pipe or a device, which could not be read again; it is not UTF-8, or too large.
    """
    path, name = as_path(what or "file", path), f"{what} {path}".strip()
    if path.is_dir():
        raise IsADirectoryError(f"{name} is a folder, expected a file")
    if not path.exists():
        raise FileNotFoundError(f"{name} does not exist")
    if not path.is_file():
        raise ValueError(f"{name} is a pipe or a device, expected a file; write its content to one")
    if most is not None and path.stat().st_size > most:
        raise ValueError(f"{name} has {path.stat().st_size:,} bytes, expected at most {most:,}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not text in UTF-8: {error}") from error


def read_json(path: Path | str, what: str = "") -> dict[str, Any]:
    """Read a JSON object from a file; OSError as :func:`read_text`, or ValueError, which call the file ``what``."""
    name, text = f"{what} {path}".strip(), read_text(path, what, most=_MOST_DESCRIPTION)
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{name} is nested too deeply") from error
    except ValueError as error:  # also for a whole number of thousands of digits
        raise ValueError(f"{name} is not valid JSON: {_message(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name} holds {type(content).__name__}, expected names and values")
    return content


def read_yaml(what: str, path: Path | str) -> Any:
    """Read a YAML file; OSError as :func:`read_text`, or ValueError, also if it is empty; they call it ``what``."""
    text = read_text(path, what, most=_MOST_DESCRIPTION)
    try:
        content = parse_yaml(text)
    except ValueError as error:
        raise ValueError(f"{what} {path} is not valid YAML: {error}") from error
    if content is None:
        raise ValueError(f"{what} {path} is empty or has comments alone")
    return content


def parse_yaml(text: str) -> Any:
    """Parse YAML; ValueError if it is invalid, nested too deeply, has a key twice, or expands too much by aliases."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count_nodes(node, {}, loader)
        return loader.construct_document(node)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except Exception as error:  # for example, a string with the tag "!!int" may raise nearly anything
        raise ValueError(_message(error)) from error


def _message(error: Exception) -> str:
    """The message of a parser. On a whole number of thousands of digits, Python's own advises to change Python."""
    text = str(error)
    return "it has a whole number of thousands of digits" if "integer string conversion" in text else text


def parse_own_yaml(text: str) -> Any:
    """Parse YAML that the package contains. By libyaml, if PyYAML has it, this takes a tenth of the time."""
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _count_nodes(node: yaml.Node, known: dict[int, int], loader: yaml.SafeLoader) -> int:
    """The number of values in a node with all aliases expanded: a few lines of aliases may expand to billions."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = 0  # being counted
        _check_keys(node, loader)
        parts = itertools.chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_count_nodes(part, known, loader) for part in parts)
    if known[id(node)] == 0:
        raise ValueError("an alias refers to the value that contains it")
    if known[id(node)] > _MOST_VALUES:
        raise ValueError(f"it expands to more than {_MOST_VALUES:,} values")
    return known[id(node)]


def _check_keys(node: yaml.Node, loader: yaml.SafeLoader) -> None:
    """Raise if a mapping has a key twice: PyYAML would take the last value, and leave the first out silently."""
    first: dict[Any, tuple[str, int]] = {}
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        value, line = loader.construct_object(key), key.start_mark.line + 1
        if value in first:
            name, before = first[value]
            same = "" if name == key.value else f" as {key.value}, which is the same"
            raise ValueError(f"the key {name} is in line {before} and again in line {line}{same}; keep one of them")
        first[value] = key.value, line


def first_line(error: Exception) -> str:
    """The message of another package's error in one line, without C++ stack, advice or colours."""
    lines = re.sub(r"\x1b\[[\d;]*m", "", str(error)).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def optional(package: str, extra: str, what: str, otherwise: str = "") -> ModuleType:
    """Import an optional package; ModuleNotFoundError says what needs it and how to install it."""
    try:
        return import_module(package)
    except ImportError as error:
        hint = f", {otherwise}" if otherwise else ""
        raise ModuleNotFoundError(
            f"{what} needs {package}, which is not installed: pip install 'rbm-kernels[{extra}]'{hint}"
        ) from error


def write_atomically(path: Path, write: Callable[[Path], object], size: int | None = None) -> None:
    """Let ``write`` fill a temporary file in the same folder, then rename it: a kill leaves the old or the new file.

    The temporary file has an unpredictable name, such as ``.name-x1y2z3.partial``, and is removed on failure. The error
    message contains the ``size`` in bytes, if known.

    Raises:
        IsADirectoryError: ``path`` is a folder; raised before ``write`` is called.
        OSError: as described in :func:`disk_errors`.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, expected the name of a file to write")
    partial = path.with_name(f".{path.name}-{secrets.token_hex(8)}.partial")
    with disk_errors(path, size):
        partial.touch(exist_ok=False)
        try:
            write(partial)
            with open(partial, "r+b") as file:  # Windows flushes no file that is open for reading alone
                os.fsync(file.fileno())
            if path.exists():
                os.chmod(partial, path.stat().st_mode)
            os.replace(partial, path)
        except BaseException:
            with suppress(OSError):  # the first error is the one to report
                partial.unlink(missing_ok=True)
            raise


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Write bytes to a file, atomically.

    Some libraries abort the process if the disk is full while they write. Their output is made in memory and written
    with this function.
    """
    write_atomically(path, lambda partial: partial.write_bytes(content), len(content))


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file, atomically."""
    write_bytes(path, text.encode())


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], columns: Iterable[str] | None = None) -> None:
    """Write a header and rows, atomically; the columns default to those of the first row."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, rows[0] if columns is None else columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def append_csv(path: Path, rows: Sequence[Mapping[str, Any]], columns: Iterable[str] | None = None) -> None:
    """Append rows to a file, or create it with a header; the columns default to those of the first row.

    Written rows persist, whatever happens to the process.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk_errors(path), open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0] if columns is None else columns, lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path, *, missing_ok: bool = False) -> list[dict[str, str]]:
    """The rows of a file with a header; with ``missing_ok``, a missing file has no rows."""
    if missing_ok and not path.exists():
        return []
    return list(csv.DictReader(io.StringIO(read_text(path), newline="")))


DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


@contextmanager
def disk_errors(path: Path, size: int | None = None) -> Iterator[None]:
    """Turn errors of a full, damaged or read-only disk inside the block into an OSError with a clear message.

    It names ``path``, its ``size`` in bytes, if known, and the free space there.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS or error.strerror is None:  # reported already
            raise
        wanted = "" if size is None else f" {size:,} bytes are to be written;"
        clear_error = type(error)(f"{path} could not be written: {error.strerror};{wanted} {_free(path.parent)}")
        clear_error.errno = error.errno  # without strerror, so that str() is the message alone
        raise clear_error from error


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free:,} bytes are free in {folder}"
    except OSError:
        return f"{folder} cannot be read either"


def check_writable(what: str, folder: Path, remedy: str = "name a file in another folder, or allow it") -> None:
    """Raise before work whose result would be lost if this process may not write to ``folder``, or may not make it.

    Raises:
        NotADirectoryError: it is a file or in one, or it is a link to nothing.
        PermissionError: no permission to write to it, or to the folder in which it would be made.
    """
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not there.is_dir():
        found = "a file" if there.exists() else "a link to nothing"
        raise NotADirectoryError(f"{what}: {there} is {found}, expected a folder; name another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"{what}: no permission to write to {there}; {remedy}")


def same_file(first: Path | str, second: Path | str) -> bool:
    """Whether two paths lead to the same file, also through links; paths that do not exist are compared as paths."""
    first, second = Path(first), Path(second)
    if first.exists() and second.exists():
        return first.samefile(second)
    return first.resolve() == second.resolve()


def as_json(content: Any) -> str:
    """Indented JSON, as in all files of this package."""
    return json.dumps(content, indent=2) + "\n"


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON, atomically."""
    write_text(path, as_json(content))
