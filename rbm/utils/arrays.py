"""NumPy files: sizes in a header are checked against the file and the memory before an array is made."""

import math
import os
import zipfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from rbm.utils.files import first_line

try:
    import resource
except ModuleNotFoundError:  # Windows
    resource = None

_APART = 16
_CONTAINER = Path("/sys/fs/cgroup/memory.max")


def check_memory(what: str, size: int) -> None:
    """Raise ValueError if ``size`` bytes exceed the memory of this machine or the limit of this process."""
    if size > (limit := _memory()):
        raise ValueError(f"{what} would take {_gib(size)} of memory, and this process may have {_gib(limit)}")


def _memory() -> int:
    limits = []
    if hasattr(os, "sysconf"):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if resource is not None and (soft := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        limits.append(soft)
    with suppress(OSError, ValueError):  # "max" means that the container has no limit
        limits.append(int(_CONTAINER.read_text(encoding="utf-8")))
    return min(limits, default=2**47)


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"


def open_npy(path: Path, mode: str = "r") -> np.ndarray:
    """Open an ``.npy`` as a memory map: pages are read when they are needed.

    Args:
        path: the file.
        mode: ``"r"``, or ``"c"`` for copy-on-write.

    Raises:
        ValueError: the file is not an ``.npy`` or damaged; the message gives the reason without the file's name.
    """
    try:
        with open(path, "rb") as file:
            if file.read(2) == b"PK":
                raise ValueError("it holds an archive, not one array; its name should end in .npz")
            file.seek(0)
            _check_header(file, os.fstat(file.fileno()).st_size)
        return np.load(path, mmap_mode=mode, allow_pickle=False)
    except Exception as error:  # a damaged header raises nearly anything
        raise ValueError(first_line(error)) from error


class NpyFile:
    """An ``.npy`` that is read in parts, while other processes may write to its folder.

    It is not mapped, which takes as long: the process would end if the file is truncated while a part is copied.

    Args:
        path: the file.

    Attributes:
        shape, dtype: of its array.

    Raises:
        ValueError: as for :func:`open_npy`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state = self._written()  # before it is opened: a file that replaces it in between is noticed
        array = open_npy(path)
        self.shape, self.dtype, self._offset = array.shape, array.dtype, array.offset
        self._by_columns = not array.flags.c_contiguous

    def read(self, start: int, stop: int) -> np.ndarray:
        """The rows ``start`` to ``stop - 1`` of an array of one or two dimensions.

        Raises:
            ValueError: the file is not the one that was opened first, with the same content.
        """
        rows, width = stop - start, math.prod(self.shape[1:])
        if self._by_columns:
            # Columns that are a power of two apart would share lines of the caches.
            parts = np.empty((width, rows + _APART), self.dtype)[:, :rows]
            array, places = parts.T, range(start, start + width * self.shape[0], self.shape[0])
        else:
            array = np.empty((rows, *self.shape[1:]), self.dtype)
            parts, places = [array], [start * width]
        try:
            with open(self.path, "rb") as file:
                read = 0
                for part, place in zip(parts, places, strict=True):
                    file.seek(self._offset + place * self.dtype.itemsize)
                    read += file.readinto(part.reshape(-1).view(np.uint8))
        except OSError as error:
            raise ValueError(first_line(error)) from error
        if read != array.nbytes or self._written() != self._state:
            raise ValueError("another process has changed it since it was opened; repeat the command")
        return array

    def _written(self) -> tuple[int, int]:
        # Not the inode, whose number changes on some network file systems.
        try:
            found = self.path.stat()
        except OSError as error:
            raise ValueError(first_line(error)) from error
        return found.st_size, found.st_mtime_ns


def read_npz(path: Path, wanted: Iterable[str] | Callable[[str], bool]) -> tuple[list[str], dict[str, np.ndarray]]:
    """Read the wanted arrays of an ``.npz``; the others are not read, however large they are.

    Args:
        path: the file.
        wanted: names, or a predicate on names. Names that the file lacks are ignored.

    Returns:
        All names, and the wanted arrays by name.

    Raises:
        ValueError: as for :func:`open_npy`, a duplicate name, or an array larger than memory.
    """
    chosen = wanted if callable(wanted) else set(wanted).__contains__
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
            if len(entries) < len(archive.infolist()):
                raise ValueError("it holds two arrays of one name")
            if not all(map(str.isprintable, entries)):
                raise ValueError("it holds an array whose name is not text")
            return list(entries), {name: _read(archive, entries[name]) for name in entries if chosen(name)}
    except Exception as error:  # a damaged archive raises nearly anything
        raise ValueError(first_line(error)) from error


def pickled_arrays(path: Path) -> list[str]:
    """The names of arrays in an ``.npz`` that are pickled Python objects, according to their headers.

    Empty if the file is damaged or not an ``.npz``, which :func:`read_npz` reports.
    """
    found = []
    with suppress(Exception), zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            with archive.open(entry) as file:
                if _read_header(file)[1].hasobject:
                    found.append(entry.filename.removesuffix(".npy"))
    return found


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(entry) as file:
        _check_header(file, entry.file_size)
    check_memory(entry.filename, entry.file_size)
    with archive.open(entry) as file:
        array = np.lib.format.read_array(file, allow_pickle=False)
        file.read()  # zipfile verifies the checksum at the end
    return array


def _read_header(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype that an ``.npy`` declares; ValueError unless the header describes an array of numbers."""
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    if version not in read:
        raise ValueError(f"its header has version {version}, which arrays of numbers do not need")
    try:
        shape, _, dtype = read[version](file)
    except Exception as error:  # it is evaluated as a Python literal, which may raise nearly anything
        raise ValueError("its header cannot be parsed") from error
    return shape, dtype


def _check_header(file: BinaryIO, size: int) -> None:
    """Raise ValueError unless an ``.npy`` of ``size`` bytes fits the array that its header declares."""
    shape, dtype = _read_header(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, whose pickle may run any code")
    if any(isinstance(length, bool) or length < 0 for length in shape):
        raise ValueError(f"its header declares the shape {list(shape)}")
    declared, held = math.prod(shape) * dtype.itemsize, size - file.tell()
    if declared > held:
        raise ValueError(f"its header declares {list(shape)} of {dtype}, {declared} bytes, but {held} follow")
