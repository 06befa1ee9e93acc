"""A cache of results, keyed by the content of their inputs, so that DeepWalk and teachers are not computed twice.

The cache consists of safetensors files. Their metadata contain a checksum and, if needed, a few values in addition to
the tensors. A file that is damaged, or was not written by this version, counts as missing.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from filelock import FileLock
from torch import Tensor

from rbm.utils.files import as_path, check_utf8, check_writable, write_bytes
from rbm.utils.tensor_files import fingerprint, read_sealed, sealed

Entry: TypeAlias = tuple[dict[str, Tensor], dict[str, Any]]


class Cache:
    """A folder of tensor files, each named by a hash of the settings and input tensors that it depends on.

    Files are written under a temporary name and renamed, so a kill leaves either a complete file or none. If several
    processes need the same result, one computes it and the others wait. The folder may be deleted at any time.

    Args:
        folder: folder of the files, created when the first is written. With None, nothing is cached.

    Attributes:
        taken: the kinds for which a cached result was found.

    Raises:
        FileExistsError: the folder is a file.
        NotADirectoryError, PermissionError: it does not exist and cannot be made.
        ValueError: its path is not UTF-8.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = None if folder is None else as_path("cache", folder)
        self.taken: set[str] = set()
        if self.folder is None:
            return
        check_utf8("cache", self.folder)
        if not self.folder.exists():  # known before a run begins; a folder that may only be read serves known results
            _check_writable(self.folder)
        elif not self.folder.is_dir():
            raise FileExistsError(f"cache is {folder}, which is a file; expected a folder")

    def tensors(
        self,
        kind: str,
        settings: dict[str, Any],
        inputs: Iterable[Tensor],
        compute: Callable[[], dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        """The result of ``compute`` on the CPU, read from the folder if it is cached.

        Args:
            kind: the kind of result, for example ``"deepwalk"``; the file's name begins with it.
            settings: everything except ``inputs`` that the result depends on; JSON values.
            inputs: tensors that it depends on, dense or CSR, on any device.
            compute: returns the tensors by name.
        """
        return self.tensors_with_values(kind, settings, inputs, lambda: (compute(), {}))[0]

    def tensors_with_values(
        self, kind: str, settings: dict[str, Any], inputs: Iterable[Tensor], compute: Callable[[], Entry]
    ) -> Entry:
        """Like :meth:`tensors`, but with a dictionary of JSON values in addition to the tensors."""
        if self.folder is None:
            return compute()
        path = self._path(kind, settings, inputs)
        if (known := _read(path)) is not None:
            self.taken.add(kind)
            return known
        with _alone(path):
            entry = _read(path)  # another process may have written it meanwhile
            if entry is not None:
                self.taken.add(kind)
            else:
                tensors, values = compute()
                entry = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, values
                _write(path, *entry)
        return entry

    def holds(self, kind: str, settings: dict[str, Any], inputs: Iterable[Tensor]) -> bool:
        """Whether :meth:`tensors` would find this result in the cache."""
        return self.folder is not None and _read(self._path(kind, settings, inputs)) is not None

    def _path(self, kind: str, settings: dict[str, Any], inputs: Iterable[Tensor]) -> Path:
        return self.folder / f"{kind}-{fingerprint(kind, settings, inputs)}.safetensors"


@contextmanager
def cache_or_temporary(folder: Path | str | None) -> Iterator[Path]:
    """The folder of a cache, or a temporary one if there is none: what is computed inside is then shared only there.

    Raises the errors of :class:`Cache`.
    """
    Cache(folder)
    with nullcontext(folder) if folder is not None else TemporaryDirectory(prefix="rbm-") as found:
        yield as_path("cache", found)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other processes from computing ``path``, and remove the lock afterwards, even after a failure."""
    _check_writable(path.parent)
    lock = path.with_name(f".{path.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):  # released by the system if the process is killed
        try:
            yield
        finally:
            with suppress(OSError):  # on Windows, which removes no open file, filelock removes it later
                lock.unlink()  # a waiting process finds the result, or computes it
            with suppress(OSError):  # empty only if computing its first file failed
                path.parent.rmdir()


def _check_writable(folder: Path) -> None:
    check_writable(f"cache {folder}", folder, "name another by --cache, or allow it")


def _read(path: Path) -> Entry | None:
    """The content of a file; None if it is missing, damaged, or not written by this package."""
    try:
        return read_sealed(path, unsealed=False) if path.is_file() else None
    except ValueError:
        return None


def _write(path: Path, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Write a file. On a full disk the result is only lost for other runs, which a warning says."""
    content = sealed(tensors, values)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # missing if the process that held the lock before has failed
        write_bytes(path, content)
    except OSError as error:
        logging.getLogger("rbm").warning("The run goes on, but the cache does not keep this result: %s", error)
