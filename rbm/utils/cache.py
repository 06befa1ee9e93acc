"""A cache of results, keyed by the content of their inputs: random walks and teachers need not be computed twice.

A file of the cache is a safetensors file whose metadata hold a checksum and, on request, a few values beside the
tensors. A file that is damaged, or was not written by this version, counts as missing.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from filelock import FileLock
from torch import Tensor

from rbm.utils.files import write_bytes
from rbm.utils.tensor_files import fingerprint, read_sealed, sealed

Entry: TypeAlias = tuple[dict[str, Tensor], dict[str, Any]]


class Cache:
    """A folder of tensors, each file named by a hash of the settings and the tensors that it follows from.

    Files are written beside their place and renamed, so that a kill leaves a whole file or none. Of processes that want
    the same one computes it, and the others wait. The folder may be deleted at any time.

    Args:
        folder: where files lie; made when the first is written. None keeps nothing: everything is computed.

    Attributes:
        taken: the kinds of which a result was there already.

    Raises:
        FileExistsError: the folder is a file.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.taken: set[str] = set()
        if self.folder is not None and self.folder.exists() and not self.folder.is_dir():
            raise FileExistsError(f"cache is {folder}, which is a file; expected a folder")

    def tensors(
        self,
        kind: str,
        settings: dict[str, Any],
        inputs: Iterable[Tensor],
        compute: Callable[[], dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        """What ``compute`` returns, on the CPU, taken from the folder where it is known.

        Args:
            kind: what it is, for example ``"deepwalk"``; the beginning of the file's name.
            settings: everything beside ``inputs`` that the result depends on; values that JSON can hold.
            inputs: tensors that it depends on, dense or CSR, on any device.
            compute: gives the tensors by name.
        """
        return self.tensors_with_values(kind, settings, inputs, lambda: (compute(), {}))[0]

    def tensors_with_values(
        self, kind: str, settings: dict[str, Any], inputs: Iterable[Tensor], compute: Callable[[], Entry]
    ) -> Entry:
        """As :meth:`tensors`, and beside the tensors a dictionary of values that JSON can hold."""
        if self.folder is None:
            return compute()
        path = self._path(kind, settings, inputs)
        if (known := _read(path)) is not None:
            self.taken.add(kind)
            return known
        with _alone(path):
            entry = _read(path)  # another process may have been faster
            if entry is not None:
                self.taken.add(kind)
            else:
                tensors, values = compute()
                entry = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, values
                _write(path, *entry)
        return entry

    def holds(self, kind: str, settings: dict[str, Any], inputs: Iterable[Tensor]) -> bool:
        """Whether :meth:`tensors` would find this result there already."""
        return self.folder is not None and _read(self._path(kind, settings, inputs)) is not None

    def _path(self, kind: str, settings: dict[str, Any], inputs: Iterable[Tensor]) -> Path:
        return self.folder / f"{kind}-{fingerprint(kind, settings, inputs)}.safetensors"


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other processes from computing ``path``, and remove the lock afterwards, also after a failure."""
    lock = path.with_name(f".{path.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):  # the system releases it where its process is killed
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)  # a process that waits for it finds the file, or makes it
            with suppress(OSError):  # it is not empty, unless nothing came of its first file
                path.parent.rmdir()


def _read(path: Path) -> Entry | None:
    """The content of a file; None where there is none, or one that is not ours or that a disk has damaged."""
    try:
        return read_sealed(path, unsealed=False) if path.is_file() else None
    except ValueError:
        return None


def _write(path: Path, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    content = sealed(tensors, values)
    path.parent.mkdir(parents=True, exist_ok=True)  # gone, if the process that held the lock before has failed
    write_bytes(path, content)
