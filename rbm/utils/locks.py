"""Locks for folders and files with one writer at a time; the system releases the locks of a killed process."""

import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from rbm.utils.files import disk_errors

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None


@contextmanager
def only_process(lock: Path, what: str, advice: str) -> Iterator[None]:
    """Hold a lock file, which remains after release; ``<lock>.pid`` contains the process id of its holder.

    Args:
        lock: the file; its folder must exist.
        what: the locked folder or file, for the message.
        advice: what to do, for the message.

    Raises:
        BlockingIOError: another process holds the lock, or this process does so elsewhere.
        PermissionError: this process may not open the lock.
    """
    owner = lock.with_name(f"{lock.name}.pid")  # FileLock would overwrite it in the lock file itself
    held = FileLock(lock)
    try:
        held.acquire(timeout=0)
    except Timeout:
        raise BlockingIOError(f"{what} is in use by process {_read(owner)}; {advice}") from None
    except PermissionError:  # another user has made the file
        raise PermissionError(f"{what}: no permission to open its lock {lock}; remove it, or allow it") from None
    try:
        with disk_errors(owner):
            owner.write_text(str(os.getpid()), encoding="utf-8")
        yield
    finally:
        with suppress(OSError):
            owner.unlink()
        held.release()


@contextmanager
def locked_partial(partial: Path) -> Iterator[None]:
    """Hold a lock on the temporary file of :func:`rbm.utils.files.write_atomically`, which marks it as being written.

    Where the system has no such locks, the file stays unmarked.
    """
    if fcntl is None:
        yield
        return
    while True:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Until it is locked, another process may take the file for an abandoned one.
            if _is_at(partial, descriptor):
                yield
                return
        finally:
            os.close(descriptor)


def remove_abandoned(path: Path) -> None:
    """Remove temporary files of ``path`` that killed processes left, if they were under :func:`locked_partial`.

    Files that a process is writing, on this machine or on another one with the same file system, stay.
    """
    if fcntl is None:
        return
    name = re.compile(rf"\.{re.escape(path.name)}-[0-9a-f]{{16}}\.partial")
    with suppress(OSError):
        for partial in [entry for entry in path.parent.iterdir() if name.fullmatch(entry.name)]:
            with suppress(OSError):  # being written, of another user, or removed by now
                _remove_unlocked(partial)


def _remove_unlocked(partial: Path) -> None:
    descriptor = os.open(partial, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(partial, descriptor):
                partial.unlink()
    finally:
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def is_free(folder: Path) -> bool:
    """Whether ``folder`` does not exist or contains only locks."""
    if not folder.is_dir():
        return not folder.exists()
    return all(file.name.startswith(".") and file.name.endswith((".lock", ".lock.pid")) for file in folder.iterdir())


def _read(owner: Path) -> str:
    for _ in range(20):
        with suppress(OSError, ValueError):
            return str(int(owner.read_text(encoding="utf-8")))
        time.sleep(0.01)  # the holder has just started or just ended
    return "(unknown)"
