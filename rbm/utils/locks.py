"""Locks for folders and files with one writer at a time; the system releases the locks of a killed process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from rbm.utils.files import disk_errors


@contextmanager
def only_process(lock: Path, what: str, advice: str) -> Iterator[None]:
    """Hold a lock file, which remains after release; ``<lock>.pid`` contains the process id of its holder.

    Args:
        lock: the file; its folder must exist.
        what: the locked folder or file, for the message.
        advice: what to do, for the message.

    Raises:
        BlockingIOError: another process holds the lock, or this process does so elsewhere.
    """
    owner = lock.with_name(f"{lock.name}.pid")  # FileLock would overwrite it in the lock file itself
    held = FileLock(lock)
    try:
        held.acquire(timeout=0)
    except Timeout:
        raise BlockingIOError(f"{what} is in use by process {_read(owner)}; {advice}") from None
    try:
        with disk_errors(owner):
            owner.write_text(str(os.getpid()))
        yield
    finally:
        with suppress(OSError):
            owner.unlink()
        held.release()


def is_free(folder: Path) -> bool:
    """Whether ``folder`` does not exist or contains only locks."""
    if not folder.is_dir():
        return not folder.exists()
    return all(file.name.startswith(".") and file.name.endswith((".lock", ".lock.pid")) for file in folder.iterdir())


def _read(owner: Path) -> str:
    try:
        return str(int(owner.read_text()))
    except (OSError, ValueError):  # the holder has just started or just ended
        return "(unknown)"
