"""Tables of numbers as text, compressed or not, fast enough for the 62 million lines of ogbn-products.

``numpy.fromstring`` parses whole chunks in C, in about half the time of ``numpy.loadtxt``, and needs the memory of only
one chunk in addition to the result.
"""

import codecs
import gzip
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from rbm.utils.arrays import check_memory

CHUNK_BYTES = 2**24
_LONGEST_LINE = 2**28
_EMPTY = "line {} is empty, expected numbers; remove it, or write the missing row"

_BARE_RETURN = (
    "line 1 has a carriage return inside, expected lines that end in line feeds; save the file with the line ends of"
    " Unix or Windows"
)

_TO_SPACES = bytes.maketrans(b",\t\r\n", b"    ")
_NO_SEPARATORS = bytes(set(range(256)) - set(b",\n"))
_GAPS = {b"na", b"n/a", b"#n/a", b"null", b"none", b"?", b"-"}


def read_table(
    path: Path, dtype: type, *, rows: int | None = None, columns: int | None = None, header: bool = False
) -> np.ndarray:
    """Read a table ``[rows, columns]`` from lines of numbers separated by commas, blanks or tabs.

    Args:
        path: the file; ``.gz`` files are decompressed.
        dtype: dtype of the result.
        rows: the expected number of lines; if given, the table is filled in place, without a second copy.
        columns: the expected numbers per line; by default as many as on the first line.
        header: skip a first line that does not consist of numbers. A row with a gap, such as ``0.5,NA``, is no header.

    Raises:
        ValueError: the file is corrupt, a line has more or fewer numbers than the first or contains something else, or
            there are not ``rows`` lines of ``columns`` numbers.
    """
    # A line has at least two bytes, and one compressed byte expands to at most 1,032.
    if rows is not None and 2 * rows > path.stat().st_size * (1032 if path.suffix == ".gz" else 1) + 2:
        raise ValueError(f"{path} has too few bytes for the {rows} lines expected; is it cut short?")
    chunks = read_chunks(path, dtype, columns=columns, header=header)
    if rows is None:
        found = list(chunks)
        return np.concatenate(found) if found else np.empty((0, columns or 0), dtype)
    table, filled = None, 0
    for chunk in chunks:
        if table is None:
            check_memory(f"{path}: a table of {rows} lines", rows * chunk.shape[1] * np.dtype(dtype).itemsize)
            table = np.empty((rows, chunk.shape[1]), dtype)
        if filled + len(chunk) > rows:
            raise ValueError(f"{path} has more than the {rows} lines expected")
        table[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
    if filled < rows:
        raise ValueError(f"{path} has {filled} lines, expected {rows}; is it cut short?")
    return np.empty((0, columns or 0), dtype) if table is None else table


def read_chunks(path: Path, dtype: type, *, columns: int | None = None, header: bool = False) -> Iterator[np.ndarray]:
    """Read a table like :func:`read_table`, but in order, in chunks ``[rows, columns]`` of 16 MiB of text.

    A header alone gives one chunk ``[0, columns]``, an empty file none.
    """
    line, names = 1, None
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, text in enumerate(_lines(file)):
                if number == 0:
                    _check_returns(text)
                    text = text.removeprefix(codecs.BOM_UTF8)  # otherwise the first line would be taken for a header
                    if header:
                        text, names = _without_header(text)
                if not text.strip():
                    continue
                if line == 1:
                    line, found = 1 + (names is not None), len(_fields(text.partition(b"\n")[0]))
                    if not text.partition(b"\n")[0].strip():
                        raise ValueError(_EMPTY.format(line))
                    if columns is not None and found != columns:
                        raise ValueError(f"line {line} has {found} columns, expected {columns}")
                    columns = found
                chunk = _parse(text, dtype, columns, line)
                line += len(chunk)
                yield chunk
        if line == 1 and names is not None:
            yield np.empty((0, names), dtype)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ValueError(f"{path} is no table of numbers: {error}") from error


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The file in chunks of whole lines, without the newline at the end of a chunk."""
    rest = b""
    while block := file.read(CHUNK_BYTES):
        if len(rest) > _LONGEST_LINE:
            raise ValueError(f"it holds a line of more than {_LONGEST_LINE} bytes")
        whole, newline, rest = (rest + block).rpartition(b"\n")
        if newline:
            yield whole
    if rest := rest.rstrip():
        yield rest


def is_blank(path: Path) -> bool:
    """Whether a file has nothing but blanks and line ends."""
    with path.open("rb") as file:
        return not any(block.strip() for block in iter(lambda: file.read(CHUNK_BYTES), b""))


def first_line_fault(line: str, error: Exception) -> str:
    """What keeps Python's reader from dividing the first line of a ``.csv`` into fields."""
    return _BARE_RETURN if "\r" in line else f"line 1: {error}"


def _check_returns(text: bytes) -> None:
    """Raise ValueError if lines end in carriage returns alone: the table would be one line."""
    if b"\r" in text.partition(b"\n")[0].rstrip():
        raise ValueError(_BARE_RETURN)


def _without_header(text: bytes) -> tuple[bytes, int | None]:
    """The text below its header, and the number of the header's columns; None if the first line consists of numbers."""
    first, _, below = text.partition(b"\n")
    _check_names(first, below.partition(b"\n")[0])
    if all(is_number(field) for field in _fields(first)):
        return text, None
    # A row that was skipped as a header would be missing, and all rows below would be one off.
    fields = [field.strip() for field in first.split(b"\t" if b"\t" in first else b",")]
    if all(is_number(field) or field.lower() in _GAPS for field in fields):
        raise ValueError(_odd_line(first, 1))
    if any(b"." in field and is_number(field) for field in fields):
        raise ValueError(f"{_odd_line(first, 1)}; in a header, no name is a fraction")
    return below, len(first.split(b",") if b"," in first else first.split())


def _fields(line: bytes) -> list[bytes]:
    return line.translate(_TO_SPACES).split()


def _check_names(line: bytes, second: bytes) -> None:
    """Raise ValueError for a first line that pandas writes by default: the data would be one row or column off.

    Two column names are told apart from two numbers by the next line: pandas writes every fraction with a point.
    """
    names = [name.strip(b' \t\r"') for name in line.split(b",")]
    if len(names) > 1 and not names[0]:
        raise ValueError(
            "line 1 begins with a comma, expected a name or a number there; the column below may be an index of rows,"
            " as pandas writes it: write the table with index=False"
        )
    numbered = len(names) > 1 and names == [b"%d" % i for i in range(len(names))]
    if numbered and (len(names) > 2 or all(b"." in field for field in second.split(b","))):
        counted = "0, 1" if len(names) == 2 else f"0, 1, 2 to {len(names) - 1}"
        raise ValueError(
            f"line 1 counts {counted}, as pandas names columns, expected other names or a row of numbers: write the"
            " table with header=False; a row that counts so can be in a .npy file"
        )


def is_number(field: str | bytes) -> bool:
    """Whether a field of a table reads as a number, as NaN and infinity do.

    ``2020_01`` does not: only Python has underscores in numbers.
    """
    try:
        float(field)
    except ValueError:
        return False
    return "_" not in str(field)


def _odd_line(text: bytes, line: int) -> str:
    """A message on the first line that does not consist of the expected numbers; empty if all lines do."""
    for number, fields in enumerate(text.split(b"\n"), line):
        if not all(is_number(field) for field in _fields(fields)):
            shown = ascii(fields.strip()[:60].decode("utf-8", "replace"))
            words = {word.lower() for word in _fields(fields)}
            hint = "; write true and false as 1 and 0" if words & {b"true", b"false"} else ""
            hint = "; fill in the missing number" if words & _GAPS else hint
            hint = "; write numbers without quotes" if b'"' in fields else hint
            hint = "; replace the semicolons between columns by commas" if b";" in fields else hint
            hint = "; save the file as UTF-8" if b"\0" in fields else hint
            hint = "; remove the lines of comments" if fields.lstrip()[:1] in (b"#", b"%") else hint
            return f"line {number} is {shown}, expected numbers between commas, blanks or tabs{hint}"
    return ""


def _short_line(text: bytes, columns: int, line: int) -> str:
    """Describe the first line with more or fewer numbers, or commas between them, than ``columns`` have, with a hint
    if a field is empty.
    """
    for number, fields in enumerate(text.split(b"\n"), line):
        if not fields.strip():
            return _EMPTY.format(number)
        if (found := len(_fields(fields))) != columns:
            gap = any(not field.strip() for field in fields.split(b",")) and fields.count(b",") == columns - 1
            hint = "; a field is empty: fill in the missing number" if gap else ""
            return f"line {number} holds {found} numbers, expected {columns}{hint}"
        if b"," in text and (commas := fields.count(b",")) != columns - 1:
            hint = "; remove the comma at its end" if fields.rstrip().endswith(b",") else ""
            return f"line {number} holds {commas} commas, expected {columns - 1} between {columns} numbers{hint}"
    return ""


def _parse(text: bytes, dtype: type, columns: int, line: int) -> np.ndarray:
    text = text.rstrip()
    lines = text.count(b"\n") + 1
    where = f"lines {line} to {line + lines - 1}"
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)  # NumPy before 2.3 only warned
        try:
            numbers = np.fromstring(text.translate(_TO_SPACES), dtype, sep=" ")
        except (ValueError, DeprecationWarning) as error:
            raise ValueError(
                _odd_line(text, line) or f"{where} hold something else than {np.dtype(dtype).name} numbers"
            ) from error
    # Check the numbers of each line, not just the total; commas and newlines tell if the file has commas.
    if b"," in text:
        even = text.translate(None, _NO_SEPARATORS) + b"\n" == (b"," * (columns - 1) + b"\n") * lines
    else:
        single = columns == 1 and b" " not in text and b"\t" not in text
        even = single or all(len(fields.split()) == columns for fields in text.split(b"\n"))
    if not even or numbers.size != lines * columns:
        short = _short_line(text, columns, line)
        raise ValueError(f"{where} do not all hold {columns} numbers{f': {short}' if short else ''}")
    return numbers.reshape(lines, columns)
