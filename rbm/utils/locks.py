"""Locks of folders and files that one process at a time may write to; the system releases those of a killed process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from rbm.utils.files import disk_errors


@contextmanager
def only_process(lock: Path, what: str, advice: str) -> Iterator[None]:
    """Hold a lock file, which stays when the lock is released; ``<lock>.pid`` has the process id of its holder.

    Args:
        lock: the file; its folder exists.
        what: the folder or file that is locked, for the message.
        advice: how to go on, for the message.

    Raises:
        BlockingIOError: another process holds it, or this one does elsewhere.
    """
    owner = lock.with_name(f"{lock.name}.pid")  # in the lock file itself, FileLock would overwrite it
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
    """Whether nothing is at this place, or a folder that holds nothing but locks."""
    if not folder.is_dir():
        return not folder.exists()
    return all(file.name.startswith(".") and file.name.endswith((".lock", ".lock.pid")) for file in folder.iterdir())


def _read(owner: Path) -> str:
    try:
        return str(int(owner.read_text()))
    except (OSError, ValueError):  # it has just begun, or just ended
        return "(unknown)"
